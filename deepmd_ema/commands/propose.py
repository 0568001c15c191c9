"""An input proposed for data, ``dp-ema init``; models, recipes and reasons are in files of the
folder ``presets``.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from deepmd_ema.commands.fine_tuning import ALL, FRACTION, TRAINED, model_section, with_replay
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.labels import DIPOLE, DOS, ENERGY, FORCE, LABELS, POLAR, VIRIAL
from deepmd_ema.config.presets import MODELS, REASONS, Kind, read_preset
from deepmd_ema.config.text import JSON_SUFFIXES
from deepmd_ema.data.check.bonds import COVALENT_RADII
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.data.formats.discover import open_systems, selected_elements
from deepmd_ema.data.loader import sequential_batches
from deepmd_ema.data.run import check_task, choose_validation, open_run, split_off
from deepmd_ema.data.source import Frame, FrameSource, ReadSpec, evenly_spaced
from deepmd_ema.errors import DataError, UserError, command, counted, did_you_mean
from deepmd_ema.geometry import find_pairs_once, neighbor_statistics
from deepmd_ema.infer.load import LoadedModel, load_model
from deepmd_ema.model.output_bias import AUTO, FIT, KEEP, energies_of, move_bias
from deepmd_ema.report.table import duration
from deepmd_ema.training.estimate import Cost, measure_steps
from deepmd_ema.utils import __version__

_BOND = 1.25  # sums of covalent radii within which two atoms are bonded
_SAME_PLACE = 0.1  # angstrom; an image of an atom is farther away
_ROOMY = 60.0  # angstrom^3 per atom above which a cell is mostly empty
_SAMPLE = 30  # frames that are looked at
_WIDER = 4 / 3  # a larger cutoff, whose number of neighbors is stated
_EVENTS = 10  # validations, and checkpoints, in a run
_WINDOW = 40  # a run has so many lengths of its average
_MIN_WINDOWS = 6  # of a short one; with less than 5 an average lags behind
_MIN_STEPS = 100
_MAX_ELEMENTS = 4  # of se_e2_a, which has networks for each element
_MAX_LINE = 110
_SLOWER = 0.1  # of the rate of a model that starts from its seed
_LABELS = {"e": ENERGY, "f": FORCE, "v": VIRIAL}
_BIAS = {AUTO: "decided then", FIT: "moved", KEEP: "kept"}


@dataclass(frozen=True)
class Wishes:
    """Choices of the user; None where the data decide.

    Attributes:
        systems: training data, as ``training_data.systems``.
        validation: validation data; empty to split frames off.
        test: test data, as ``validating.test_data.systems``; empty without.
        model: name of a preset.
        size: S, M or L.
        kind: of the data.
        rcut: cutoff radius, angstrom.
        property: name and width of what is predicted instead of energies, such as ``dipole`` or
            ``dos[250]``.
        sel_type: elements whose atoms have the tensors that are predicted; None for those that have
            rows.
        type_map: elements.
        steps: of the run.
        hours: of the run on this machine.
        device: on which the run is going to be.
        finetune: file of the model that is trained further; model, size and rcut have no effect
            then.
        head: which model of that file, if it holds several.
        train: what of it is trained: ``all``, or ``fitting``, its fitting network.
        replay: data that this model was trained on, which it is to keep to.
    """

    systems: Sequence[str]
    validation: Sequence[str] = ()
    test: Sequence[str] = ()
    model: str | None = None
    size: str = "M"
    kind: Kind | None = None
    rcut: float = 6.0
    property: str | None = None
    sel_type: Sequence[str] | None = None
    type_map: Sequence[str] | None = None
    steps: int | None = None
    hours: float | None = None
    device: str | None = None
    finetune: str | None = None
    head: str | None = None
    train: str = ALL
    replay: Sequence[str] = ()

    def data_section(self) -> dict[str, Any]:
        """Return the part of the section ``training`` that names the data."""
        section: dict[str, Any] = {"training_data": {"systems": list(self.systems)}}
        if self.validation:
            return {**section, "validation_data": {"systems": list(self.validation)}}
        return {**section, "validation_fraction": FRACTION}

    def test_section(self) -> dict[str, Any]:
        """Return the part of the section ``validating`` that names the test data."""
        return {"test_data": {"systems": list(self.test)}} if self.test else {}

    def fitting_section(self) -> dict[str, Any]:
        """Return the options of the fitting network that say what is predicted."""
        if self.property is None:
            return {}
        kind, _, width = self.property.removesuffix("]").partition("[")
        if kind in (DIPOLE, POLAR):
            section: dict[str, Any] = {"type": "polar" if kind == POLAR else kind}
            if self.sel_type:
                section["sel_type"] = [
                    k for k, name in enumerate(self.type_map or ()) if name in self.sel_type
                ]
            return section
        if kind == DOS:
            return {"type": DOS, "numb_dos": int(width)}
        return {
            "type": "property",
            "property_name": kind,
            "task_dim": int(width),
            "intensive": True,
        }


class Proposal:
    """An input with a reason for each choice, by default for the steps of the recipe, or of
    fine-tuning a model.

    Args:
        wishes: of the user, with the elements.
        data: facts about the data.
        source: the model that is fine-tuned; None for a new one.
        old: facts about the data of a replay; None without.

    Attributes:
        values: of the input.
        why: reasons, by dotted path.
        head: lines about the data.
        warnings: what the user should look at.
    """

    def __init__(
        self, wishes: Wishes, data: _Data, source: LoadedModel | None, old: _Data | None
    ) -> None:
        bias, why_bias = data.bias
        type_map, presets = wishes.type_map or (), read_preset(MODELS)
        name = wishes.model or ("se_e2_a" if len(type_map) <= _MAX_ELEMENTS else "se_atten_v2")
        preset = presets.get(name, presets["se_e2_a"])  # of a model that init does not make
        recipes = read_preset(preset["recipes"])
        kind = wishes.kind or data.kind
        size = preset["sizes"][wishes.size]
        recipe = {**recipes[kind], **preset.get("instead", {}).get(kind, {})}
        common, steps = recipes["common"], wishes.steps or recipe["steps"]
        window = max(1, min(max(10, steps // _WINDOW), steps // _MIN_WINDOWS))
        # type and rcut come first
        descriptor = {"type": "", "rcut": wishes.rcut, **preset["descriptor"], **size["descriptor"]}
        if "rcut_smth" in descriptor:
            descriptor["rcut_smth"] = min(descriptor["rcut_smth"], wishes.rcut / 2)
        fitting = {**preset["fitting_net"], **size["fitting_net"], **wishes.fitting_section()}
        of_quantity = _loss_section(
            data.predicted[0], *(name in data.labels for name in data.predicted[:2])
        )
        weights = {
            k: weight if _LABELS[k] in data.labels else 0
            for k, weight in recipe["prefactors"].items()
        }
        if VIRIAL not in data.labels:  # others that the data do not have are mentioned
            del weights["v"]
        prefactors = {
            f"{when}_pref_{k}": weight
            for k, weight in weights.items()
            for when in ("start", "limit")
        }
        section, start_lr = wishes.data_section(), recipe["start_lr"]
        if source is None:
            model = {"type_map": list(type_map), "descriptor": descriptor, "fitting_net": fitting}
            of_model = f"{descriptor['type']} {wishes.size}"
        else:
            model = model_section(source.config, list(type_map), wishes.head, wishes.train)
            start_lr = _rounded(start_lr * _SLOWER)
            if wishes.property is not None and source.model.labels != data.predicted:
                model |= {"fitting_net": fitting, "finetune_head": "RANDOM"}
            model |= {"finetune_bias": bias} if bias else {}
            of_model = (
                f"{source.config.descriptor.type} of {wishes.finetune}, {TRAINED[wishes.train]}"
            )
        section["training_data"]["batch_size"] = "auto"
        if not wishes.validation and not data.is_split:
            del section["validation_fraction"]
        values: dict[str, Any] = {
            "model": model,
            "optimizer": {**common["optimizer"], "lr_adjust": recipe["lr_adjust"]},
            "learning_rate": {
                **common["learning_rate"],
                "warmup_steps": min(common["learning_rate"]["warmup_steps"], steps // 5),
                "start_lr": start_lr,
                "stop_lr": _rounded(start_lr / 100),
            },
            "loss": {"type": "ener", **prefactors} if wishes.property is None else of_quantity,
            "training": {
                **section,
                "numb_steps": steps,
                "seed": 1,
                "disp_freq": max(1, steps // (2 * _EVENTS)),
                "save_freq": max(1, steps // _EVENTS),
                "enable_ema": True,
                "ema_decay": _rounded(1 - 1 / window),
            },
        }
        # of forces, or of energies; none where validation frames have neither
        ranked = (FORCE, ENERGY) if wishes.property is None else data.predicted
        metrics = [q for q in ranked for scan in data.report.validation if scan.label_frames.get(q)]
        if metrics:
            values["validating"] = {
                "full_validation": True,
                "ema_full_validation": True,
                "validation_freq": max(1, steps // _EVENTS),
                "validation_metric": f"{LABELS[metrics[0]].errors[-1].metric}:RMSE",
                "full_val_start": 0.0,
            }
        if wishes.test:
            values["validating"] = values.get("validating", {}) | wishes.test_section()
        reasons = read_preset(REASONS)
        known = {
            "size": wishes.size,
            "about": preset["about"],
            "most": data.wider[0],
            "more": data.wider[1],
            "wider": f"{wishes.rcut * _WIDER:.3g}",
            "why": common["why"],
            "kind": kind,
            "about_kind": recipe["about"],
            "why_split": data.why_split,
            "window": window,
            "events": _EVENTS,
            "file": source.info.path if source is not None else "",
            "why_bias": why_bias,
        }
        parts = [
            "of_all",
            "of_new_model" if source is None else "of_fine_tuning",
            *["of_replay"] * (old is not None),
        ]
        self.why = why = {
            path: text.format(**known) for part in parts for path, text in reasons[part].items()
        }
        loss = "loss" if old is None else "loss_dict.new"
        if wishes.property is None:
            why |= {
                f"{loss}.start_pref_{q[0]}": "no such labels"
                for q in (ENERGY, FORCE)
                if q not in data.labels
            }
        else:
            del why[loss]
        if wishes.steps is not None:
            why["training.numb_steps"] = "as given"
        labels = ", ".join(label for label in data.predicted if label in data.labels)
        about = recipe["about"].partition(";")[0]
        why_kind = (
            f"{about}, in {data.frames} frames looked at" if wishes.kind is None else "as given"
        )
        absent = tuple(f"no {name} in the " for name in data.predicted if name not in data.labels)
        self.warnings = [
            text
            for text in data.report.warnings
            if wishes.property is None or not text.startswith(absent)
        ]
        if data.why_split and not data.is_split:
            self.warnings.append(f"no validation frames: {data.why_split}")
        if old is not None:
            self.warnings += [f"old data: {line}" for line in old.report.warnings]
        self.values = values if old is None else with_replay(values, wishes.replay, old.is_split)
        self.head = [
            f"Written by dp-ema init {__version__}. Try others: dp-ema init --help; every option: "
            "dp-ema doc.",
            f"Data: {kind} ({why_kind}); labels: {labels}.",
            f"Model: {of_model}. {values['optimizer']['type']}, rate {start_lr:g}, {steps:,} "
            "steps.",
            *([f"Output bias: {why_bias}: {_BIAS[bias]}."] if bias else []),
        ]

    def text(self, file: Path) -> str:
        """Return the text of the input: YAML with comments, or JSON whose comments are keys that
        begin with ``_``.
        """
        if file.suffix.lower() in JSON_SUFFIXES:
            commented = {"_comment": self.head, **_with_comments(self.values, self.why)}
            return json.dumps(commented, indent=2, ensure_ascii=False) + "\n"
        return (
            "\n".join(
                [
                    *(f"# {line}" for line in self.head),
                    *_yaml(_with_comments(self.values, self.why)),
                ]
            )
            + "\n"
        )


def propose(wishes: Wishes) -> Proposal:
    """Return an input for data.

    Raises:
        UserError: for data that cannot be trained on, or too little time.
    """
    if wishes.type_map:
        elements = list(wishes.type_map)
    else:  # of data that name them, by atomic number
        paths, spec = (
            (wishes.systems, wishes.validation, wishes.replay),
            ReadSpec(SYMBOLS, takes_numbers=False),
        )
        sources = [source for part in paths if part for source in open_systems(list(part), spec)]
        scans = [
            scan_system(source, len(SYMBOLS), 1.0).type_counts.sum(axis=0, dtype=np.int64)
            for source in sources
        ]
        elements = [SYMBOLS[k] for k in np.flatnonzero(sum(scans))]
    source = None
    if wishes.finetune is not None:
        source = load_model(wishes.finetune, head=wishes.head)
        if source.config.type != "standard":
            raise UserError(
                f"--finetune {wishes.finetune}: is of model.type {source.config.type}, and init "
                "writes inputs of one descriptor. "
                f"`{command('dp-ema', 'show', wishes.finetune, '--config')}` prints its section "
                "model. Write the input yourself."
            )
        elements = list(dict.fromkeys([*source.config.type_map, *elements]))
        wishes = replace(
            wishes, rcut=source.config.descriptor.cutoff, model=source.config.descriptor.type
        )
    wishes = replace(wishes, type_map=elements)
    try:
        if wishes.property in (DIPOLE, POLAR) and wishes.sel_type is None:
            wishes = replace(
                wishes, sel_type=selected_elements([*wishes.systems, *wishes.validation], elements)
            )
        for name in wishes.sel_type or ():
            if wishes.property not in (DIPOLE, POLAR):
                raise UserError(
                    "init --sel-type: is an option for --property dipole and polarizability. "
                    "Leave it out."
                )
            if name not in elements:
                raise UserError(f"init --sel-type {name}: {did_you_mean(name, elements)}")
        data = _Data(wishes, source)
        old = (
            _Data(replace(wishes, systems=wishes.replay, validation=(), test=()))
            if wishes.replay
            else None
        )
    except DataError as error:  # there is no input that has a type_map yet
        raise DataError(
            problem.replace("model.type_map", "-t") for problem in error.problems
        ) from None
    proposal = Proposal(wishes, data, source, old)
    if wishes.hours is not None:
        cost = measure_steps(config_from_dict(proposal.values, "the proposed input"), wishes.device)
        proposal = Proposal(
            replace(wishes, steps=_steps_in(3600 * wishes.hours, cost)), data, source, old
        )
        measured = f"{cost.step_s:.2g} s per step, in {counted(cost.steps_measured, 'step')}"
        proposal.why["training.numb_steps"] = f"{wishes.hours:g} h on this machine: {measured}"
    return proposal


class _Data:
    """The facts about data that the choices depend on.

    Args:
        wishes: which data, and the cutoff.
        source: the model that is fine-tuned; None for a new one.

    Attributes:
        bias: option ``finetune_bias`` and its reason; both are empty for a new model.
        kind: of most of the frames.
        sample: the frames that were looked at.
        frames: how many of them are of this kind.
        labels: names of labels that training frames have.
        report: of the checks.
        predicted: names of labels that the model predicts.
        is_split: whether validation frames are split off.
        why_split: which, or why not.
        wider: most neighbors within the cutoff and a larger one.

    Raises:
        DataError: with every mistake that would end a run.
    """

    def __init__(self, wishes: Wishes, source: LoadedModel | None = None) -> None:
        type_map = wishes.type_map or ()
        descriptor = {
            "type": "se_e2_a",
            "rcut": wishes.rcut,
            "rcut_smth": min(0.5, wishes.rcut / 2),
        }
        values = {  # nothing of the model is trained
            "model": {
                "type_map": list(type_map),
                "descriptor": descriptor,
                "fitting_net": wishes.fitting_section(),
            },
            "loss": _loss_section(wishes.property or ENERGY),
            "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-5},
            "training": {**wishes.data_section(), "numb_steps": 1, "seed": 1},
            "validating": wishes.test_section(),
        }
        config = config_from_dict(values, "init")
        data, self.predicted = open_run(config), config.task(None).model.fitting_net.labels
        self.is_split, self.why_split = not wishes.validation, ""
        if self.is_split:
            try:
                split = choose_validation(config, data, 1)[""]
            except DataError as error:
                self.is_split, self.why_split = (
                    False,
                    str(error).partition("validation_fraction: ")[2],
                )
            else:
                data, self.why_split = (
                    split_off(config, data, {"": split}),
                    split.lines[0].partition(": ")[2],
                )
        self.report = check_task(config.task(None), data[""])
        self.labels = {
            name for scan in self.report.training for name, n in scan.label_frames.items() if n
        }
        self.report.raise_problems()
        self.sample = evenly_spaced(data[""].train, _SAMPLE)
        frames = [part.frame(k) for part in self.sample for k in range(part.num_frames)]
        self.bias = (
            ("", "") if source is None else _bias_of_start(source, self.sample, self.predicted)
        )
        votes = Counter(_kind_of(frame, type_map) for frame in frames)
        self.kind, number = votes.most_common(1)[0]
        self.frames = f"{number} of {len(frames)}"
        geometries = ((f.coord, f.box, f.atom_type) for f in frames)
        near = neighbor_statistics(geometries, wishes.rcut * _WIDER, len(type_map))
        self.wider = near.max_within(wishes.rcut), near.max_total


def _loss_section(predicted: str, of_frame: bool = True, of_atom: bool = True) -> dict[str, Any]:
    """Return the section ``loss`` of a quantity, which weighs the labels of frames and of atoms
    that are present.
    """
    kind = predicted.partition("[")[0]
    if kind in (DIPOLE, POLAR):
        return {"type": "tensor", "pref": int(of_frame), "pref_atomic": int(of_atom)}
    if kind == DOS:
        weights = {"dos": int(of_frame), "ados": int(of_atom)}
        return {
            "type": DOS,
            **{f"{when}_pref_{k}": n for k, n in weights.items() for when in ("start", "limit")},
        }
    return {"type": "ener" if kind == ENERGY else "property"}


def _kind_of(frame: Frame, type_map: Sequence[str]) -> Kind:
    """Return the kind of a frame, from the sets of atoms that bonds join."""
    if frame.box is None:
        return "molecules"
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
        number = number + 1
        places[first] = np.zeros(3)
        left = [first]
        while left:
            one = left.pop()
            for other, way in bonds[one]:
                place = places[one] + way
                if other not in places:
                    places[other] = place
                    left.append(other)
                elif np.abs(places[other] - place).max() > _SAME_PLACE:
                    return "solid"  # bonds lead from an atom to an image of it
    volume = abs(np.linalg.det(frame.box.reshape(3, 3)))
    return "molecules" if number == 1 or volume / len(frame.atom_type) > _ROOMY else "liquid"


def _bias_of_start(
    source: LoadedModel, sample: Sequence[FrameSource], predicted: Sequence[str]
) -> tuple[str, str]:
    """Return the option ``finetune_bias`` and its reason, from errors of the model of a file on
    some frames.

    Frames with elements that the model does not know are left out. Both are empty if the fitting
    network starts anew.
    """
    config, model = source.config, source.model
    fitting = config.fitting_net
    if fitting.labels != tuple(predicted) or not np.any(fitting.bias_effect):
        return "", ""
    known = len(config.type_map)
    chosen = [
        [k for k in range(one.num_frames) if one.frame(k).atom_type.max() < known] for one in sample
    ]
    if fitting.numb_fparam or fitting.numb_aparam or not any(chosen):
        return AUTO, "errors of the model before the first step decide"
    frames = energies_of(model, config, sequential_batches(sample, model.layout, frames=chosen))
    if not len(frames):
        return AUTO, "no labels to compare"
    shape = (known, *frames.residual().shape[1:])
    move = move_bias(
        frames, model.out_bias.numpy().reshape(shape), model.out_std.numpy().reshape(shape)
    )
    return (
        FIT if move.is_moved else KEEP
    ), f"{move.evidence(config)}, on {counted(len(frames), 'frame')}"


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _steps_in(seconds: float, cost: Cost) -> int:
    """Return the number of steps of a run of this length, in two digits.

    Raises:
        UserError: if they are too few.
    """
    # rows, validations and checkpoints are as many in a run of any length
    fixed = cost.start_s + cost.events_s + cost.end_s
    new = cost.steps_of_first_epoch
    new_s = cost.step_of_first_epoch_s
    left, in_first_epoch = seconds - fixed, new * (new_s - cost.step_s)
    steps = int(max((left - in_first_epoch) / cost.step_s, min(left / new_s, new)))
    if steps < _MIN_STEPS:
        needed = fixed + _MIN_STEPS * new_s
        raise UserError(
            f"--hours {seconds / 3600:g}: a step takes {cost.step_s:.2g} s here, and a run needs "
            f"{duration(needed)} (--hours {math.ceil(needed / 36) / 100:g}) for {_MIN_STEPS} "
            "steps. Give more time, a smaller model (--size S) or a shorter cutoff (--rcut)."
        )
    unit = 10 ** (len(str(steps)) - 2)
    return steps // unit * unit


def _yaml(commented: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield lines of YAML, each option with its reason, which is under its name with ``_`` before
    it.
    """
    for key, value in commented.items():
        if key.startswith("_"):
            continue
        reason, is_section = commented.get(f"_{key}", ""), isinstance(value, Mapping)
        line = f"{indent}{key}:" + (
            f" {json.dumps(value, ensure_ascii=False)}" if not is_section else ""
        )
        beside = f"{line}  # {reason}" if reason else line
        if len(beside) > _MAX_LINE:
            yield from (f"{indent}# {part}" for part in wrap(reason, _MAX_LINE - len(indent)))
            beside = line
        yield beside
        if is_section:
            yield from _yaml(value, f"{indent}  ")


def _with_comments(
    values: Mapping[str, Any], why: Mapping[str, str], place: str = ""
) -> dict[str, Any]:
    """Return values with the reason of each option under its name with ``_`` before it."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if reason := why.get(f"{place}{key}"):
            out[f"_{key}"] = reason
        out[key] = (
            _with_comments(value, why, f"{place}{key}.") if isinstance(value, Mapping) else value
        )
    return out
