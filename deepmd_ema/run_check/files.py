"""The files that a run is going to write, with their number and size, and the memory of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from deepmd_ema.checkpoint.series import keep_count
from deepmd_ema.config import RunConfig
from deepmd_ema.config.due import due_in
from deepmd_ema.config.outputs import BEST, POINTER, RECORD, Outputs
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.optim.build import build_optimizer
from deepmd_ema.training.estimate import num_rows
from deepmd_ema.training.loop.averages import snapshot_every
from deepmd_ema.weight_names import LIVE

NORMALIZED_INPUT = "out.json"  # the default of `dp-ema train -o`
_OF_FILE, _OF_TENSOR = 5_000, 300  # bytes of a file of weights beside its tensors, and of the name of each
_OF_OPTIMIZER = 2.5  # tensors for each parameter
_ROW, _VALUE = 18, 13  # bytes of a row of the learning curve, and of each of its values
_VALIDATION_ROW = 110
_SMALL = 8_000  # bytes; the input with all defaults


class TensorBytes(NamedTuple):
    """Sizes of the tensors of a run, bytes.

    Attributes:
        parameters: number of trained parameters.
        weights: parameters and buffers.
        gradients: of the trained parameters.
        optimizer: moments or covariances.
        average: one average in float64.
        snapshot: a kept copy of an average, in float32.
        num_tensors: in the models.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    average: int
    snapshot: int
    num_tensors: int


@dataclass(frozen=True)
class PlannedFile:
    """Files of one kind.

    Attributes:
        path: with ``*`` for the step.
        content: what they hold.
        number: how many there are after the run.
        size: of one, bytes.
        written: how many are written in all.
    """

    path: str
    content: str
    number: int
    size: int
    written: int


def tensor_bytes(config: RunConfig) -> TensorBytes:
    """Return the sizes of the tensors of a run with all numbers of neighbors resolved."""
    models = build_models({name: task.model for name, task in config.tasks.items()}, config.links)
    trained = {name: p for name, p in models.named_parameters() if p.requires_grad}
    state = models.state_dict()
    number = sum(p.numel() for p in trained.values())
    return TensorBytes(
        parameters=number,
        weights=sum(t.nbytes for t in state.values()),
        gradients=sum(p.nbytes for p in trained.values()),
        optimizer=_optimizer_bytes(config, models),
        average=sum(8 * p.numel() for p in trained.values()),
        snapshot=sum(t.numel() * (4 if name in trained else t.element_size()) for name, t in state.items()),
        num_tensors=len(state),
    )


def _optimizer_bytes(config: RunConfig, models: ModelSet) -> int:
    if isinstance(config.optimizer, LKFConfig):
        from deepmd_ema.optim.lkf import block_sizes

        counts = [p.numel() for p in models.parameters() if p.requires_grad]
        return 8 * sum(size**2 for size in block_sizes(counts, config.optimizer.kf_blocksize))
    optimizer = build_optimizer(config.optimizer, models.named_parameters())
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())


def planned_files(config: RunConfig, num_steps: int, sizes: TensorBytes) -> list[PlannedFile]:
    """Return the files of a run; folders of TensorBoard and of statistics are not among them."""
    return [*_checkpoints(config, num_steps, sizes), *_tables(config, num_steps)]


def _checkpoints(config: RunConfig, num_steps: int, sizes: TensorBytes) -> Iterator[PlannedFile]:
    training, outputs = config.training, Outputs(config)
    names = _OF_TENSOR * sizes.num_tensors
    head, averages = _OF_FILE + names, len(training.averaging)
    saved = due_in(config, num_steps)["checkpoint"].count()
    whole = sizes.weights + sizes.optimizer + averages * sizes.average
    whole += _OF_FILE + int((1 + _OF_OPTIMIZER + averages) * names)

    def kept(most: int | None) -> int:
        most = training.max_ckpt_keep if most is None else most
        return min(saved, keep_count(most, training.ckpt_keep_ratio, num_steps, training.save_freq) or saved)

    def numbered(weights: str) -> str:
        link = outputs.checkpoint_link(weights)
        return str(outputs.checkpoint_folder / f"{link.name.removesuffix(outputs.suffix)}-*{outputs.suffix}")

    yield PlannedFile(numbered(LIVE), "checkpoints", kept(None), whole, saved)
    for average in training.averaging:
        content = f"weights of {average.name}"
        yield PlannedFile(numbered(average.name), content, kept(average.ckpt_keep), sizes.weights + head, saved)
    for average in training.averaging:
        if every := snapshot_every(average, training.save_freq):
            number = max(0, num_steps // every - average.start_step // every) + (num_steps % every > 0)
            name = numbered(average.name).rpartition("/")[2]
            path = str(outputs.snapshot_folder / name)
            yield PlannedFile(path, f"snapshots of {average.name}", number, sizes.snapshot + head, number)
    validations = _num_validations(config, num_steps)
    for weights, task in _validated(config) if outputs.has_best and validations else ():
        path = str(outputs.best_folder / f"{outputs.best_prefix(weights, task)}.ckpt-*{outputs.suffix}")
        number = min(config.validating.max_best_ckpt, validations)
        yield PlannedFile(path, f"{BEST} weights of {weights}", number, sizes.weights + head, validations)


def _tables(config: RunConfig, num_steps: int) -> Iterator[PlannedFile]:
    outputs, rows = Outputs(config), num_rows(config, num_steps)
    columns = sum((1 + len(task.loss.weights)) * (2 if task.is_validated else 1) for task in config.tasks.values())
    curves = [LIVE, *(average.name for average in config.training.averaging if average.lcurve)]
    for weights in curves if config.training.disp_training else ():
        size = rows * (_ROW + _VALUE * columns)
        yield PlannedFile(str(outputs.lcurve(weights)), "learning curve", 1, size, 1)
    validations = _num_validations(config, num_steps)
    for weights, task in _validated(config) if validations else ():
        size = (validations + 5) * _VALIDATION_ROW
        yield PlannedFile(str(outputs.validation_log(weights, task)), "errors of validation", 1, size, 1)
    yield PlannedFile(NORMALIZED_INPUT, "input with all defaults", 1, _SMALL, 1)
    yield PlannedFile(RECORD, "times and programs, for dp-ema show and report", 1, _SMALL, 1)
    yield PlannedFile(POINTER, "name of the newest checkpoint", 1, 20, 1)


def _num_validations(config: RunConfig, num_steps: int) -> int:
    due = due_in(config, num_steps).get("validation")
    return due.count() if due is not None else 0


def _validated(config: RunConfig) -> list[tuple[str, str]]:
    """Return weights and tasks that are validated."""
    tasks = [name for name, task in config.tasks.items() if task.is_validated]
    return [(weights, task) for weights in config.fully_validated for task in tasks]
