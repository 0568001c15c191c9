"""Start by fine-tuning: each task from a model of a file, with the elements and energies that its data need."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from deepmd_ema.config import ModelConfig, RunConfig, to_dict
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.infer.load import LoadedModel
from deepmd_ema.model.element_mapping import ElementsError, carried_over, check_elements
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.training.from_weights import report_differences
from deepmd_ema.training.start import Start, digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """Source of the first weights of one task.

    Attributes:
        loaded: a model of the file.
        fresh_fitting: whether the fitting network starts anew.
        keeps_bias: whether the output bias stays as in the file: the task of the same name is trained further.
    """

    loaded: LoadedModel
    fresh_fitting: bool = False
    keeps_bias: bool = False

    @property
    def config(self) -> ModelConfig:
        """The section ``model`` of the file."""
        return self.loaded.config

    @property
    def taken(self) -> tuple[str, ...]:
        """The sections of a model that are taken over."""
        return ("descriptor",) if self.fresh_fitting else ("descriptor", "fitting_net")


@dataclass(frozen=True)
class FineTune(Start):
    """A new run on other data: weights of a file, with the elements and the energy of each that the new data need.

    Elements that the file does not have get the parameters of the seed and statistics of the data. The bias is moved by
    a fit of label minus prediction, or, with a fresh fitting network, set by a fit of the labels.

    Attributes:
        sources: what each task starts from, of one file.
    """

    validates_before: ClassVar[bool] = True
    sources: Mapping[str, Pretrained]

    def fits_bias(self, task: str) -> bool:
        """Whether the output bias of a task is moved to the data before the first step."""
        source = self.sources[task]
        return not source.fresh_fitting and not source.keeps_bias

    @property
    def path(self) -> Path:
        """The file."""
        return next(iter(self.sources.values())).loaded.info.path

    def model_section(self, given: Any) -> Any:
        """Return the section of the input with descriptors and fitting networks of the file, trainable as given.

        A part that tasks share is that of the first of them that takes it from the file.

        Raises:
            ConfigError: if options of the file count elements by number, and the elements are others.
        """
        if "" in self.sources:
            return self._section("", given, {}, {})
        models = given.get("model_dict") if isinstance(given, Mapping) else None
        if not isinstance(models, Mapping):
            return given
        before = given.get("shared_dict")
        before = before if isinstance(before, Mapping) else {}
        shared: dict[str, Any] = {}
        sections = {
            name: self._section(name, section, before, shared) if name in self.sources else section
            for name, section in models.items()
        }
        return {**given, "model_dict": sections, **({"shared_dict": {**before, **shared}} if before else {})}

    def _section(self, task: str, given: Any, before: Mapping[str, Any], shared: dict[str, Any]) -> Any:
        """Return the section of one task.

        Args:
            task: its name.
            given: its section in the input.
            before: the parts that tasks share in the input.
            shared: takes those of the file instead.
        """
        source = self.sources[task]
        section = to_dict(source.config)
        if not isinstance(given, Mapping):
            return section
        type_map = given.get("type_map", section["type_map"])
        elements = before.get(type_map) if isinstance(type_map, str) else type_map
        if source.config.type == "linear_ener":
            self._refuse_other_elements(elements, section, f"the parts of {self.path} are for")
            return {**given, "type_map": type_map, **{name: section[name] for name in ("type", "models", "weights")}}
        if isinstance(elements, list):
            self._check_elements(task, elements)
        by_number = [path for n in source.taken for path in _given(section[n], ("exclude_types", "atom_ener"), n)]
        if by_number:
            what = f"{', '.join(by_number)} of {self.path} counts elements by number in"
            self._refuse_other_elements(elements, section, what)
        parts = {name: _part(given.get(name), section[name], before, shared) for name in source.taken}
        return {**given, "type_map": type_map, **parts}

    def _refuse_other_elements(self, elements: Any, section: Mapping[str, Any], what: str) -> None:
        """Refuse options that count elements by number.

        Raises:
            ConfigError: if the elements are others in the file.
        """
        if elements != section["type_map"]:
            raise ConfigError(
                f"--use-pretrain-script: {what} type_map = {section['type_map']}, and it is another here. Write the "
                "section model into the input (`dp-ema show --config` prints it)."
            )

    def _check_elements(self, task: str, elements: Iterable[str]) -> None:
        try:
            check_elements(self.sources[task].loaded.model, elements)
        except ElementsError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with ``sel`` as in the file where the input leaves it open and it fits.

        Raises:
            ConfigError: if a bias is to be kept for a fitting network that is fresh.
        """
        models = {}
        for name, task in config.tasks.items():
            if task.model.finetune_bias == "keep" and self.sources[name].fresh_fitting:
                raise ConfigError(
                    f'{task.place("model")}.finetune_bias = "keep": the fitting network starts anew, and its bias is a '
                    "fit of the labels. Leave it out, or choose a model of the file with finetune_head."
                )
            model, saved = task.model, self.sources[name].config
            report_differences(saved, model, task.place("model"))
            fits = len(saved.descriptor.neighbors or ()) == 1 or model.type_map == saved.type_map
            if model.descriptor.neighbors is None and fits and model.descriptor.type == saved.descriptor.type:
                models[name] = model.with_descriptor(model.descriptor.with_neighbors_of(saved.descriptor))
        return config.with_models(models) if models else config

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether there are new elements, or a fresh fitting network."""
        return any(
            source.fresh_fitting or set(config.tasks[name].model.type_map) - set(source.config.type_map)
            for name, source in self.sources.items()
        )

    def run_id(self, config: RunConfig) -> str:
        """Return the identifier of this trajectory of weights."""
        return digest(to_dict(config), f"{self.path} fine-tuned")

    def min_nbor_dist(self, task: str, in_data: float | None = None) -> float | None:
        """Return the nearest pair that the model has seen, angstrom: in the data or in those of the file."""
        before = self.sources[task].loaded.info.min_nbor_dist
        return min((d for d in (in_data, before) if d is not None), default=None)

    def load_weights(self, models: ModelSet) -> None:
        """Take over the weights of the file for the elements that it has.

        What tasks share has the weights that it has in the model of the first of them, a fitting network those of the
        first that does not start anew.
        """
        by_task = models.by_task
        order = list(reversed(by_task))  # the last to be written stays
        order.sort(key=lambda task: not self.sources[task].fresh_fitting)
        for task in order:
            self._load(task, by_task[task])
        for task, model in by_task.items():
            source = self.sources[task]
            new = [name for name in model.type_map if name not in source.config.type_map]
            logger.info(
                "fine-tuning %s%s: %s; %s; fitting network %s", f"task {task} from " * bool(task), self.path,
                source.loaded.info.describe(), f"new elements {' '.join(new)}" if new else "no new elements",
                "fresh" if source.fresh_fitting else "of the file",
            )  # fmt: skip
        if len(by_task) > 1:
            self._assign_cases(by_task)

    def _load(self, task: str, model: EnergyModel) -> None:
        source = self.sources[task]
        self._check_elements(task, model.type_map)
        try:
            model.load_state_dict(carried_over(source.loaded.model, model, with_fitting=not source.fresh_fitting))
        except ElementsError as error:
            whose = f"task {task}" if task else "this input"
            lines = [f"{self.path}: its weights do not fit the model of {whose}.", *error.problems]
            advice = "Use its sections descriptor and fitting_net (--use-pretrain-script takes them)"
            head = f'"finetune_head": "RANDOM" in model.model_dict.{task}' if task else "--model-branch RANDOM"
            last = "." if source.fresh_fitting else f", or a fresh fitting network ({head})."
            raise CheckpointError("\n  ".join([*lines, advice + last])) from error

    def _assign_cases(self, by_task: Mapping[str, EnergyModel]) -> None:
        """Give each of the tasks that share a fitting network a case of its own.

        One that comes from a model of the file keeps the case of that model, with which the network was trained; of
        two from the same model that which keeps its bias, or the first.
        """
        taken: dict[int, set[int]] = {}
        for task in sorted(by_task, key=lambda task: (self.sources[task].fresh_fitting, self.fits_bias(task))):
            fitting = by_task[task].fitting
            cases = taken.setdefault(id(next(iter(fitting.blocks()), (fitting,))[0]), set())
            case = next(n for n in (fitting.case, *range(len(cases) + 1)) if n not in cases)
            cases.add(case)
            fitting.set_case(case)


def _part(given: Any, section: Any, before: Mapping[str, Any], shared: dict[str, Any]) -> Any:
    """Return a section of the file in place of that of the input, which may be the name of a shared one."""
    if isinstance(given, str):
        key = given.partition(":")[0]
        shared.setdefault(key, _part(before.get(key), section, {}, {}))
        return given
    own = given if isinstance(given, Mapping) else {}
    trained = {"trainable": own["trainable"]} if "trainable" in own else {}
    part = {**copy.deepcopy(section), **trained}
    parts, of_input = part.get("list"), own.get("list")
    if isinstance(parts, list) and isinstance(of_input, list) and len(parts) == len(of_input):
        names = [
            _part(name, one, before, shared) if isinstance(name, str) else one for name, one in zip(of_input, parts)
        ]
        part["list"] = names
    return part


def _given(value: Any, names: tuple[str, ...], path: str) -> Iterator[str]:
    """Yield the paths of options with a value in a section and in those inside of it."""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
        if key in names and part:
            yield place
        else:
            yield from _given(part, names, place)
