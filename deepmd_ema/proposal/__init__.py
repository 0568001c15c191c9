"""An input proposed for data: ``dp-ema init``. What is chosen, and why, is in the files of the folder ``presets``."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from deepmd_ema.config import config_from_dict
from deepmd_ema.config.text import JSON_SUFFIXES
from deepmd_ema.data.check.physics import COVALENT_RADII
from deepmd_ema.data.check.report import DataReport
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.run import check_task, choose_validation, open_run, split_off
from deepmd_ema.data.source import Frame, ReadSpec, evenly_spaced
from deepmd_ema.elements import SYMBOLS
from deepmd_ema.errors import DataError, UserError, command, counted
from deepmd_ema.geometry import find_pairs_once, neighbor_statistics
from deepmd_ema.infer.load import LoadedModel, load_model
from deepmd_ema.interop.pretrained import local_file
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.presets import MODELS, Kind, read_preset
from deepmd_ema.proposal.fine_tuning import fine_tuned, with_replay
from deepmd_ema.report.table import duration
from deepmd_ema.training.estimate import Cost, measure_steps
from deepmd_ema.version import __version__

_BOND = 1.25  # sums of covalent radii within which two atoms are bonded
_SAME_PLACE = 0.1  # angstrom; an image of an atom is farther away
_ROOMY = 60.0  # angstrom^3 per atom above which a cell is mostly empty
_SAMPLE = 30  # frames that are looked at
_WIDER = 4 / 3  # a larger cutoff, whose number of neighbors is stated
_FRACTION = 0.1  # of the frames, for validation
_EVENTS = 10  # validations, and checkpoints, in a run
_WINDOW = 40  # a run has so many lengths of its average
_MIN_STEPS = 100
_MAX_ELEMENTS = 4  # of se_e2_a, which has networks for each element
_MAX_LINE = 110
_LABELS = {"e": ENERGY, "f": FORCE, "v": VIRIAL}


@dataclass(frozen=True)
class Wishes:
    """Choices of the user; None where the data decide.

    Attributes:
        systems: training data, as ``training_data.systems``.
        validation: validation data; empty to split frames off.
        model: name of a preset.
        size: S, M or L.
        kind: of the data.
        rcut: cutoff radius, angstrom.
        type_map: elements.
        steps: of the run.
        hours: of the run on this machine.
        device: on which the run is going to be.
        finetune: file of the model that is trained further; model, size and rcut have no effect then.
        head: which model of that file, if it holds several.
        replay: data that this model was trained on, which it is to keep to.
    """

    systems: Sequence[str]
    validation: Sequence[str] = ()
    model: str | None = None
    size: str = "M"
    kind: Kind | None = None
    rcut: float = 6.0
    type_map: Sequence[str] | None = None
    steps: int | None = None
    hours: float | None = None
    device: str | None = None
    finetune: str | None = None
    head: str | None = None
    replay: Sequence[str] = ()


@dataclass
class Proposal:
    """An input with a reason for each choice.

    Attributes:
        values: of the input.
        why: reasons, by dotted path.
        head: lines about the data.
        warnings: what the user should look at.
    """

    values: dict[str, Any]
    why: dict[str, str]
    head: list[str]
    warnings: list[str] = field(default_factory=list)

    def text(self, file: Path) -> str:
        """Return the text of the input: YAML with comments, or JSON whose comments are keys that begin with ``_``."""
        if file.suffix.lower() in JSON_SUFFIXES:
            commented = {"_comment": self.head, **_with_comments(self.values, self.why, ())}
            return json.dumps(commented, indent=2, ensure_ascii=False) + "\n"
        return "\n".join([*(f"# {line}" for line in self.head), *_yaml(self.values, self.why, ())]) + "\n"


def propose(wishes: Wishes) -> Proposal:
    """Return an input for data.

    Raises:
        UserError: for data that cannot be trained on, or too little time.
    """
    given = list(wishes.type_map or _elements(wishes.systems, wishes.validation, wishes.replay))
    source = None
    if wishes.finetune is not None:
        source = _loaded(wishes.finetune, wishes.head)
        known = source.config.type_map
        given = [*known, *(name for name in given if name not in known)]
        wishes = replace(wishes, rcut=source.config.descriptor.cutoff, model=source.config.descriptor.type)
    try:
        data = _Data.read(wishes, given)
        old = _Data.read(replace(wishes, systems=wishes.replay, validation=()), given) if wishes.replay else None
    except DataError as error:  # there is no input that has a type_map yet
        raise DataError(problem.replace("model.type_map", "-t") for problem in error.problems) from None
    name = wishes.model or ("se_e2_a" if len(given) <= _MAX_ELEMENTS else "se_atten_v2")
    presets = read_preset(MODELS)
    preset = presets.get(name, presets["se_e2_a"])  # of a model that init does not make
    recipes = read_preset(preset["recipes"])
    assemble = partial(_proposed, wishes, source, data, old, given, preset, recipes)
    proposal = assemble(wishes.steps)
    if wishes.hours is not None:
        cost = measure_steps(config_from_dict(proposal.values, "the proposed input"), wishes.device)
        proposal = assemble(_steps_in(3600 * wishes.hours, cost))
        proposal.why["training.numb_steps"] = (
            f"{wishes.hours:g} h on this machine: {cost.step:.2g} s per step, in {counted(cost.measured, 'step')}"
        )
    return proposal


def _proposed(
    wishes: Wishes,
    source: LoadedModel | None,
    data: _Data,
    old: _Data | None,
    type_map: Sequence[str],
    preset: Mapping[str, Any],
    recipes: Mapping[str, Any],
    steps: int | None,
) -> Proposal:
    """Return the input of a run, or that of fine-tuning a model, with old data or without."""
    proposal = _assemble(wishes, data, type_map, preset, recipes, steps)
    if source is None:
        return proposal
    values, why = fine_tuned(proposal.values, proposal.why, source, wishes.head)
    warnings = proposal.warnings
    if old is not None:
        values, why = with_replay(values, why, wishes.replay, _FRACTION if old.is_split else None)
        warnings = [*warnings, *(f"old data: {line}" for line in old.report.warnings)]
    *head, _ = proposal.head
    line = f"Model: {source.config.descriptor.type} of {wishes.finetune}. {values['optimizer']['type']}, "
    line += f"rate {values['learning_rate']['start_lr']:g}, {values['training']['numb_steps']:,} steps."
    return Proposal(values, why, [*head, line], warnings)


def _loaded(file: str, head: str | None) -> LoadedModel:
    """Return the model that is fine-tuned.

    Raises:
        UserError: if it is of a type that this input cannot have.
    """
    source = load_model(local_file(file), head=head)
    if source.config.type != "standard":
        raise UserError(
            f"--finetune {file}: is of model.type {source.config.type}, and init writes inputs of one descriptor. "
            f"`{command('dp-ema', 'show', file, '--config')}` prints its section model. Write the input yourself."
        )
    return source


def _elements(*paths: Sequence[str]) -> list[str]:
    """Return the elements of data that name them, by atomic number."""
    spec = ReadSpec(SYMBOLS, takes_numbers=False)
    sources = [source for part in paths if part for source in open_systems(list(part), spec)]
    found = sum(scan_system(source, len(SYMBOLS), 1.0).type_counts.sum(axis=0, dtype=np.int64) for source in sources)
    return [SYMBOLS[k] for k in np.flatnonzero(found)]


@dataclass(frozen=True)
class _Data:
    """The facts about data that the choices depend on."""

    kind: Kind
    why_kind: str
    labels: frozenset[str]
    report: DataReport
    is_split: bool
    why_split: str
    wider: tuple[int, int]  # most neighbors within the cutoff and a larger one

    @property
    def metric(self) -> str | None:
        """The error that chooses the best files: of forces, or of energies; None where frames have neither."""
        found = [label for label in (FORCE, ENERGY) for scan in self.report.validation if scan.label_frames.get(label)]
        return f"{found[0][0].upper()}:RMSE" if found else None

    @classmethod
    def read(cls, wishes: Wishes, type_map: Sequence[str]) -> _Data:
        """Return the facts about the data.

        Raises:
            DataError: with every mistake that would end a run.
        """
        config = config_from_dict(_values_to_read(wishes, type_map), "init")
        data = open_run(config)
        is_split, why = not wishes.validation, ""
        if is_split:
            try:
                split = choose_validation(config, data, 1)[""]
            except DataError as error:
                is_split, why = False, str(error).partition("validation_fraction: ")[2]
            else:
                data, why = split_off(config, data, {"": split}), split.lines[0].partition(": ")[2]
        report = check_task(config.task(None), data[""])
        labels = frozenset(name for scan in report.training for name, n in scan.label_frames.items() if n)
        report.raise_problems()
        frames = [
            source.frame(k) for source in evenly_spaced(data[""].train, _SAMPLE) for k in range(source.num_frames)
        ]
        kind, why_kind = _kind_of(frames, type_map)
        far = wishes.rcut * _WIDER
        found = neighbor_statistics(((f.coord, f.box, f.atom_type) for f in frames), far, len(type_map))
        wider = found.max_within(wishes.rcut), found.max_total
        return cls(kind, why_kind, labels, report, is_split, why, wider)


def _values_to_read(wishes: Wishes, type_map: Sequence[str]) -> dict[str, Any]:
    """Return an input that names the data; its model has the cutoff, and nothing of it is trained."""
    training: dict[str, Any] = {"training_data": {"systems": list(wishes.systems)}, "numb_steps": 1, "seed": 1}
    if wishes.validation:
        training["validation_data"] = {"systems": list(wishes.validation)}
    else:
        training["validation_fraction"] = _FRACTION
    descriptor = {"type": "se_e2_a", "rcut": wishes.rcut, "rcut_smth": min(0.5, wishes.rcut / 2)}
    return {
        "model": {"type_map": list(type_map), "descriptor": descriptor, "fitting_net": {}},
        "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-5},
        "training": training,
    }


def _kind_of(frames: Sequence[Frame], type_map: Sequence[str]) -> tuple[Kind, str]:
    """Return the kind of most of the frames, and how it is known."""
    votes = Counter(_kind_of_frame(frame, type_map) for frame in frames)
    kind = votes.most_common(1)[0][0]
    reason = {
        "molecules": "open boundaries, or cells with one molecule or much space",
        "liquid": "cells with several molecules",
        "solid": "bonds continue from cell to cell",
    }[kind]
    return kind, f"{reason}, in {votes[kind]} of {len(frames)} frames looked at"


def _kind_of_frame(frame: Frame, type_map: Sequence[str]) -> Kind:
    if frame.box is None:
        return "molecules"
    number = _number_of_molecules(frame, type_map)
    if number is None:
        return "solid"
    volume = abs(np.linalg.det(frame.box.reshape(3, 3)))
    return "molecules" if number == 1 or volume / len(frame.atom_type) > _ROOMY else "liquid"


def _number_of_molecules(frame: Frame, type_map: Sequence[str]) -> int | None:
    """Return the number of sets of atoms that bonds join; None if bonds lead from an atom to an image of it."""
    radii = np.array([COVALENT_RADII.get(type_map[k], 1.0) for k in frame.atom_type])
    i, j, vector, distance = find_pairs_once(frame.coord, frame.box, _BOND * 2 * float(radii.max()))
    bonded = distance < _BOND * (radii[i] + radii[j])
    bonds = defaultdict(list)
    for one, other, way in zip(i[bonded].tolist(), j[bonded].tolist(), vector[bonded]):
        bonds[one].append((other, way))
        bonds[other].append((one, -way))
    places: dict[int, Any] = {}  # of atoms, with those that bonds join to them in the same image
    number = 0
    for first in range(len(radii)):
        if first in places:
            continue
        number, places[first], left = number + 1, np.zeros(3), [first]
        while left:
            one = left.pop()
            for other, way in bonds[one]:
                place = places[one] + way
                if other not in places:
                    places[other] = place
                    left.append(other)
                elif np.abs(places[other] - place).max() > _SAME_PLACE:
                    return None
    return number


def _assemble(
    wishes: Wishes,
    data: _Data,
    type_map: Sequence[str],
    preset: Mapping[str, Any],
    recipes: Mapping[str, Any],
    steps: int | None,
) -> Proposal:
    """Return the input for a number of steps, by default that of the recipe."""
    kind = wishes.kind or data.kind
    recipe = {**recipes[kind], **preset.get("instead", {}).get(kind, {})}
    window = max(10, (steps := steps or recipe["steps"]) // _WINDOW)
    model = _model(wishes, type_map, preset)
    values: dict[str, Any] = {
        "model": model,
        **_optimization(recipes["common"], recipe, steps, data.labels),
        "training": _training(wishes, data, steps, window),
    }
    if data.metric:
        values["validating"] = {
            "full_validation": True,
            "ema_full_validation": True,
            "validation_freq": max(1, steps // _EVENTS),
            "validation_metric": data.metric,
            "full_val_start": 0.0,
        }
    most, wider = data.wider
    why = {
        "model.type_map": "elements of the data",
        "model.descriptor": f"size {wishes.size}: {preset['about']}",
        "model.descriptor.rcut": f"angstrom; an atom has up to {most} neighbors, and {wider} within "
        f"{wishes.rcut * _WIDER:.3g}: time and memory grow as their number",
        "model.descriptor.sel": "the largest numbers of neighbors, counted in the data",
        "model.descriptor.precision": "less time and memory than float64; compare the errors before you rely on it",
        "optimizer": recipes["common"]["why"],
        "optimizer.lr_adjust": "vectors take Adam's steps, with the rate over this",
        "learning_rate.start_lr": "lower it if energies stay far off",
        "loss": f"constant weights, for data of the kind {kind} ({recipe['about']})",
        **{f"loss.start_pref_{one[0]}": "no such labels" for one in (ENERGY, FORCE) if one not in data.labels},
        "training.training_data.batch_size": "as many frames as have 32 atoms",
        "training.validation_fraction": data.why_split,
        "training.numb_steps": "take more for a model that you use" if wishes.steps is None else "as given",
        "training.seed": "of weights, batches and the split",
        "training.ema_decay": f"an average over the last {window} steps, as the rate is high",
        "validating.validation_freq": f"all validation frames, {_EVENTS} times",
        "validating.validation_metric": "best files are those with the smallest error of this",
    }
    found = ", ".join(label for label in _LABELS.values() if label in data.labels)
    head = [
        f"Written by dp-ema init {__version__}. Try others: dp-ema init --help; every option: dp-ema doc.",
        f"Data: {kind} ({data.why_kind if wishes.kind is None else 'as given'}); labels: {found}.",
        f"Model: {model['descriptor']['type']} {wishes.size}. {values['optimizer']['type']}, "
        f"rate {recipe['start_lr']:g}, {steps:,} steps.",
    ]
    missing = [f"no validation frames: {data.why_split}"] if data.why_split and not data.is_split else []
    return Proposal(values, why, head, [*data.report.warnings, *missing])


def _model(wishes: Wishes, type_map: Sequence[str], preset: Mapping[str, Any]) -> dict[str, Any]:
    size = preset["sizes"][wishes.size]
    # type and rcut come first
    descriptor = {"type": "", "rcut": wishes.rcut, **preset["descriptor"], **size["descriptor"]}
    if "rcut_smth" in descriptor:
        descriptor["rcut_smth"] = min(descriptor["rcut_smth"], wishes.rcut / 2)
    fitting = {**preset["fitting_net"], **size["fitting_net"]}
    return {"type_map": list(type_map), "descriptor": descriptor, "fitting_net": fitting}


def _optimization(
    common: Mapping[str, Any], recipe: Mapping[str, Any], steps: int, labels: frozenset[str]
) -> dict[str, Any]:
    """Return optimizer, learning rate and loss; virials that the data do not have are not mentioned."""
    rate, prefactors = recipe["start_lr"], recipe["prefactors"]
    weights = {letter: prefactors[letter] if label in labels else 0 for letter, label in _LABELS.items()}
    if VIRIAL not in labels:
        del weights["v"]
    return {
        "optimizer": {**common["optimizer"], "lr_adjust": recipe["lr_adjust"]},
        "learning_rate": {
            **common["learning_rate"],
            "warmup_steps": min(common["learning_rate"]["warmup_steps"], steps // 5),
            "start_lr": rate,
            "stop_lr": rate / 100,
        },
        "loss": {"type": "ener"}
        | {f"{when}_pref_{letter}": value for letter, value in weights.items() for when in ("start", "limit")},
    }


def _training(wishes: Wishes, data: _Data, steps: int, window: int) -> dict[str, Any]:
    """Return the section with an average over ``window`` steps."""
    training: dict[str, Any] = {"training_data": {"systems": list(wishes.systems), "batch_size": "auto"}}
    if wishes.validation:
        training["validation_data"] = {"systems": list(wishes.validation)}
    elif data.is_split:
        training["validation_fraction"] = _FRACTION
    return training | {
        "numb_steps": steps,
        "seed": 1,
        "disp_freq": max(1, steps // (2 * _EVENTS)),
        "save_freq": max(1, steps // _EVENTS),
        "enable_ema": True,
        "ema_decay": float(f"{1 - 1 / window:.6g}"),
    }


def _steps_in(seconds: float, cost: Cost) -> int:
    """Return the number of steps of a run of this length, in two digits.

    Raises:
        UserError: if they are too few.
    """
    fixed = cost.start + cost.events + cost.end  # rows, validations and checkpoints are as many in a run of any length
    left, in_first_epoch = seconds - fixed, cost.epoch_steps * (cost.new_step - cost.step)
    steps = int(max((left - in_first_epoch) / cost.step, min(left / cost.new_step, cost.epoch_steps)))
    if steps < _MIN_STEPS:
        needed = fixed + _MIN_STEPS * cost.new_step
        raise UserError(
            f"--hours {seconds / 3600:g}: a step takes {cost.step:.2g} s here, and a run needs {duration(needed)} "
            f"(--hours {math.ceil(needed / 36) / 100:g}) for {_MIN_STEPS} steps. Give more time, a smaller model "
            "(--size S) or a shorter cutoff (--rcut)."
        )
    unit = 10 ** (len(str(steps)) - 2)
    return steps // unit * unit


def _yaml(values: Mapping[str, Any], why: Mapping[str, str], place: tuple[str, ...]) -> Iterator[str]:
    """Yield lines of YAML, each option with its reason."""
    indent = "  " * len(place)
    for key, value in values.items():
        reason = why.get(".".join((*place, key)))
        is_section = isinstance(value, Mapping)
        line = f"{indent}{key}:" + f" {json.dumps(value, ensure_ascii=False)}" * (not is_section)
        beside = f"{line}  # {reason}" if reason else line
        if len(beside) <= _MAX_LINE:
            yield beside
        else:
            yield from (f"{indent}# {part}" for part in wrap(reason or "", _MAX_LINE - len(indent)))
            yield line
        if is_section:
            yield from _yaml(value, why, (*place, key))


def _with_comments(values: Mapping[str, Any], why: Mapping[str, str], place: tuple[str, ...]) -> dict[str, Any]:
    """Return values with the reason of each option under its name with ``_`` before it."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if reason := why.get(".".join((*place, key))):
            out[f"_{key}"] = reason
        out[key] = _with_comments(value, why, (*place, key)) if isinstance(value, Mapping) else value
    return out
