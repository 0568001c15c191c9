"""Errors of a model on labelled frames, measured as full validation does, and numbers of neighbors
of frames.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.labels import (
    ATOM_ENERGY,
    ATOM_PREF,
    ENERGY,
    FORCE,
    HESSIAN,
    LABELS,
    METRICS,
    QUANTITIES,
    VIRIAL,
    Label,
    Quantity,
)
from deepmd_ema.config.schema.training import CompileConfig
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.formats.discover import open_systems, repeated, stored_type_map
from deepmd_ema.data.formats.properties import KIND_NAMES, describe_singles
from deepmd_ema.data.loader import Pad, atoms_at_once, prefetch, sequential_batches
from deepmd_ema.data.source import FrameSource, ReadSpec
from deepmd_ema.distributed.files import TABLE, atomic_write, check_output
from deepmd_ema.errors import DataError, UserError, counted
from deepmd_ema.findings import Finding
from deepmd_ema.geometry import neighbor_statistics
from deepmd_ema.infer.load import LoadedModel, Provenance, load_model
from deepmd_ema.infer.potential import SAME_PLACE, describe_short_pair
from deepmd_ema.model.compiler import Compiler, pad_for
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.metrics import (
    Errors,
    FrameResult,
    evaluate,
    force_errors_by_type,
    group_frames,
    worst_frames,
)
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.tabulated import tabulate
from deepmd_ema.report.table import (
    KINDS,
    Column,
    Table,
    describe_errors,
    labelled,
    render,
    show_metric,
)

logger = logging.getLogger(__name__)

WORST = 10  # frames shown at the end
MAX_GROUPS = 20  # rows of a table of compositions or kinds of calculation
_LINE = "# " + "-" * 47 + " "


def _axes(label: Label) -> list[str]:
    """Return the names of the components of a label; of properties and densities of states
    numbers.
    """
    known = {(): [""], (3,): [*"xyz"], (9,): [a + b for a in "xyz" for b in "xyz"]}
    return (
        [str(k) for k in range(label.shape[0])] if label.name.endswith("]") else known[label.shape]
    )


@dataclass(frozen=True)
class ErrorReport:
    """Errors of a model on labelled frames.

    Attributes:
        info: which weights were tested.
        type_map: names of the elements.
        total: errors over all frames.
        frames: every frame with its prediction, in the order of the files.
        systems: the systems by name, which know the file of a frame.
    """

    info: Provenance
    type_map: Sequence[str]
    total: Errors
    frames: Sequence[FrameResult]
    systems: Mapping[str, FrameSource]

    @property
    def labels(self) -> Errors:
        """Errors of predictions that are zero, of which the RMSE is the root mean square of the
        labels.
        """
        zeros = Errors()
        for frame in self.frames:
            nothing = {name: np.zeros_like(label) for name, label in frame.label.items()}
            zeros.merge(replace(frame, prediction=nothing).errors)
        return zeros

    @property
    def by_system(self) -> dict[str, Errors]:
        """Errors of each system, in the order in which they were given."""
        return group_frames(self.frames, lambda frame: frame.source[0])

    @property
    def by_kind(self) -> dict[str, Errors]:
        """Errors of each kind of calculation; ``none`` is a frame that names none, or all if names
        are of frames.
        """
        kinds = self.kinds
        if describe_singles(list(kinds.values())):
            return {"none": self.total}
        return group_frames(self.frames, lambda frame: kinds[frame.source] or "none")

    @property
    def kinds(self) -> dict[tuple[str, int], str]:
        """Kind of calculation of each frame by system and number; empty where it names none."""
        kinds = {name: source.kinds for name, source in self.systems.items()}
        return {f.source: k[f.source[1]] if (k := kinds[f.source[0]]) else "" for f in self.frames}

    @property
    def by_composition(self) -> dict[str, Errors]:
        """Errors of each composition."""
        return group_frames(
            self.frames, lambda frame: describe_composition(frame.atom_type, self.type_map)
        )

    @property
    def by_element(self) -> dict[str, Errors]:
        """Errors of the forces on the atoms of each element that has some."""
        every = zip(self.type_map, force_errors_by_type(self.frames, len(self.type_map)))
        return {name: errors for name, errors in every if errors.summary()["num_atoms"]}

    def text(self) -> str:
        """Return errors per system and over all, forces per element, and the worst frames."""
        systems = self.by_system
        lines = [f"{self.info.path}: {self.info.describe()}"]
        for name, errors in systems.items():
            lines += [
                "# ---------------output of dp-ema test----------- ",
                f"# testing system : {name}",
            ]
            lines.append(f"# number of test data : {errors.summary()['num_frames']:.0f} ")
            lines += (
                [*_error_lines(errors), _LINE] if len(systems) > 1 else []
            )  # those of one system follow
        lines += [
            "# ----------weighted average of errors----------- ",
            f"# number of systems : {len(systems)}",
        ]
        # scripts read these lines, which are in the units of DeePMD-kit; all below are in those of
        # other commands
        lines += [*_error_lines(self.total), _LINE]
        in_mev = describe_errors(self.total, with_gpa=True).split(", ")
        lines += ["# all frames, MAE / RMSE", *(f"# {text}" for text in in_mev), _LINE]
        # energies have no zero
        sizes = [q for q in labelled(self.total) if q not in "EQ"]
        if sizes:
            shown = ", ".join(
                f"{q} {show_metric(f'{q}:RMSE', self.labels.metric(f'{q}:RMSE'))}" for q in sizes
            )
            lines[-1:] = [f"# RMS of the labels: {shown}", _LINE]
        for table in (*self.groups(), self.forces_by_element(), self.worst()):
            lines += [*render(table, "# "), _LINE] if table.rows else []
        if singles := describe_singles(list(self.kinds.values())):
            lines += [f"# {singles}", _LINE]
        return "\n".join(lines)

    @property
    def _metric(self) -> str:
        """The error by which rows are in order: of forces, else of what has a label first."""
        letters = labelled(self.total)
        return f"{'F' if 'F' in letters else letters[:1] or 'E'}:RMSE"

    def groups(self) -> list[Table]:
        """Return errors by kind of calculation and by composition, where there are several; the
        worst first.
        """
        groups = {" or ".join(KIND_NAMES): self.by_kind, "composition": self.by_composition}
        metrics = [
            f"{quantity}:{kind}"
            for quantity in labelled(self.total).replace("V", "")
            for kind in KINDS
        ]
        by, tables = self._metric, []
        for title, found in groups.items():
            # those without the label last
            order = sorted(
                found.items(), key=lambda item: -np.nan_to_num(item[1].metric(by), nan=-1.0)
            )[:MAX_GROUPS]
            rows: list[list[Any]] = [
                [name, of.summary()["num_frames"], *_shown(of, metrics)] for name, of in order
            ]
            more = (
                f", the {MAX_GROUPS} of largest error of {len(found):,}"
                if len(found) > MAX_GROUPS
                else ""
            )
            columns = (Column(title), Column("frames", "", ".0f"), *_columns(metrics))
            tables += [Table(f"# errors by {title}{more}", columns, rows)] if len(found) > 1 else []
        return tables

    def write_details(self, prefix: str | Path) -> list[Path]:
        """Write labels beside predictions to ``<prefix>.e.out``, ``.f.out``, ``.v.out`` and so on;
        return the files.

        One block per system, headed by its name; atoms are in the order of the files of the data,
        without virtual atoms; nan is written for a label that a frame does not have.
        """
        written = []
        for label in (
            LABELS[name]
            for name in dict.fromkeys(name for frame in self.frames for name in frame.label)
        ):
            for quantity in label.errors:
                # an open frame has no volume, and pairs of atoms are predicted where there is
                # something to compare with
                frames = [
                    f for f in self.frames if quantity.per != "volume" or f.volume is not None
                ]
                frames = [f for f in frames if not label.per_pair or label.name in f.label]
                if any(label.name in frame.label for frame in frames):
                    written.append(
                        _write_table(Path(f"{prefix}.{quantity.name}.out"), frames, label, quantity)
                    )
        return written

    def plot(self, path: str | Path) -> Path:
        """Draw predictions against labels and return the path of the figure."""
        from deepmd_ema.report.plots import plot_parity

        count = f"{counted(len(self.frames), 'frame')} of {counted(len(self.by_system), 'system')}"
        weights = self.info.describe().partition(":")[0]
        return plot_parity(self.pairs(), path, f"{self.info.path.name}: {weights}; {count}")

    def pairs(self) -> dict[str, tuple[NDArray[Any], NDArray[Any], str]]:
        """Return labels, predictions and unit by quantity, and by component where it has up to nine
        of them.

        Energies and their derivatives are always there, empty without a label, unless frames have
        other labels only. Energies, virials and other sums over atoms are per atom.
        """
        derived, found = (ENERGY, FORCE, VIRIAL), {}
        labelled = dict.fromkeys(name for frame in self.frames for name in frame.label)
        for name in derived if labelled.keys() & {*derived} else labelled:
            label = LABELS[name]
            quantity = next(
                (error for error in label.errors if error.per == "atom"), label.errors[0]
            )
            axes = [""] if name in derived or len(_axes(label)) > 9 else _axes(label)
            sides = []
            for of in (attrgetter("label"), attrgetter("prediction")):
                of_atoms = label.per_atom and self.frames[0].counted is not None
                rows = [(f, of(f)[name]) for f in self.frames if name in f.label]
                scaled = [
                    row[f.counted] if of_atoms else row / (f.size if quantity.per else 1)
                    for f, row in rows
                ]
                sides.append(
                    np.concatenate([np.zeros(0), *map(np.ravel, scaled)]).reshape(-1, len(axes))
                )
            for k, axis in enumerate(axes):
                unit = quantity.unit_symbol or "unit of the labels"
                found[f"{quantity.title} {axis}".strip()] = sides[0][:, k], sides[1][:, k], unit
        return found

    def forces_by_element(self) -> Table:
        """Return the errors of the forces on the atoms of each element that has some, in meV/Å."""
        metrics = ("F:MAE", "F:RMSE")
        rows: list[list[Any]] = []
        for name, errors in self.by_element.items():
            rows.append([name, errors.summary()["num_atoms"], *_shown(errors, metrics)])
        return Table(
            "# forces by element",
            (Column("element"), Column("atoms", "", ".0f"), *_columns(metrics)),
            rows,
        )

    def worst(self) -> Table:
        """Return the frames of largest force error (energy error without forces), in meV, and where
        they are.
        """
        metric = self._metric
        by = METRICS[metric[0]].title.lower()
        columns = ("F:RMSE", "E:RMSE") if metric[0] in "FE" else (metric,)
        frames = worst_frames(self.frames, metric, WORST)
        rows: list[list[float | str]] = []
        for frame in frames if len(frames) > 1 else ():
            place = self.systems[frame.source[0]].where(frame.source[1])
            rows.append([*_shown(frame.errors, columns), f"{place.file} frame {place.frame}"])
        title = f"# the {len(rows)} frames of largest {by} error (frames count from 0)"
        return Table(
            title,
            (*_columns([one.replace("E:RMSE", "E:error") for one in columns]), Column("where")),
            rows,
        )


def measure(
    model: str | Path,
    systems: Sequence[str | Path],
    num_frames: int = 0,
    atomic: bool = False,
    use_average: bool = False,
    average: str | None = None,
    head: str | None = None,
    device: str | None = None,
    rglob_patterns: Sequence[str] | None = None,
    compiled: bool = False,
) -> ErrorReport:
    """Return the errors of a model on systems; those of second derivatives too, where frames have
    them as a label.

    Args:
        model: a ``.pt`` checkpoint or a frozen ``.dp`` or ``.yaml``.
        systems: systems, or folders searched for systems.
        num_frames: frames of each system, from its first; 0 takes all.
        atomic: whether atomic energies are tested as well.
        use_average: takes the averaged weights of a training checkpoint.
        average: which average, when there are several; implies ``use_average``.
        head: which model of a file that holds several.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.
        rglob_patterns: names of systems to search for in folders.
        compiled: whether the model is compiled first, for many frames.

    Raises:
        UserError: if the model or the data cannot be read, no frame has a label, or the model
            cannot be compiled.
    """
    loaded = load_model(model, use_average=use_average, average=average, head=head)
    labels = loaded.config.fitting_net.labels + (
        (ATOM_ENERGY,) if atomic and ENERGY in loaded.model.labels else ()
    )
    if compiled:
        loaded.require_energies("--compile")
    more = (HESSIAN, ATOM_PREF) if ENERGY in labels else ()
    opened = open_labelled(systems, loaded.config, (*labels, *more), rglob_patterns)
    report = predict(
        loaded, opened, first_frames(opened, num_frames), device, labels, compiled=compiled
    )
    if not any(frame.label for frame in report.frames):
        known = (
            "an energy, a force or a virial" if ENERGY in labels else f"one of {', '.join(labels)}"
        )
        raise UserError(f"no frame of {', '.join(map(str, systems))} has {known} to compare.")
    return report


def predict(
    loaded: LoadedModel,
    systems: Sequence[FrameSource],
    frames: Sequence[range],
    device: str | None = None,
    labels: Sequence[str] = (),
    cache: PairCache | None = None,
    compiled: bool = False,
) -> ErrorReport:
    """Return the predictions of a model, and their errors where there are labels.

    Args:
        loaded: the model.
        systems: opened and checked (:func:`open_labelled`).
        frames: which frames of each system.
        device: ``cpu``, ``cuda``; where the file or the machine says if not given.
        labels: names of the labels of ``systems``.
        cache: neighbor lists shared with other models; without it they are computed and not kept.
        compiled: whether the model is compiled first.

    Raises:
        DataError: if the model gives no finite numbers for a frame.
        UserError: if the model cannot be compiled.
    """
    network, where = loaded.on(device)
    made = partial(
        sequential_batches,
        systems,
        network.layout,
        cache,
        atoms_at_once(where),
        labels=labels,
        frames=frames,
    )
    if isinstance(network, EnergyModel) and not compiled:  # in compiled code tables are slower
        tabulate(network)
    evaluated: nn.Module = network
    pad: Pad | None = None
    if compiled and (first := next(made(), None)) is not None:
        if not isinstance(network, EnergyModel):
            raise UserError("--compile: the file holds compiled code already. Leave it out.")
        models = ModelSet({"": network})
        compiler = Compiler(CompileConfig(), "--compile", in_training=False)
        compiler.refuse(network.training, compiler.trace(network, first.to(where)))
        if compiler.serves(network):
            models.compiler, pad = compiler, pad_for(compiler.options, network.layout)
        else:
            tabulate(network)
        evaluated = models.of("")
    batches = prefetch(made(), where, pad)
    with tqdm(total=sum(map(len, frames)), unit=" frames", disable=None, leave=False) as bar:
        # a compiled file has no second derivatives
        has_hessian = not loaded.is_compiled
        total = evaluate(
            evaluated, batches, where, progress=bar.update, collect=True, hessian=has_hessian
        )
    opened = {s.whole.name: s.whole for s in systems}
    report = ErrorReport(loaded.info, loaded.config.type_map, total, total.frames, opened)
    _refuse_non_finite(report, loaded)
    return report


def refuse_details(prefix: str | Path) -> None:
    """Check that :meth:`ErrorReport.write_details` would write over nothing but its own files.

    Raises:
        UserError: if a file of another kind is there.
    """
    for name in QUANTITIES:
        check_output(f"{prefix}.{name}.out", "-d", TABLE)


def open_labelled(
    systems: Sequence[str | Path],
    config: ModelConfig,
    labels: Sequence[str],
    rglob_patterns: Sequence[str] | None = None,
) -> list[FrameSource]:
    """Return systems with what a model reads beside the labels, checked.

    Args:
        systems: systems, or folders searched for systems.
        config: the section ``model``.
        labels: names of the labels to read where they are.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        DataError: with every problem of the data at once.
    """
    return open_checked(
        systems, ReadSpec.of_model(config, labels), config.descriptor.cutoff, rglob_patterns
    )


def open_checked(
    systems: Sequence[str | Path],
    spec: ReadSpec,
    rcut: float,
    rglob_patterns: Sequence[str] | None = None,
) -> list[FrameSource]:
    """Return systems, after one pass over all their numbers.

    Args:
        systems: systems, or folders searched for systems.
        spec: what is read.
        rcut: cutoff radius within which neighbors are going to be searched, angstrom.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        DataError: with every problem of the data at once.
    """
    opened = open_systems([str(path) for path in systems], spec, rglob_patterns)
    errors = list[Finding]()
    for system in opened:
        errors += scan_system(system, len(spec.type_map), rcut).findings()
    DataError.raise_if_any(errors)
    texts = [text for system in opened for text in system.warnings]
    for line in (*texts, *repeated(system.name for system in opened)):
        logger.warning("%s", line)
    return opened


def first_frames(systems: Sequence[FrameSource], most: int) -> list[range]:
    """Return the first ``most`` frames of each system; 0 takes all."""
    return [range(min(s.num_frames, most) if most > 0 else s.num_frames) for s in systems]


def describe_neighbors(
    systems: Sequence[str | Path],
    rcut: float,
    type_map: Sequence[str] | None = None,
    mixed_type: bool = False,
    rglob_patterns: Sequence[str] | None = None,
) -> str:
    """Return the lines of ``dp neighbor-stat``: shortest distance and most neighbors over all
    frames of systems.

    Args:
        systems: systems, or folders searched for systems.
        rcut: cutoff radius, angstrom.
        type_map: the elements; by default those of the systems' type_map.raw, in a line of their
            own.
        mixed_type: whether neighbors of all types are counted together.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        DataError: if the data cannot be read, or two atoms are in one place.
    """
    paths = [str(path) for path in systems]
    names = list(type_map) if type_map else stored_type_map(paths, rglob_patterns)
    opened = open_checked(paths, ReadSpec(names), rcut, rglob_patterns)
    places = [(system, k) for system in opened for k in range(system.num_frames)]
    frames = (system.frame(k) for system, k in places)
    found = neighbor_statistics(((f.coord, f.box, f.atom_type) for f in frames), rcut, len(names))
    if found.min_distance == 0:
        number = int(np.argmin(found.frame_min))
        system, k = places[number]
        place, (a, b) = system.where(k), found.frame_pair[number]
        raise DataError(
            f"{place.file}: frame {place.frame} (from 0): atoms {a} and {b} are in one place."
        )
    lines = [] if type_map else [f"type_map: {names}"]
    most = np.array([found.max_total] if mixed_type else found.max_neighbors)
    numbers = np.array2string(most, max_line_width=10**6, threshold=10**6)
    return "\n".join(
        [*lines, f"min_nbor_dist: {found.min_distance:f}", f"max_nbor_size: {numbers}"]
    )


def _refuse_non_finite(report: ErrorReport, loaded: LoadedModel) -> None:
    """Raise DataError if the model gives no number for some frame, as it does for atoms in one
    place.
    """
    bad = [
        f
        for f in report.frames
        if not all(np.isfinite(value).all() for value in f.prediction.values())
    ]
    if not bad:
        return
    # a batch fails as a whole: look for the frames that made it fail
    systems = [report.systems[name] for name in dict.fromkeys(frame.source[0] for frame in bad)]
    descriptor = loaded.config.descriptor
    check_systems(
        systems, [], report.type_map, descriptor, min_distance=SAME_PLACE
    ).raise_problems()
    for name, number in (frame.source for frame in bad):
        frame = report.systems[name].frame(number)
        short = describe_short_pair(frame, loaded.model, report.type_map, descriptor.cutoff)
        if short is not None:
            place = report.systems[name].where(number)
            raise DataError(f"{place.file}: frame {place.frame} (from 0): {short}")
    place = report.systems[bad[0].source[0]].where(bad[0].source[1])
    raise DataError(
        f"{place.file}: frame {place.frame} (from 0) and {len(bad) - 1} more: {report.info.path} "
        "gives no finite energies and forces. Does it hold nan, or are these frames far from what "
        "it was trained on?"
    )


def describe_composition(atom_type: NDArray[Any], type_map: Sequence[str]) -> str:
    """Return the formula of a frame, such as ``H8 C5 O2``."""
    counts = np.bincount(atom_type, minlength=len(type_map))
    return " ".join(f"{name}{n}" for name, n in zip(type_map, counts) if n)


def _shown(errors: Errors, metrics: Sequence[str]) -> list[float]:
    """Return errors such as ``F:RMSE`` in the units of :func:`_columns`."""
    return [METRICS[metric[0]].display_factor * errors.metric(metric) for metric in metrics]


def _columns(metrics: Sequence[str]) -> list[Column]:
    return [
        Column(metric.replace(":", " "), METRICS[metric[0]].display_unit, ".3f")
        for metric in metrics
    ]


def _error_lines(errors: Errors) -> list[str]:
    """Return every error that was measured in the wording of DeePMD-kit, which scripts read."""
    summary, lines = errors.summary(), []
    for quantity in QUANTITIES.values():
        unit = quantity.unit_symbol.partition("/atom")[0]  # its title says /Natoms
        for kind in ("mae", "rmse"):
            value = summary[f"{kind}_{quantity.name}"]
            title = f"{quantity.title:<6s} {kind.upper()}{'/Natoms' * (quantity.per == 'atom')}"
            lines += [] if math.isnan(value) else [f"{title:<18s} : {value:e} {unit}".rstrip()]
    return lines


def _write_table(
    path: Path, frames: Sequence[FrameResult], label: Label, quantity: Quantity
) -> Path:
    per_volume, axes = quantity.per == "volume", _axes(label)
    symbol, unit = (
        ("s", f" ({quantity.unit_symbol})") if per_volume else (label.symbol or quantity.name, "")
    )
    columns = " ".join(f"{kind}_{symbol}{axis}" for kind in ("data", "pred") for axis in axes)
    blocks: dict[str, list[NDArray[Any]]] = {}
    for frame in frames:
        # stress is the opposite of the virial per volume
        scale = {"atom": frame.size, "volume": -(frame.volume or 0.0)}.get(quantity.per, 1)
        predicted = (frame.prediction[label.name] / scale).reshape(-1, len(axes))
        known = np.full_like(predicted, np.nan)
        if label.name in frame.label:
            known = (frame.label[label.name] / scale).reshape(-1, len(axes))
        blocks.setdefault(frame.source[0], []).append(np.hstack([known, predicted]))
    with (
        atomic_write(path, "Choose another -d.") as part,
        part.open("w", encoding="utf-8", errors="replace") as file,
    ):
        for system, rows in blocks.items():
            np.savetxt(file, np.vstack(rows), header=f"{system}{unit}: {columns}")
    return path
