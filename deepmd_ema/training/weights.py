"""Start of a run: its seed, the weights of a file, models that are fine-tuned, or a checkpoint."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.config import ModelConfig, RunConfig, choose_head, saved_models, to_dict
from deepmd_ema.config.messages import differences_of, show
from deepmd_ema.distributed.tensors import check_weights, prefix_of, whole
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.infer.load import FROZEN_SUFFIXES, LoadedModel, load_models
from deepmd_ema.interop.pretrained import check_digest
from deepmd_ema.model.element_mapping import (
    ElementsError,
    carried_over,
    elements_problem,
)
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet, nested
from deepmd_ema.model.output_bias import AUTO, KEEP
from deepmd_ema.utils import __version__

logger = logging.getLogger(__name__)

RANDOM = "RANDOM"  # as a head: a fresh fitting network
ONLY = "Default"  # DeePMD-kit's name for the model of a file that has one
_CHOOSES = "--model-branch or finetune_head"
# Options of a model that may differ from those of the file: all others change what the weights
# mean, new ones as well.
_OF_THE_RUN = frozenset(
    {
        "trainable",
        "seed",
        "interpolate",  # how it is trained and evaluated
        "finetune_head",
        "finetune_bias",
        "model_branch_alias",  # the model of a file that a task starts from
        # first biases and statistics
        "data_stat_nbatch",
        "data_stat_protect",
        "rcond",
        "atom_ener",
        "preset_out_bias",
        "type_map",  # elements are found by their names
    }
)
# options that count elements: pairs of their numbers, numbers, or an entry for each
_PAIRS = ("exclude_types", "pair_exclude_types")
_NUMBERS = ("atom_exclude_types", "sel_type")
_ENTRIES = ("scale",)
_BY_NUMBER = (*_PAIRS, *_NUMBERS, *_ENTRIES, "atom_ener")
_OF_TABLES = (
    "use_srtab",
)  # file of pair energies, which for other elements has other columns


@dataclass(frozen=True)
class Source:
    """Model of a file from which a task starts.

    Attributes:
        loaded: the model.
        fresh_fitting: whether the fitting network starts anew.
        continues: whether the task of the same name is trained further, whose output bias stays as
            in the file.
    """

    loaded: LoadedModel
    fresh_fitting: bool = False
    continues: bool = False


@dataclass(frozen=True)
class Start:
    """Origin of a run. Without a file: weights from the seed, statistics from the data.

    Attributes:
        path: the file.
        sources: models of the file from which the tasks of a new run start, by name.
        fine_tunes: whether these may have other elements, and their bias is moved to the data.
            Elements that the file does not have get the parameters of the seed and statistics of
            the data. The bias is moved by a fit of label minus prediction, or, with a fresh fitting
            network, set by a fit of the labels.
        payload: content of the checkpoint that is continued, bitwise as without a break; empty: the
            run is new.
        config: of the file, as its program has written it.
        saved: sections of the models of the file, by name of the task.
        step: optimizer steps done before the start.
        moved: lines about tasks whose training data have other paths than in the checkpoint that is
            continued, by task.
    """

    path: Path = Path()
    sources: Mapping[str, Source] = field(default_factory=dict)
    fine_tunes: bool = False
    payload: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    saved: Mapping[str, ModelConfig] = field(default_factory=dict)
    step: int = 0
    moved: Mapping[str, str] = field(default_factory=dict)

    def moves_bias(self, task: str, choice: str) -> str | None:
        """Return the way in which the output bias of a task is moved to its data.

        None: the bias is fresh.

        Args:
            task: its name.
            choice: its option ``finetune_bias``.
        """
        if task not in self.sources or self.sources[task].fresh_fitting:
            return None
        # the task continues with labels of the same method, so that its bias fits
        is_same = not self.fine_tunes or (
            choice == AUTO and self.sources[task].continues
        )
        return KEEP if is_same else choice

    def new_elements(self, task: str, type_map: Sequence[str]) -> list[str]:
        """Return the elements of a task that the model of the file does not have."""
        return [name for name in type_map if name not in self.saved[task].type_map]

    def min_nbor_dist(self, task: str, in_data: float | None) -> float | None:
        """Return the distance of the nearest pair that the model of a task has seen, angstrom.

        Args:
            task: its name.
            in_data: nearest pair of its training data.
        """
        if self.payload:  # the record of the run that is continued
            recorded: float | None = nested(
                self.payload.get("min_nbor_dist"), (task,)
            ).get(task)
            return recorded
        if task not in self.sources:
            return in_data
        before = self.sources[task].loaded.info.min_nbor_dist
        return min((d for d in (in_data, before) if d is not None), default=None)

    def run_id(self, config: RunConfig) -> str:
        """Return the identifier of this trajectory of weights, a function of config and start."""
        if self.payload.get("run"):  # files of 0.1.0 have none
            return str(self.payload["run"])
        suffix = " fine-tuned" if self.fine_tunes else ""
        origin = f"{self.path}{suffix}" if self.sources else ""
        text = json.dumps(
            [__version__, self.config if self.payload else to_dict(config), origin],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def model_section(self, values: Any) -> Any:
        """Return the section ``model`` of the file, in place of that of the input.

        For fine-tuning it has descriptors and fitting networks of the file, trainable as given. A
        part that tasks share is that of the first of them that takes it from the file.

        Args:
            values: the section of the input, which may be wrong.

        Raises:
            ConfigError: if the run does not start from a file, the file does not say what its
                models share, or options of it count elements by number, and the elements are
                others.
        """
        if not self.config:
            raise ConfigError(
                "--use-pretrain-script: takes the section `model` from a file, and none is given. "
                "Name it with --finetune, --init-model or --restart, or leave the option out."
            )
        if not self.fine_tunes:
            if "model_dict" in self.config["model"] and "training" not in self.config:
                raise ConfigError(
                    f"--use-pretrain-script: {self.path} has several models and does not say what "
                    "they share. Write the section model into the input (`dp-ema show --config` "
                    "prints the model of each)."
                )
            return self.config["model"]
        if "" in self.sources:
            return self._tuned_section("", values, {}, {})
        # a section that is wrong is returned as it is: the check of the input reports it
        models = values.get("model_dict") if isinstance(values, Mapping) else None
        if not isinstance(models, Mapping):
            return values
        before = values.get("shared_dict")
        before = before if isinstance(before, Mapping) else {}
        shared: dict[str, Any] = {}
        sections = {
            name: self._tuned_section(name, section, before, shared)
            if name in self.sources
            else section
            for name, section in models.items()
        }
        return {
            **values,
            "model_dict": sections,
            **({"shared_dict": {**before, **shared}} if before else {}),
        }

    def _tuned_section(
        self, task: str, values: Any, before: Mapping[str, Any], shared: dict[str, Any]
    ) -> Any:
        """Return the section of one task that is fine-tuned.

        Args:
            task: its name.
            values: its section in the input.
            before: the parts that tasks share in the input.
            shared: takes those of the file instead.
        """
        source, saved = self.sources[task], self.saved[task]
        section = to_dict(saved)
        if not isinstance(values, Mapping):
            return section
        taken = (
            ("descriptor",) if source.fresh_fitting else ("descriptor", "fitting_net")
        )
        type_map = values.get("type_map", section["type_map"])
        # a name is that of a list in `shared_dict`
        elements = before.get(type_map) if isinstance(type_map, str) else type_map

        # Options that count elements by their numbers in type_map would mean other elements with
        # another type_map, and a linear model of parts has one in each part.
        by_number = (
            f"the parts of {self.path} are for" if saved.type == "linear_ener" else ""
        )
        if not by_number:
            if isinstance(elements, list) and (
                problem := elements_problem(source.loaded.model, elements)
            ):
                raise CheckpointError(f"{self.path}: {problem}")
            options = [path for n in taken for path in _paths_by_number(section[n], n)]
            by_number = (
                f"{', '.join(options)} of {self.path} counts elements by number in"
                if options
                else ""
            )
        if by_number and elements != section["type_map"]:
            raise ConfigError(
                f"--use-pretrain-script: {by_number} type_map = {section['type_map']}, and it is "
                "another here. Write the section model into the input (`dp-ema show --config` "
                "prints it)."
            )
        if saved.type == "linear_ener":
            return {
                **values,
                "type_map": type_map,
                **{name: section[name] for name in ("type", "models", "weights")},
            }
        parts = {
            name: _part(values.get(name), section[name], before, shared)
            for name in taken
        }
        return {**values, "type_map": type_map, **parts}

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with open options as in the file: ``sel``, and the seed of a restart.

        Raises:
            CheckpointError: if the file holds models of other elements or tasks.
            ConfigError: if a bias is to be kept for a fitting network that is fresh.
        """
        is_new, models = not self.payload, {}
        # --init-model takes the weights of a task from the model of its name
        missing = [name for name in config.tasks if name not in self.saved]
        if missing and self.sources and not self.fine_tunes:
            has = (
                f"the models {', '.join(self.saved)}"
                if "" not in self.saved
                else "one model without a name"
            )
            advice = "the input has one task. Choose a model with --model-branch."
            if missing != [""]:
                advice = (
                    f"none for {', '.join(missing)} of the input: --init-model needs one for each "
                    "task. Use --finetune, which also starts several tasks from one model."
                )
            raise CheckpointError(f"{self.path}: holds {has}, and {advice}")
        for name, task in config.tasks.items():
            if (saved := self.saved.get(name)) is None:
                continue
            model, place = task.model, task.place("model")
            fits = True  # whether numbers of neighbors of the file fit the descriptor of the input
            if self.fine_tunes:
                if model.finetune_bias == "keep" and self.sources[name].fresh_fitting:
                    raise ConfigError(
                        f'{place}.finetune_bias = "keep": the fitting network starts anew, and '
                        "its bias is a fit of the labels. Leave it out, or choose a model of the "
                        "file with finetune_head."
                    )
                # one number for all elements, or a number for each of the same elements
                has_one_number = len(saved.descriptor.neighbors or ()) == 1
                fits = has_one_number or model.type_map == saved.type_map
                fits = fits and model.descriptor.type == saved.descriptor.type
            elif saved.type_map != model.type_map:
                raise CheckpointError(
                    f"{self.path}: a model of type_map {saved.type_map}, but {place}.type_map is "
                    f"{model.type_map}. Use the type_map of the file, or --finetune, which takes "
                    "over the elements that both have."
                )
            if is_new:
                is_fresh = self.fine_tunes and self.sources[name].fresh_fitting
                if not is_fresh:
                    self._refuse_another_quantity(saved, model, place)
                report_differences(saved, model, place, is_fresh)
            if model.descriptor.neighbors is None and fits:
                models[name] = model.with_descriptor(
                    model.descriptor.with_neighbors_of(saved.descriptor)
                )
        config = config.with_models(models) if models else config
        if is_new or config.training.seed is not None:
            return config
        return replace(
            config,
            training=replace(config.training, seed=self.config["training"]["seed"]),
        )

    def _refuse_another_quantity(
        self, saved: ModelConfig, model: ModelConfig, place: str
    ) -> None:
        """Raise CheckpointError if file and input have fitting networks of different quantities.

        Shapes may agree, and the network and the bias of energies would be those of a band gap.
        """
        saved_label, label = saved.fitting_net.labels[0], model.fitting_net.labels[0]
        if saved_label == label:
            return
        fresh = (
            "the descriptor alone is taken with --finetune and --model-branch RANDOM"
        )
        if place != "model":
            fresh = (
                'the descriptor alone is taken with --finetune and "finetune_head": "RANDOM" in '
                f"{place}"
            )
        raise CheckpointError(
            f"{self.path}: a model of {saved_label}, and {place}.fitting_net predicts {label}: its "
            f"fitting network and bias are of another quantity. Use a model of {label}; {fresh}."
        )

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``, also into shared parts of new tasks.

        Raises:
            CheckpointError: naming every missing, extra or reshaped tensor.
        """
        by_task = models.by_task
        if self.fine_tunes:
            self._fine_tune(by_task)
        if self.fine_tunes or not self.saved:
            return
        # Only into the models of tasks that the file has: a restart may have new tasks, and lack
        # some. A set of these models has the names of tensors that the file has.
        taken = ModelSet(
            {task: model for task, model in by_task.items() if task in self.saved}
        )
        if self.payload:
            # raw weights: a restart does not continue from a bias that was fitted after training
            state: Mapping[str, Tensor] = whole(self.payload["model"])
            weights, step = self.payload["weights"], self.payload["step"]
        else:
            state = ModelSet(
                {task: source.loaded.model for task, source in self.sources.items()}
            ).state_dict()
            info = next(iter(self.sources.values())).loaded.info
            weights, step = info.weights, info.step
        prefixes = tuple(map(prefix_of, taken.by_task))
        state = {
            name: tensor for name, tensor in state.items() if name.startswith(prefixes)
        }
        check_weights(
            {name: tuple(tensor.shape) for name, tensor in taken.state_dict().items()},
            state,
            self.path,
        )
        taken.load_state_dict(state)

        # A case is the number by which a shared fitting network knows the task. Tasks of the file
        # keep theirs, whatever the names of new tasks are, and new tasks get numbers that are free.
        new = [
            model.fitting for task, model in by_task.items() if task not in self.saved
        ]
        cases = {model.fitting.case for model in taken.by_task.values()}
        free_cases = (n for n in range(len(by_task) + len(cases)) if n not in cases)
        for fitting, case in zip(new, free_cases):
            fitting.set_case(case)
        step_text = "step not known" if step is None else f"step {step}"
        logger.info(
            "weights of %s (%s, %s)",
            self.path,
            weights or "live or averaged",
            step_text,
        )

    def _fine_tune(self, by_task: Mapping[str, EnergyModel]) -> None:
        """Take over the weights of the file for the elements that it has.

        What tasks share has the weights that it has in the model of the first of them, a fitting
        network those of the first that does not start anew.
        """
        # The last to be written stays: tasks with fresh fitting networks first, and the first task
        # of the input last.
        order = [*by_task][::-1]
        order.sort(key=lambda task: not self.sources[task].fresh_fitting)
        for task in order:
            source, model = self.sources[task], by_task[task]
            if problem := elements_problem(source.loaded.model, model.type_map):
                raise CheckpointError(f"{self.path}: {problem}")
            try:
                model.load_state_dict(
                    carried_over(
                        source.loaded.model,
                        model,
                        with_fitting=not source.fresh_fitting,
                    )
                )
            except ElementsError as error:
                whose = f"task {task}" if task else "this input"
                lines = [
                    f"{self.path}: its weights do not fit the model of {whose}.",
                    *error.problems,
                ]
                advice = (
                    "Use its sections descriptor and fitting_net "
                    "(--use-pretrain-script takes them)"
                )
                head = (
                    f'"finetune_head": "RANDOM" in model.model_dict.{task}'
                    if task
                    else "--model-branch RANDOM"
                )
                last = (
                    "."
                    if source.fresh_fitting
                    else f", or a fresh fitting network ({head})."
                )
                raise CheckpointError("\n  ".join([*lines, advice + last])) from error

        # in the order of the input
        for task, model in by_task.items():
            source = self.sources[task]
            new = self.new_elements(task, model.type_map)
            logger.info(
                "fine-tuning %s%s: %s; %s; fitting network %s",
                (f"task {task} from " if task else ""),
                self.path,
                source.loaded.info.describe(),
                f"new elements {' '.join(new)}" if new else "no new elements",
                "fresh" if source.fresh_fitting else "of the file",
            )
        if len(by_task) == 1:
            return

        # Tasks that share a fitting network have a case each. One that comes from a model of the
        # file keeps the case of that model, with which the network was trained. If two come from
        # the same model, the one that keeps its bias has the case, or the first.
        by_claim = sorted(
            by_task,
            key=lambda task: (
                self.sources[task].fresh_fitting,
                not self.sources[task].continues,
            ),
        )
        taken: dict[
            int, set[int]
        ] = {}  # cases by shared network, which its first block identifies
        for task in by_claim:
            fitting = by_task[task].fitting
            first_block = next(iter(fitting.blocks()), (fitting,))[0]
            cases = taken.setdefault(id(first_block), set())
            case = next(
                n for n in (fitting.case, *range(len(cases) + 1)) if n not in cases
            )
            cases.add(case)
            fitting.set_case(case)


def load_restart(file: str, share: tuple[int, int] = (0, 1)) -> Start:
    """Load the checkpoint that a run continues.

    Args:
        file: the checkpoint.
        share: rank of this process and number of ranks, which check the shards of a sharded
            checkpoint together.

    Raises:
        CheckpointError: if it is missing, damaged, or of the wrong kind (an average cannot be
            restarted from).
    """
    if Path(file).suffix.lower() in FROZEN_SUFFIXES:
        raise CheckpointError(
            f"--restart {file}: a frozen model holds weights only, not the state of a run. Use a "
            "training checkpoint (model.ckpt-*.pt), or start anew from these weights with "
            f"--init-model {file}."
        )
    path = checkpoint.resolve(file)
    payload = checkpoint.load_shards(path, share)
    checkpoint.require_training(payload, path)
    config = payload["config"]
    saved = saved_models(config, str(path)).configs
    return Start(
        path, payload=payload, config=config, saved=saved, step=int(payload["step"])
    )


def load_weights(file: str, head: str | None = None) -> Start:
    """Load the weights, live or averaged, that a run starts from.

    Args:
        file: a checkpoint of any kind or a frozen model, also of DeePMD-kit.
        head: the model of a file with several that the only task starts from; None: each starts
            from that of its name.
    """
    loaded = load_models(
        file,
        choose=lambda names: names if head is None else [_named(names, head, file)],
    )
    # a chosen model is that of the only task, whatever its name in the file is
    sources = {
        name if head is None else "": Source(model)
        for name, model in loaded.models.items()
    }
    saved = {name: source.loaded.config for name, source in sources.items()}
    first = next(iter(loaded.models.values()))
    config = loaded.config if head is None else {"model": first.info.config["model"]}
    return Start(first.info.path, sources, config=config, saved=saved)


def load_pretrained(file: str, heads: Mapping[str, str | None] | None = None) -> Start:
    """Load the models that are fine-tuned; ``heads`` names the model that each task starts from.

    ``RANDOM`` as a head is a fresh fitting network.
    """
    if name := check_digest(Path(file)):
        logger.info("%s: the published model %s, sha256 verified", file, name)
    # by task: the name of the model in the file, and the attributes fresh_fitting and continues of
    # its source
    chosen: dict[str, tuple[str, bool, bool]] = {}

    def choose(names: Mapping[str, Sequence[str]]) -> set[str]:
        first = next(iter(names))  # its descriptor goes with a fresh fitting network
        for task, head in ({"": None} if heads is None else heads).items():
            if head is not None and head.upper() == RANDOM:
                chosen[task] = first, True, False
            elif head is not None:
                chosen[task] = _named(names, head, file), False, False
            # the only model for the only task, or the model of a task for the task of its name
            elif task in names:
                chosen[task] = task, False, bool(task)
            else:
                chosen[task] = first, True, False
                has = "one model" if "" in names else ", ".join(names)
                missing = "no --model-branch chooses one"
                if task:
                    option = f"model.model_dict.{task}.finetune_head"
                    expected = ONLY if "" in names else "a name"
                    missing = (
                        f'no {option} chooses one ({expected}; "{RANDOM}" says '
                        "that this is meant)"
                    )
                logger.warning(
                    "%s holds %s: %s, so the fitting network%s starts anew",
                    file,
                    has,
                    missing,
                    f" of task {task}" if task else "",
                )
        return {name for name, *_ in chosen.values()}

    loaded = load_models(file, choose=choose)
    sources = {
        task: Source(loaded.models[name], *how) for task, (name, *how) in chosen.items()
    }
    path = next(iter(loaded.models.values())).info.path
    saved = {task: source.loaded.config for task, source in sources.items()}
    return Start(path, sources, fine_tunes=True, config=loaded.config, saved=saved)


def _named(names: Mapping[str, Sequence[str]], head: str, file: str) -> str:
    """Return the name of the model of a file that a head means."""
    return (
        ""
        if set(names) == {""} and head == ONLY
        else choose_head(names, head, file, _CHOOSES)
    )


def report_differences(
    saved: ModelConfig, model: ModelConfig, place: str, is_fresh: bool = False
) -> None:
    """Warn of options of a model that are not those of its file.

    With them weights may fit and mean another thing.

    Args:
        saved: section ``model`` of the file.
        model: that of the input.
        place: of the latter in the input.
        is_fresh: whether the fitting network starts anew.
    """
    # elements by their names, as far as both have them: another order of type_map is no difference
    common = [name for name in model.type_map if name in saved.type_map]
    before = _by_element(to_dict(saved), saved.type_map, common)
    now = _by_element(to_dict(model), model.type_map, common)
    if is_fresh:
        before.pop("fitting_net", None)
        now.pop("fitting_net", None)
    same_elements = model.type_map == saved.type_map
    for path, old, new in differences_of(before, now, place):
        name = path.rpartition(".")[2]
        # None of a descriptor of DeePMD-kit is the default; two spellings of one value
        is_same = None in (old, new) and ".descriptor." in path
        is_same = (
            is_same
            or {str(old), str(new)} == {"default", "float64"}
            or old == [new]
            or new == [old]
        )
        # numbers of neighbors are found in the data, or are of other elements
        is_same = is_same or new == "auto" or (name == "sel" and not same_elements)
        if name in _OF_TABLES:
            if same_elements or None in (old, new):
                logger.warning(
                    "%s is not that of the file, which acts where atoms come close",
                    path,
                )
        elif not is_same:
            logger.warning(
                "%s was %s where the weights were trained, is %s here",
                path,
                show(old, 200),
                show(new, 200),
            )


def _by_element(value: Any, type_map: Sequence[str], common: Sequence[str]) -> Any:
    """Return a section with names of elements in place of their numbers.

    Elements that only one of the models has are left out, and so are options that may differ from
    those of the file.
    """
    if isinstance(value, list):
        return [_by_element(part, type_map, common) for part in value]
    if not isinstance(value, Mapping):
        return value
    section = dict[str, Any]()
    for name, part in value.items():
        if name in _OF_THE_RUN:
            continue
        section[name] = _by_element(part, type_map, common)
        if name in _PAIRS:
            pairs = [sorted(type_map[number] for number in pair) for pair in part or ()]
            section[name] = sorted(pair for pair in pairs if set(pair) <= set(common))
        elif name in _NUMBERS and part is not None:
            names = {type_map[number] for number in part}
            section[name] = [element for element in sorted(common) if element in names]
        elif name in _ENTRIES and isinstance(part, list):
            section[name] = {
                element: part[type_map.index(element)] for element in sorted(common)
            }
    return section


def _part(
    values: Any, section: Any, before: Mapping[str, Any], shared: dict[str, Any]
) -> Any:
    """Return a section of the file in place of that of the input.

    Args:
        values: the section of the input, or the name of a part that tasks share.
        section: that of the file.
        before: the parts that tasks share in the input.
        shared: takes those of the file instead.
    """
    if isinstance(values, str):
        # `name:level`, where 1 shares the embedding of elements only
        key = values.partition(":")[0]
        shared.setdefault(key, _part(before.get(key), section, {}, {}))
        return values
    # a copy, as the section of the file may be taken by several tasks
    input_section = values if isinstance(values, Mapping) else {}
    part = copy.deepcopy(section)
    if "trainable" in input_section:
        part["trainable"] = input_section["trainable"]
    # the list of a hybrid descriptor, whose parts may be shared one by one
    parts, names = part.get("list"), input_section.get("list")
    if isinstance(parts, list) and isinstance(names, list) and len(parts) == len(names):
        part["list"] = [
            _part(name, inner, before, shared) if isinstance(name, str) else inner
            for name, inner in zip(names, parts)
        ]
    return part


def _paths_by_number(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of options of a section, at any depth, that count elements by number."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, part in entries:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}"
        if (
            key in _BY_NUMBER
            and part
            and (key not in _ENTRIES or isinstance(part, list))
        ):
            yield place
        else:
            yield from _paths_by_number(part, place)
