"""An input proposed for data, ``dp-ema init``.

Models, recipes and reasons are in files of the folder ``config/presets``.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from deepmd_ema.commands.fine_tuning import (
    ALL,
    FRACTION,
    TRAINED,
    model_section,
    with_replay,
)
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
from deepmd_ema.data.sampler import batch_sizes
from deepmd_ema.data.source import Frame, FrameSource, ReadSpec, evenly_spaced
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.geometry import find_pairs_once, neighbor_statistics
from deepmd_ema.infer.load import LoadedModel, load_model
from deepmd_ema.model.output_bias import AUTO, FIT, KEEP, energies_of, move_bias
from deepmd_ema.report.table import duration
from deepmd_ema.text import command, counted, did_you_mean
from deepmd_ema.training.estimate import Cost, measure_steps
from deepmd_ema.utils import __version__

_BOND = 1.25  # two atoms are bonded within this times the sum of their covalent radii
_SAME_PLACE = 0.1  # angstrom; an image of an atom is farther away
_ROOMY = 60.0  # angstrom^3 per atom above which a cell is mostly empty
_SAMPLE = 30  # frames that are looked at
_WIDER = 4 / 3  # a larger cutoff, as a factor, whose number of neighbors is stated
_EVENTS = 10  # checkpoints in a run, and validations at most
_MIN_VALIDATIONS = 4  # a curve needs some points
_VALIDATING = 0.1  # of the time of a run, unless it is so short that the smallest number takes more
_WINDOW = 40  # the average of a run is over a 40th of its steps
_MIN_WINDOWS = (
    6  # in a short run, at most a 6th; `check` warns of averages that lag, above a 5th
)
_MIN_STEPS = 100  # --hours that allow fewer are an error
_MAX_ELEMENTS = (
    4  # se_e2_a has networks for each pair of elements, se_atten_v2 one for all
)
_MAX_LINE = 110  # columns; a reason that does not fit beside its option is above it
_SLOWER = 0.1  # the rate of fine-tuning, as a part of that of a new model
_LABELS = {"e": ENERGY, "f": FORCE, "v": VIRIAL}  # by letter of the prefactor
_BIAS = {AUTO: "decided then", FIT: "moved", KEEP: "kept"}  # as printed


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
        device: of the run.
        finetune: file of the model that is trained further; model, size and rcut have no effect
            then.
        head: which model of that file, if it holds several.
        train: the part of it that is trained: ``all``, or ``fitting``, its fitting network.
        replay: data that this model was trained on, which it is trained on again.
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

    def data_section(self, is_split: bool = True) -> dict[str, Any]:
        """Return the part of the section ``training`` that names the data.

        Data that cannot be split are trained on without validation, which is a warning.
        """
        section: dict[str, Any] = {
            "training_data": {"systems": list(self.systems), "batch_size": "auto"}
        }
        if self.validation:
            section["validation_data"] = {"systems": list(self.validation)}
        elif is_split:
            section["validation_fraction"] = FRACTION
        return section

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
                    k
                    for k, name in enumerate(self.type_map or ())
                    if name in self.sel_type
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
    """An input with a reason for each choice.

    Args:
        wishes: of the user, with the elements.
        data: facts about the data.
        source: the model that is fine-tuned; None for a new one.
        old: facts about the data of a replay; None without.

    Attributes:
        values: of the input.
        why: reasons, by dotted path.
        head: lines about the data.
        warnings: findings that the user should look at.
    """

    def __init__(
        self, wishes: Wishes, data: _Data, source: LoadedModel | None, old: _Data | None
    ) -> None:
        recipe = _choose_recipe(wishes, data)
        options = recipe.options
        steps = wishes.steps or options["steps"]
        validations = _number_of_validations(steps, data)
        window = _average_window(steps)
        full_rate = options["start_lr"]
        # orthogonalized updates have one size, and without weight decay weights grow with their
        # number: long runs of solids at one rate diverged
        slower = min(1, math.sqrt(options["full_rate_steps"] / steps))
        start_lr = float(f"{full_rate * slower:.2g}")
        # vectors keep their rate, start_lr / lr_adjust
        lr_adjust = _rounded(options["lr_adjust"] * start_lr / full_rate)
        optimizer = {**options["optimizer"], "lr_adjust": lr_adjust}
        if source is None:
            # what a fine-tuning starts from is not drawn to 0
            if steps >= options["weight_decay_steps"]:
                optimizer["weight_decay"] = options["weight_decay"]
            model = {
                "type_map": list(wishes.type_map or ()),
                "descriptor": recipe.descriptor,
                "fitting_net": recipe.fitting_net,
            }
        else:
            model = _fine_tuned_section(recipe, wishes, data, source)
            # at the rate of a new model it would forget what it has learned
            start_lr = _rounded(start_lr * _SLOWER)
        if wishes.property is None:
            loss = _energy_loss(options["prefactors"], data.labels)
        else:
            loss = _quantity_loss(
                data.predicted[0], *(name in data.labels for name in data.predicted[:2])
            )
        values: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "learning_rate": _rate_section(recipe, steps, start_lr),
            "loss": loss,
            "training": {
                **wishes.data_section(data.is_split),
                "numb_steps": steps,
                "seed": 1,
                "disp_freq": max(1, steps // (2 * _EVENTS)),
                "save_freq": max(1, steps // _EVENTS),
                "enable_ema": True,
                "ema_decay": _rounded(1 - 1 / window),
            },
        }
        if validating := _validating_section(
            wishes, data, max(1, steps // validations)
        ):
            values["validating"] = validating
        self.values = (
            values if old is None else with_replay(values, wishes.replay, old.is_split)
        )
        self.why = _reasons(recipe, wishes, data, window, validations, source, old)
        self.warnings = _warnings(wishes, data, old)
        self.head = self._head(recipe, wishes, data, source)

    def text(self, file: Path) -> str:
        """Return the input as YAML with comments, or as JSON whose comments are keys with ``_``."""
        if file.suffix.lower() in JSON_SUFFIXES:
            commented = {"_comment": self.head, **_with_comments(self.values, self.why)}
            return json.dumps(commented, indent=2, ensure_ascii=False) + "\n"
        lines = [f"# {line}" for line in self.head]
        lines += _yaml(_with_comments(self.values, self.why))
        return "\n".join(lines) + "\n"

    def _head(
        self, recipe: _Recipe, wishes: Wishes, data: _Data, source: LoadedModel | None
    ) -> list[str]:
        """Return lines about the program, the data, the model and its output bias."""
        why_kind = "as given"
        if wishes.kind is None:
            about = recipe.options["about"].partition(";")[0]
            why_kind = f"{about}, in {data.frames} frames looked at"
        labels = ", ".join(label for label in data.predicted if label in data.labels)
        if source is None:
            model = f"{recipe.descriptor['type']} {wishes.size}"
        else:
            model = f"{source.config.descriptor.type} of {wishes.finetune}, {TRAINED[wishes.train]}"
        start_lr = self.values["learning_rate"]["start_lr"]
        steps = self.values["training"]["numb_steps"]
        lines = [
            f"Written by dp-ema init {__version__}. Try others: dp-ema init --help; every option: "
            "dp-ema doc.",
            f"Data: {recipe.kind} ({why_kind}); labels: {labels}.",
            f"Model: {model}. {recipe.options['optimizer']['type']}, rate {start_lr:g}, "
            f"{steps:,} steps.",
        ]
        bias, why_bias = data.bias
        if bias:
            lines.append(f"Output bias: {why_bias}: {_BIAS[bias]}.")
        return lines


def propose(wishes: Wishes) -> Proposal:
    """Return an input for data.

    Raises:
        UserError: for data that cannot be trained on, or too little time.
    """
    if wishes.type_map:
        elements = list(wishes.type_map)
    else:  # elements that the data name, by atomic number
        spec = ReadSpec(SYMBOLS, takes_numbers=False)
        counts = np.zeros(len(SYMBOLS), np.int64)
        for paths in (wishes.systems, wishes.validation, wishes.replay):
            for system in open_systems(list(paths), spec) if paths else ():
                scan = scan_system(system, len(SYMBOLS), 1.0)
                counts += scan.type_counts.sum(axis=0, dtype=np.int64)
        elements = [SYMBOLS[k] for k in np.flatnonzero(counts)]
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
        # elements of the file keep their types; new ones follow
        elements = list(dict.fromkeys([*source.config.type_map, *elements]))
        predicted = source.model.labels[0].partition("[")[0]
        if wishes.property is None and ENERGY not in source.model.labels:
            raise UserError(
                f"--finetune {wishes.finetune}: predicts {predicted}, not energies. Give "
                f"--property {predicted}."
            )
        if wishes.sel_type and predicted == wishes.property:
            raise UserError(
                "init --sel-type: the elements are those of --finetune. Leave it out."
            )
        wishes = replace(
            wishes,
            rcut=source.config.descriptor.cutoff,
            model=source.config.descriptor.type,
        )
    wishes = replace(wishes, type_map=elements)
    try:
        if wishes.property in (DIPOLE, POLAR) and wishes.sel_type is None:
            systems = [*wishes.systems, *wishes.validation]
            wishes = replace(wishes, sel_type=selected_elements(systems, elements))
        for name in wishes.sel_type or ():
            if wishes.property not in (DIPOLE, POLAR):
                raise UserError(
                    "init --sel-type: is an option for --property dipole and polarizability. "
                    "Leave it out."
                )
            if name not in elements:
                raise UserError(
                    f"init --sel-type {name}: {did_you_mean(name, elements)}"
                )
        data = _Data(wishes, source)
        old = None
        if wishes.replay:
            old = _Data(replace(wishes, systems=wishes.replay, validation=(), test=()))
    except DataError as error:
        # there is no input yet whose type_map could be changed: the option is named in its place
        raise DataError(
            problem.replace("model.type_map", "-t") for problem in error.problems
        ) from None
    proposal = Proposal(wishes, data, source, old)
    # options of a file may not fit to new elements or to another quantity
    config = config_from_dict(proposal.values, "the proposed input")
    if wishes.hours is not None:
        # the time of a step is that of the proposed model, whatever the number of steps
        cost = measure_steps(config, wishes.device)
        wishes = replace(wishes, steps=_steps_in(3600 * wishes.hours, cost))
        proposal = Proposal(wishes, data, source, old)
        measured = (
            f"{cost.step_s:.2g} s per step, in {counted(cost.steps_measured, 'step')}"
        )
        proposal.why["training.numb_steps"] = (
            f"{wishes.hours:g} h on this machine: {measured}"
        )
    return proposal


class _Data:
    """The facts about data that the choices depend on.

    Args:
        wishes: with the data and the cutoff.
        source: the model that is fine-tuned; None for a new one.

    Attributes:
        bias: option ``finetune_bias`` and its reason; both are empty for a new model.
        kind: of most of the frames.
        sample: the frames that were looked at.
        frames: number of them that are of this kind, as text.
        labels: names of labels that training frames have.
        report: of the checks.
        predicted: names of labels that the model predicts.
        is_split: whether validation frames are split off.
        why_split: which frames these are, or why there are none.
        wider: most neighbors within the cutoff and a larger one.
        step_atoms: atoms of a step, as the mean over the frames.

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
        # nothing of the model is built: the checks need elements, cutoff and labels
        values = {
            "model": {
                "type_map": list(type_map),
                "descriptor": descriptor,
                "fitting_net": wishes.fitting_section(),
            },
            "loss": _quantity_loss(wishes.property or ENERGY),
            "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-5},
            "training": {**wishes.data_section(), "numb_steps": 1, "seed": 1},
            "validating": wishes.test_section(),
        }
        config = config_from_dict(values, "init")
        data = open_run(config)
        self.predicted = config.task(None).model.fitting_net.labels
        self.is_split = not wishes.validation
        self.why_split = ""
        if self.is_split:
            try:
                split = choose_validation(config, data, 1)[""]
            except (
                DataError
            ) as error:  # too few frames; the option that it names is not set here
                self.is_split = False
                self.why_split = str(error).partition("validation_fraction: ")[2]
            else:
                data = split_off(config, data, {"": split})
                self.why_split = split.lines[0].partition(": ")[2]
        self.report = check_task(config, "", data[""])
        self.labels = {
            name
            for scan in self.report.training
            for name, n in scan.label_frames.items()
            if n
        }
        self.report.raise_problems()
        self.sample = evenly_spaced(data[""].train, _SAMPLE)
        frames = [part.frame(k) for part in self.sample for k in range(part.num_frames)]
        self.bias = ("", "")
        if source is not None:
            self.bias = _bias_of_start(source, self.sample, self.predicted)
        votes = Counter(_kind_of(frame, type_map) for frame in frames)
        self.kind, number = votes.most_common(1)[0]
        self.frames = f"{number} of {len(frames)}"
        atoms = np.array([len(frame.atom_type) for frame in frames])
        self.step_atoms = batch_sizes("auto", [atoms]).sizes[0] * float(atoms.mean())
        geometries = ((f.coord, f.box, f.atom_type) for f in frames)
        # one search within the larger cutoff counts the neighbors within both
        near = neighbor_statistics(geometries, wishes.rcut * _WIDER, len(type_map))
        self.wider = near.max_within(wishes.rcut), near.max_total


class _Recipe(NamedTuple):
    """Presets for a model and for data.

    Attributes:
        kind: of the data.
        about: the model, as text.
        descriptor: section of a new model.
        fitting_net: section of a new fitting network.
        options: of the training, for data of this kind.
    """

    kind: Kind
    about: str
    descriptor: Mapping[str, Any]
    fitting_net: Mapping[str, Any]
    options: Mapping[str, Any]


def _choose_recipe(wishes: Wishes, data: _Data) -> _Recipe:
    """Return the recipe of the model that the user wants, or of one that suits the elements."""
    if wishes.model is not None:
        name = wishes.model
    elif (
        wishes.property is None
    ):  # least errors for the time (benchmarks/results/race.md)
        name = "dpa4c"
    else:
        has_few_elements = len(wishes.type_map or ()) <= _MAX_ELEMENTS
        name = "se_e2_a" if has_few_elements else "se_atten_v2"
    presets = read_preset(MODELS)
    # the model of a file may be one without a preset: it is trained as se_e2_a
    preset = presets.get(name, presets["se_e2_a"])
    size = preset["sizes"][wishes.size]
    kind = wishes.kind or data.kind
    choices = preset["kinds"][kind]
    # the order of the keys is that of the file: type and rcut come first
    descriptor = {
        "type": "",
        "rcut": wishes.rcut,
        **preset["descriptor"],
        **size["descriptor"],
    }
    descriptor |= choices.get("descriptor", {})
    if (
        "rcut_smth" in descriptor
    ):  # the switch begins in the outer half of a short cutoff at latest
        descriptor["rcut_smth"] = min(descriptor["rcut_smth"], wishes.rcut / 2)
    fitting = {
        **preset["fitting_net"],
        **size["fitting_net"],
        **wishes.fitting_section(),
    }
    recipes = read_preset(preset["recipes"])
    options = {**recipes["common"], **recipes[kind], **choices}
    return _Recipe(kind, preset["about"], descriptor, fitting, options)


def _average_window(steps: int) -> int:
    """Return the number of steps that the average of a run is over, at least two."""
    window = max(10, steps // _WINDOW)
    return max(2, min(window, steps // _MIN_WINDOWS))


def _number_of_validations(steps: int, data: _Data) -> int:
    """Return the number of validations, which is small in a short run."""
    # a step takes about three times as long as an evaluation of its atoms, and there are two: with
    # the live and with the averaged weights
    atoms = sum(scan.type_counts.sum() for scan in data.report.validation)
    most = _VALIDATING * 1.5 * steps * data.step_atoms / max(1, atoms)
    return int(min(_EVENTS, max(_MIN_VALIDATIONS, most)))


def _fine_tuned_section(
    recipe: _Recipe, wishes: Wishes, data: _Data, source: LoadedModel
) -> dict[str, Any]:
    """Return the section ``model`` of the model of a file."""
    type_map = list(wishes.type_map or ())
    section = model_section(source.config, type_map, wishes.head, wishes.train)
    # a fitting network for another quantity starts from its seed, and its elements are others
    if source.model.labels != data.predicted:
        section |= {"fitting_net": recipe.fitting_net, "finetune_head": "RANDOM"}
        section.pop("atom_exclude_types", None)
        section.pop("preset_out_bias", None)
    bias, _ = data.bias
    if bias:
        section["finetune_bias"] = bias
    return section


def _rate_section(recipe: _Recipe, steps: int, start_lr: float) -> dict[str, Any]:
    """Return the section ``learning_rate``."""
    common = recipe.options["learning_rate"]
    # at most a fifth of a short run is warm-up
    rates = {"start_lr": start_lr, "stop_lr": _rounded(start_lr / 100)}
    return {**common, "warmup_steps": min(common["warmup_steps"], steps // 5), **rates}


def _energy_loss(
    prefactors: Mapping[str, float], labels: Collection[str]
) -> dict[str, Any]:
    """Return the section ``loss`` of energies and their derivatives; absent labels weigh 0."""
    weights = {k: n if _LABELS[k] in labels else 0 for k, n in prefactors.items()}
    # most data have no virials: the input does not mention them; a 0 shows that energies or forces
    # are absent
    if VIRIAL not in labels:
        del weights["v"]
    return {"type": "ener", **_constant(weights)}


def _quantity_loss(
    predicted: str, has_frame_labels: bool = True, has_atom_labels: bool = True
) -> dict[str, Any]:
    """Return the section ``loss`` of a quantity; absent labels weigh 0.

    Args:
        predicted: name of the label that the model predicts.
        has_frame_labels: whether a frame has one value.
        has_atom_labels: whether each atom has one.
    """
    kind = predicted.partition("[")[0]
    if kind in (DIPOLE, POLAR):
        weights = {"pref": int(has_frame_labels), "pref_atomic": int(has_atom_labels)}
        return {"type": "tensor", **weights}
    if kind == DOS:
        weights = {"dos": int(has_frame_labels), "ados": int(has_atom_labels)}
        return {"type": DOS, **_constant(weights)}
    return {"type": "ener" if kind == ENERGY else "property"}


def _constant(weights: Mapping[str, float]) -> dict[str, float]:
    """Return prefactors that are the same from the start of a run to its end."""
    return {
        f"{when}_pref_{k}": n for k, n in weights.items() for when in ("start", "limit")
    }


def _validating_section(wishes: Wishes, data: _Data, interval: int) -> dict[str, Any]:
    """Return the section ``validating``, which may be empty.

    Validation needs frames with a label by which the best files are chosen.
    """
    section = {}
    # forces first: a frame has many of them and one energy
    ranked = (FORCE, ENERGY) if wishes.property is None else data.predicted
    for label in ranked:
        if any(scan.label_frames.get(label) for scan in data.report.validation):
            section = {
                "full_validation": True,
                "ema_full_validation": True,
                "validation_freq": interval,
                "validation_metric": f"{LABELS[label].errors[-1].metric}:RMSE",
                "full_val_start": 0.0,
            }
            break
    return {**section, **wishes.test_section()}


def _reasons(
    recipe: _Recipe,
    wishes: Wishes,
    data: _Data,
    window: int,
    validations: int,
    source: LoadedModel | None,
    old: _Data | None,
) -> dict[str, str]:
    """Return the reasons of the choices by dotted path."""
    facts = {
        "size": wishes.size,
        "about": recipe.about,
        "most": data.wider[0],
        "more": data.wider[1],
        "wider": f"{wishes.rcut * _WIDER:.3g}",
        "why": recipe.options["why"],
        "full_rate": f"{recipe.options['full_rate_steps']:,}",
        "kind": recipe.kind,
        "about_kind": recipe.options["about"],
        "why_split": data.why_split,
        "window": window,
        "validations": validations,
        "file": source.info.path if source is not None else "",
        "why_bias": data.bias[1],
    }
    parts = ["of_all", "of_new_model" if source is None else "of_fine_tuning"]
    if old is not None:
        parts.append("of_replay")
    texts = read_preset(REASONS)
    # reasons of options that the input does not have are not shown
    why = {
        path: text.format(**facts)
        for part in parts
        for path, text in texts[part].items()
    }
    loss = "loss" if old is None else "loss_dict.new"
    if wishes.property is None:
        for label in (ENERGY, FORCE):
            if label not in data.labels:
                why[f"{loss}.start_pref_{label[0]}"] = "no such labels"
    else:  # the reason is about the weights of energies and forces
        del why[loss]
    if wishes.steps is not None:
        why["training.numb_steps"] = "as given"
    return why


def _warnings(wishes: Wishes, data: _Data, old: _Data | None) -> list[str]:
    """Return the findings of the checks that the user should look at."""
    warnings = data.report.warnings
    # a model of another quantity can be trained on labels of frames or of atoms alone
    if wishes.property is not None:
        absent = tuple(
            f"no {name} in the " for name in data.predicted if name not in data.labels
        )
        warnings = [text for text in warnings if not text.startswith(absent)]
    if data.why_split and not data.is_split:
        warnings.append(f"no validation frames: {data.why_split}")
    if old is not None:
        warnings += [f"old data: {line}" for line in old.report.warnings]
    return warnings


def _kind_of(frame: Frame, type_map: Sequence[str]) -> Kind:
    """Return the kind of a frame, from the sets of atoms that are joined by bonds."""
    if frame.box is None:
        return "molecules"
    radii = np.array([COVALENT_RADII.get(type_map[k], 1.0) for k in frame.atom_type])
    pairs = find_pairs_once(frame.coord, frame.box, _BOND * 2 * float(radii.max()))
    bonded = pairs.distance < _BOND * (radii[pairs.i] + radii[pairs.j])
    bonds = defaultdict(list)
    for atom, neighbor, shift in zip(
        pairs.i[bonded].tolist(), pairs.j[bonded].tolist(), pairs.vector[bonded]
    ):
        bonds[atom].append((neighbor, shift))
        bonds[neighbor].append((atom, -shift))
    # Molecules are walked through from bond to bond, without wrapping at the cell: where the walk
    # comes back to an atom at another place, this is an image of it, and the bonds have no end.
    places: dict[int, Any] = {}  # of atoms that were reached, angstrom
    num_molecules = 0
    for first in range(len(radii)):
        if first in places:
            continue
        num_molecules += 1
        places[first] = np.zeros(3)
        left = [first]
        while left:
            atom = left.pop()
            for neighbor, shift in bonds[atom]:
                place = places[atom] + shift
                if neighbor not in places:
                    places[neighbor] = place
                    left.append(neighbor)
                elif np.abs(places[neighbor] - place).max() > _SAME_PLACE:
                    return "solid"
    volume = abs(np.linalg.det(frame.box.reshape(3, 3)))
    return (
        "molecules"
        if num_molecules == 1 or volume / len(frame.atom_type) > _ROOMY
        else "liquid"
    )


def _bias_of_start(
    source: LoadedModel, sample: Sequence[FrameSource], predicted: Sequence[str]
) -> tuple[str, str]:
    """Return the option ``finetune_bias`` and its reason, from errors of a model on some frames.

    Frames with elements that the model does not know are left out. Both are empty if the fitting
    network starts anew.
    """
    config, model = source.config, source.model
    fitting = config.fitting_net
    if fitting.labels != tuple(predicted) or not np.any(fitting.bias_effect):
        return "", ""
    num_types = len(config.type_map)
    chosen = [
        [
            k
            for k in range(system.num_frames)
            if system.frame(k).atom_type.max() < num_types
        ]
        for system in sample
    ]
    if fitting.numb_fparam or fitting.numb_aparam or not any(chosen):
        return AUTO, "errors of the model before the first step decide"
    frames = energies_of(
        model, config, sequential_batches(sample, model.layout, frames=chosen)
    )
    if not len(frames):
        return AUTO, "no labels to compare"
    # a row for each type; energies have one number, other quantities their width
    shape = (num_types, *frames.residual().shape[1:])
    bias = model.out_bias.numpy().reshape(shape)
    spread = model.out_std.numpy().reshape(shape)
    move = move_bias(frames, bias, spread)
    return (
        FIT if move.is_moved else KEEP,
        f"{move.evidence(config)}, on {counted(len(frames), 'frame')}",
    )


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
    left = seconds - fixed
    in_first_epoch = new * (new_s - cost.step_s)
    # beyond the first epoch, or within it, when neighbors are searched in each step
    steps = int(max((left - in_first_epoch) / cost.step_s, min(left / new_s, new)))
    if steps < _MIN_STEPS:
        needed = fixed + _MIN_STEPS * new_s
        raise UserError(
            f"--hours {seconds / 3600:g}: a step takes {cost.step_s:.2g} s here, and a run needs "
            f"{duration(needed)} (--hours {math.ceil(needed / 36) / 100:g}) for {_MIN_STEPS} "
            "steps. Give more time, a smaller model (--size S) or a shorter cutoff (--rcut)."
        )
    # two digits: the time is not known better
    unit = 10 ** (len(str(steps)) - 2)
    return steps // unit * unit


def _yaml(commented: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield lines of YAML; the reason of an option is under its name with ``_`` before it."""
    for key, value in commented.items():
        if key.startswith("_"):
            continue
        reason = commented.get(f"_{key}", "")
        is_section = isinstance(value, Mapping)
        line = f"{indent}{key}:"
        if not is_section:  # JSON is YAML
            line += f" {json.dumps(value, ensure_ascii=False)}"
        beside = f"{line}  # {reason}" if reason else line
        if len(beside) > _MAX_LINE:
            yield from (
                f"{indent}# {part}" for part in wrap(reason, _MAX_LINE - len(indent))
            )
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
            _with_comments(value, why, f"{place}{key}.")
            if isinstance(value, Mapping)
            else value
        )
    return out
