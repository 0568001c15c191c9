"""A model from a file: those of this program, and DeePMD-kit's checkpoints and ``.dp`` files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from deepmd_ema import checkpoint
from deepmd_ema.averaging import sigma_rel_of
from deepmd_ema.config import ModelConfig, choose_head, saved_models, to_dict
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.messages import show
from deepmd_ema.distributed.tensors import check_weights
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.infer.compiled import CompiledModel
from deepmd_ema.interop import deepmd_kit, deepmd_pt, dp
from deepmd_ema.interop.parts import chosen
from deepmd_ema.interop.pretrained import local_file
from deepmd_ema.model.build import build_models
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import nested
from deepmd_ema.text import counted
from deepmd_ema.utils import LIVE

Choose: TypeAlias = Callable[[Mapping[str, Sequence[str]]], Iterable[str]]
"""Choice of models of a file, by their names with aliases."""

COMPILED_SUFFIX = ".pt2"
FROZEN_SUFFIXES = (
    ".dp",
    ".yaml",
    ".yml",
    ".hlo",
    COMPILED_SUFFIX,
    *deepmd_kit.SUFFIXES,
)
# by name of a fact about an average, how it is described; in this order
_AVERAGE_TEXTS = {
    "shape": "{} decay of the learning rate",
    "part": "over the last {:.1%} of the run",
    "decay": "decay {:g}",
    "sigma_rel": "sigma_rel {:.4g}",
    "gamma": "gamma {:.4g}",
    "updates": "{}",
    "snapshots": "made of {:,} snapshots",
    "mean_age": "looks back {:,.1f} steps on average",
    "residual": "residual {:.2%}",
}


@dataclass(frozen=True)
class Provenance:
    """Origin of weights.

    Attributes:
        path: the file.
        kind: ``training``, ``average``, ``best``, ``snapshot``, ``weights``, ``frozen``, or
            ``deepmd`` for a checkpoint of DeePMD-kit.
        weights: ``live``, the name of the average, or empty when the file does not say.
        step: optimizer steps of the weights, or None when the file does not say.
        average: profile, settings, updates and mean age of the average; empty for live weights.
        min_nbor_dist: nearest pair of the training data, angstrom, or None.
        version: the program that wrote the file.
        config: the whole config of the run as a dictionary, or only its model section under
            ``model``.
        bias: record of ``dp-ema change-bias`` about the output bias; empty without a change.
        head: name of the model among several; empty for a single one, or if the file has none.
    """

    path: Path
    kind: str
    weights: str = LIVE
    step: int | None = None
    average: Mapping[str, Any] = field(default_factory=dict)
    min_nbor_dist: float | None = None
    version: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    bias: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the record of the weights for a frozen file, as plain values."""
        optional = {"weights": self.weights, "bias": dict(self.bias), "head": self.head}
        present = {name: fact for name, fact in optional.items() if fact}
        return {
            "step": self.step,
            "kind": self.kind,
            "average": dict(self.average),
            **present,
        }

    def describe(self) -> str:
        """Return one line: which of several models, live or which average, of which step."""
        step = "an unknown step" if self.step is None else f"step {self.step:,}"
        text = f"weights of {step}; the file does not say whether they are live or averaged"
        if self.weights == LIVE:
            text = f"live weights of {step}"
        elif self.weights:
            text = f"averaged weights ({self.weights}) of {step}"
            if average := describe_average(self.average):
                text += f": {average}"
        return ", ".join(filter(None, (self.head, text)))


@dataclass(frozen=True)
class LoadedModel:
    """A model that computes, with what its file says about it.

    Attributes:
        model: on the CPU, in evaluation mode.
        config: its model section.
        info: where the weights come from.
        is_compiled: whether the file holds the model as machine code as well.
    """

    model: EnergyModel
    config: ModelConfig
    info: Provenance
    is_compiled: bool = False

    def require_energies(self, what: str) -> None:
        """Check that the model predicts energies.

        Raises:
            UserError: if it does not; ``what`` needs them.
        """
        name = self.config.fitting_net.labels[0]
        if name != ENERGY:
            raise UserError(
                f"{self.info.path}: predicts {name.partition('[')[0]}, and {what} needs energies "
                "and forces."
            )

    def on(
        self, device: str | None
    ) -> tuple[EnergyModel | CompiledModel, torch.device]:
        """Return the model that evaluates batches, and its device.

        Without ``device`` it is that of a compiled file, or that of the machine.

        Raises:
            UserError: if the device is not there, or the file is compiled for another one.
        """
        if self.is_compiled:
            from deepmd_ema.interop.pt2 import load_compiled

            run, where = load_compiled(self.info.path, device)
            return CompiledModel(
                run, self.model, self.config.fitting_net.default_fparam
            ), where
        where = select_device(device)
        return self.model.to(where).eval(), where


@dataclass(frozen=True)
class ModelFile:
    """Every model in a file.

    Attributes:
        models: by name of the task; one without a name is called ``""``.
        config: of the run that trained them, or the section ``model`` only.
    """

    models: Mapping[str, LoadedModel]
    config: Mapping[str, Any]


@contextmanager
def without_modes(device: torch.device | None = None) -> Iterator[None]:
    """Switch off inference mode, autocast on ``device`` and a default device in the body."""
    with ExitStack() as stack:
        # checked first: to enter them takes time in each step of MD
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if device is not None and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def load_model(
    path: str | Path,
    use_average: bool = False,
    average: str | None = None,
    head: str | None = None,
) -> LoadedModel:
    """Return the model in ``path``.

    Args:
        path: a checkpoint of any kind, of DeePMD-kit too, the folder of a run (its latest
            checkpoint), a ``.dp``, ``.yaml`` or ``.pt2`` file, or a ``.pth``, ``.pte`` or ``.pb``
            file, which an installed DeePMD-kit converts; or the name of a published model, which is
            downloaded.
        use_average: takes the averaged weights out of a training checkpoint instead of the file's
            own weights.
        average: which average, when the checkpoint holds several; implies ``use_average``. ``live``
            is the trained weights.
        head: which model of a file that holds several.

    Raises:
        CheckpointError: if the file is missing, damaged or not a model, or lacks an average that is
            requested.
    """
    name = str(path)
    file = load_models(
        path, use_average, average, lambda names: [choose_head(names, head, name)]
    )
    (loaded,) = file.models.values()
    return loaded


@without_modes()
def load_models(
    path: str | Path,
    use_average: bool = False,
    average: str | None = None,
    choose: Choose = lambda names: names,
) -> ModelFile:
    """Return the models in ``path``, see :func:`load_model`.

    ``choose`` gets the names of the models, with their aliases, and returns the names to load. A
    model without a name is called ``""``.
    """
    path = Path(local_file(str(path)))
    wants_live = average == LIVE
    if wants_live:
        use_average = False
        average = None
    use_average = use_average or average is not None
    if path.suffix.lower() in FROZEN_SUFFIXES:
        _ = choose(
            {"": ()}
        )  # a name that is requested raises: the file holds one model
        frozen = _load_frozen(path)
        file = ModelFile({"": frozen}, frozen.info.config)
    else:
        path = checkpoint.resolve(path)
        try:
            payload = checkpoint.load(path)
            with checkpoint.reading(path):
                file = _load_checkpoint(path, payload, use_average, average, choose)
        except checkpoint.DeepmdCheckpointError as error:
            return _load_deepmd(path, error.content, use_average, average, choose)
    info = next(iter(file.models.values())).info
    if wants_live and info.weights != LIVE:
        raise CheckpointError(
            f"{path}: holds {info.weights or 'unnamed'} weights ({info.kind}), not the live ones. "
            "Give the training checkpoint or the folder of the run."
        )
    if use_average and info.weights in (LIVE, ""):
        raise CheckpointError(
            f"{path}: holds {info.weights or 'unnamed'} weights ({info.kind}), no average. Give "
            "the training checkpoint or the file of the average; a run keeps those that "
            "training.averaging lists."
        )
    return file


def describe_average(average: Mapping[str, Any]) -> str:
    """Return a line that describes an average of any type."""
    facts = dict(average)
    if "gamma" in facts:
        facts.setdefault("sigma_rel", sigma_rel_of(facts["gamma"]))
    if "updates" in facts:  # -1 before the first step
        facts["updates"] = counted(max(0, facts["updates"]), "update")
    parts = ["equal weights"] if average.get("type") == "swa" else []
    if "options" in facts:  # an average whose type is not of this program
        parts.append(str(facts.get("type")))
        parts += [f"{name} {show(value)}" for name, value in facts["options"].items()]
    parts += [
        text.format(facts[name])
        for name, text in _AVERAGE_TEXTS.items()
        if name in facts
    ]
    return ", ".join(parts)


def _load_checkpoint(
    path: Path,
    payload: Mapping[str, Any],
    use_average: bool,
    average: str | None,
    choose: Choose,
) -> ModelFile:
    """Return the models in the content of a checkpoint of this program."""
    # files of other kinds hold one set of weights, which may be those of an average
    if use_average and payload["kind"] == "training":
        average = checkpoint.choose_profile(payload, path, average)
    weights, facts = checkpoint.weights_in(payload, path, average)
    name = average or payload["weights"]
    saved = saved_models(payload["config"], str(path))
    chosen = choose(
        {task: config.model_branch_alias for task, config in saved.configs.items()}
    )
    for config in saved.configs.values():
        if config.descriptor.neighbors is None:  # a run writes numbers
            option = f"config.model.descriptor.{config.descriptor.neighbors_option}"
            raise CheckpointError(
                f"{path}: damaged, {option} is not numbers. Use another checkpoint of the run."
            )
    models = build_models(saved.configs, saved.links)
    # names and shapes are compared first, so that the message names the file and what differs
    check_weights(
        {k: tuple(v.shape) for k, v in models.state_dict().items()}, weights, path
    )
    models.load_state_dict(weights)
    tasks = tuple(saved.configs)
    distances = nested(payload.get("min_nbor_dist"), tasks)
    changes = nested(payload.get("bias", {}), tasks)
    loaded = {}
    for head in chosen:
        model = models.by_task[head].eval()
        nearest = distances.get(head)
        model.min_nbor_dist = None if nearest is None else float(nearest)
        info = Provenance(
            path,
            payload["kind"],
            name,
            payload["step"],
            facts,
            model.min_nbor_dist,
            f"dp-ema {payload['version']}",
            saved.runs[head],
            changes.get(head, {}),
            head,
        )
        loaded[head] = LoadedModel(model, saved.configs[head], info)
    return ModelFile(loaded, payload["config"])


def _load_deepmd(
    path: Path,
    payload: Mapping[str, Any],
    use_average: bool,
    average: str | None,
    choose: Choose,
) -> ModelFile:
    """Return the models in the content of a checkpoint of DeePMD-kit."""
    models = {}
    for head in choose(deepmd_pt.heads_of(payload, path) or {"": ()}):
        stored = deepmd_pt.read_deepmd_pt(payload, path, head or None, use_average)
        if average not in (None, deepmd_pt.EMA):
            raise CheckpointError(
                f"{path}: a checkpoint of DeePMD-kit, no average is called {average!r}. Use "
                "--use-ema."
            )
        info = Provenance(
            path,
            "deepmd",
            **stored.facts,
            min_nbor_dist=stored.model.min_nbor_dist,
            config={"model": to_dict(stored.config)},
            head=head,
        )
        models[head] = LoadedModel(stored.model, stored.config, info)
    sections = {head: loaded.info.config["model"] for head, loaded in models.items()}
    return ModelFile(models, {"model": sections.get("", {"model_dict": sections})})


def _load_frozen(path: Path) -> LoadedModel:
    """Return the model of a frozen file."""
    if path.suffix.lower() in deepmd_kit.SUFFIXES and path.is_file():
        # DeePMD-kit converts its file to one that can be read here; errors name the file of the
        # user
        kit = deepmd_kit.find_deepmd_kit(path)
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder) / "model.dp"
            kit.write(["convert-backend", str(path.absolute()), "{}"], converted)
            loaded = _load_frozen(converted)
        return replace(loaded, info=replace(loaded.info, path=path))
    stored = dp.read_dp(path)
    content = stored.facts
    # what this program has added; empty in a file of DeePMD-kit
    record = content[dp.EXTRA]
    if not isinstance(record, dict) or not isinstance(record.get("average", {}), dict):
        raise CheckpointError(
            f"{path}: the section {dp.EXTRA} is not as dp-ema writes it. Freeze it again."
        )
    facts = {
        "weights": "",
        **chosen(record, ("weights", "step", "average", "bias", "head")),
    }
    version = (
        f"{content.get('software', 'unknown')} {content.get('version', '')}".strip()
    )
    config_of_run = record.get("config") or {
        "model": content.get("model_def_script", {})
    }
    info = Provenance(
        path,
        "frozen",
        **facts,
        min_nbor_dist=content.get("min_nbor_dist"),
        version=version,
        config=config_of_run,
    )
    return LoadedModel(
        stored.model, stored.config, info, path.suffix.lower() == COMPILED_SUFFIX
    )
