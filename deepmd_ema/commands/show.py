"""Description of the content of a model file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.commands.change_bias import describe_record
from deepmd_ema.config import config_summary, rows_of_tasks, saved_config, saved_models
from deepmd_ema.config.labels import METRICS
from deepmd_ema.config.messages import as_text
from deepmd_ema.errors import ConfigError
from deepmd_ema.files import size_of
from deepmd_ema.infer.load import FROZEN_SUFFIXES, describe_average, load_models
from deepmd_ema.interop.pretrained import local_file
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.report.table import render_facts
from deepmd_ema.utils import LIVE

# how files of each kind are called
KINDS = {
    "training": "training checkpoint",
    "average": "averaged weights",
    "best": "best weights",
    "snapshot": "snapshot of an average",
    "weights": "weights",
    "frozen": "frozen model",
    "deepmd": "checkpoint",
}


def describe(path: str | Path, whole_config: bool = False) -> str:
    """Return a description of a checkpoint or a frozen file, or its whole config as JSON.

    Raises:
        CheckpointError: if the file is missing, damaged or not a model.
    """
    path = Path(local_file(str(path)))
    # a checkpoint is read as data, without building its models; a file of DeePMD-kit as a model
    payload = None
    with suppress(checkpoint.DeepmdCheckpointError):
        if path.suffix.lower() not in FROZEN_SUFFIXES:
            payload = checkpoint.load(path)
    if payload is None:
        file = load_models(path)
        infos = {name: loaded.info for name, loaded in file.models.items()}
        info = next(iter(infos.values()))
        if len(infos) > 1:  # what it says is of all models
            info = replace(info, head="")
        path = info.path
        kind = info.kind
        version = info.version
        config = file.config
        models = {name: loaded.model for name, loaded in file.models.items()}
        tensors = ModelSet(models).state_dict()
        weights = iter([("weights", info.describe()), *_bias(info.bias, {})])
        summaries = {
            name: loaded.config.summary() for name, loaded in file.models.items()
        }
        model = rows_of_tasks(summaries, ())
        state = _nearest({name: info.min_nbor_dist for name, info in infos.items()})
    else:
        path = checkpoint.resolve(path)
        kind = payload["kind"]
        version = f"dp-ema {payload['version']}"
        config = payload["config"]
        tensors = payload["model"]
        weights = _weights(payload)
        model = _model(config)
        state = _state(payload)
    if whole_config:
        return as_text(config)
    title = f"{path}: {KINDS[kind]} of {version}, {size_of(path) / 1e6:.2f} MB"
    # the summary of a run has that of its models, which is shown already
    run = [(name, text) for name, text in _run(config) if name not in dict(model)]
    # rows are read from the payload only here, where a damaged file is reported
    with checkpoint.reading(path):
        rows = [
            *weights,
            *model,
            _size(tensors),
            *state,
            *run,
            ("config", "--config prints all of it"),
        ]
    return "\n".join(render_facts(title, rows))


def _weights(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    name = payload["weights"]
    text = "live or averaged, the file does not say"
    if name == LIVE:
        text = LIVE
    elif name:
        text = f"average {name}: {describe_average(payload.get('average', {}))}"
    step = "an unknown step" if payload["step"] is None else f"step {payload['step']:,}"
    yield "weights", f"{text}, {step}"
    profiles = checkpoint.averages_in(payload)
    for average, state in profiles.items():
        option = "--use-ema" if len(profiles) == 1 else f"--average {average}"
        yield (
            "average",
            f"{average}: {describe_average(state)} (freeze it with {option})",
        )
    yield from _bias(payload.get("bias", {}), checkpoint.refitted(payload))
    if part := payload.get("fitted"):
        yield "fitted", f"output {part}, to training frames after the run"


def _state(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _nearest(payload.get("min_nbor_dist"))
    for weights, best in payload.get("best", {}).items():
        # the best files of a run of one task, or those of each task
        for task, state in ({"": best} if "records" in best else best).items():
            # 0.2.0 ranked by other numbers as well
            if state.get("records") and state["metric"][0].upper() in METRICS:
                metric = state["metric"]
                value, step = state["records"][0]
                quantity = METRICS[metric[0].upper()]
                shown = f"{quantity.display_factor * value:.4g} {quantity.display_unit}"
                name = f"{task} {weights}" if task else weights
                yield "best", f"{name} {metric} {shown} at step {step:,}"
    if payload["kind"] == "training":
        yield "restart", "possible: optimizer state and positions in the data are here"


def _model(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    try:
        saved = saved_models(config)
    except ConfigError:  # a config of another version: at least the elements are shown
        elements = config["model"].get("type_map")
        return (
            [("elements", " ".join(map(str, elements)))]
            if isinstance(elements, list)
            else []
        )
    summaries = {head: section.summary() for head, section in saved.configs.items()}
    return rows_of_tasks(summaries, saved.links)


def _run(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of the run; none of a model section alone, or of another version."""
    try:
        return config_summary(saved_config(config)) if "training" in config else []
    except ConfigError:
        return []


def _size(tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    # tensors that tasks share have one address and are counted once; empty tensors have none
    distinct = {
        (t.data_ptr(), t.shape) if t.numel() else name: t for name, t in tensors.items()
    }
    numbers = sum(t.numel() for t in distinct.values())
    size = sum(t.numel() * t.element_size() for t in distinct.values())
    text = f"{numbers:,} numbers in {len(distinct)} tensors, {size / 1e6:.2f} MB"
    return "sizes", f"{text}, {' and '.join(kinds)}"


def _bias(
    record: Mapping[str, Any], refitted: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the output bias.

    Args:
        record: how it was changed; by task if there are several.
        refitted: tensors that were fitted at the end of a run, by name of its weights.
    """
    for task, change in ({"": record} if "mode" in record else record).items():
        yield (
            "bias",
            f"{task}: {describe_record(change)}" if task else describe_record(change),
        )
    if refitted:
        names = {name for tensors in refitted.values() for name in tensors}
        has_layer = any(not name.endswith("out_bias") for name in names)
        what = "output layer and bias" if has_layer else "bias"
        yield (
            "fitted",
            f"{what} after training, for {', '.join(refitted)}; a restart continues from those "
            "before",
        )


def _nearest(
    distance: float | Mapping[str, float | None] | None,
) -> Iterator[tuple[str, str]]:
    for task, nearest in (
        distance if isinstance(distance, Mapping) else {"": distance}
    ).items():
        if nearest:
            prefix = f"{task}: " if task else ""
            yield "nearest pair", f"{prefix}{nearest:.4f} angstrom in the training data"
