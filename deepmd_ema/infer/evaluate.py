"""Errors of a model on labelled frames, as full validation measures them; numbers of neighbors."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from deepmd_ema.batch import Batch
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
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.files import TABLE, atomic_write, check_output
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
from deepmd_ema.report.facts import (
    describe_errors,
    displayed,
    error_table,
    labelled,
    metrics_of,
    show_metric,
)
from deepmd_ema.report.table import Column, Table, render
from deepmd_ema.text import counted, printable

logger = logging.getLogger(__name__)

WORST = 10  # frames shown at the end
MAX_GROUPS = 20  # rows of a table of compositions or kinds of calculation
_LINE = "# " + "-" * 47 + " "


def _axes(label: Label) -> list[str]:
    """Return the names of the components of a label, such as ``x`` or ``xy``."""
    if label.name.endswith("]"):  # such as dos[250], whose components are numbered
        return [str(k) for k in range(label.shape[0])]
    names = {(): [""], (3,): [*"xyz"], (9,): [a + b for a in "xyz" for b in "xyz"]}
    return names[label.shape]


@dataclass(frozen=True)
class ErrorReport:
    """Errors of a model on labelled frames.

    Attributes:
        info: which weights were tested.
        type_map: names of the elements.
        total: errors over all frames.
        frames: every frame with its prediction, in the order of the files.
        systems: the systems by name, which give the file of a frame.
    """

    info: Provenance
    type_map: Sequence[str]
    total: Errors
    frames: Sequence[FrameResult]
    systems: Mapping[str, FrameSource]

    @property
    def labels(self) -> Errors:
        """Errors of predictions that are zero: their RMSE is the root mean square of the labels."""
        zeros = Errors()
        for frame in self.frames:
            nothing = {
                name: np.zeros_like(label) for name, label in frame.label.items()
            }
            zeros.merge(replace(frame, prediction=nothing).errors)
        return zeros

    @property
    def by_system(self) -> dict[str, Errors]:
        """Errors of each system, in the order in which they were given."""
        return group_frames(self.frames, lambda frame: frame.source[0])

    @property
    def by_kind(self) -> dict[str, Errors]:
        """Errors of each kind of calculation; frames that name none are under ``none``.

        All frames are, if each has a name of its own.
        """
        kinds = self.kinds
        if describe_singles(list(kinds.values())):
            return {"none": self.total}
        return group_frames(self.frames, lambda frame: kinds[frame.source] or "none")

    @property
    def kinds(self) -> dict[tuple[str, int], str]:
        """Kind of calculation of each frame by system and number; empty where it names none."""
        # by system, a kind for each frame, or nothing
        kinds = {name: source.kinds for name, source in self.systems.items()}
        return {
            f.source: k[f.source[1]] if (k := kinds[f.source[0]]) else ""
            for f in self.frames
        }

    @property
    def by_composition(self) -> dict[str, Errors]:
        """Errors of each composition."""
        return group_frames(
            self.frames,
            lambda frame: describe_composition(frame.atom_type, self.type_map),
        )

    @property
    def by_element(self) -> dict[str, Errors]:
        """Errors of the forces on the atoms of each element that has some."""
        every = zip(
            self.type_map, force_errors_by_type(self.frames, len(self.type_map))
        )
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
            lines.append(
                f"# number of test data : {errors.summary()['num_frames']:.0f} "
            )
            if (
                len(systems) > 1
            ):  # the errors of a single system are those of all frames below
                lines += [*_error_lines(errors), _LINE]
        lines += [
            "# ----------weighted average of errors----------- ",
            f"# number of systems : {len(systems)}",
        ]
        # scripts read these lines, which are in the units of DeePMD-kit; all below are in those of
        # other commands
        lines += [*_error_lines(self.total), _LINE]
        in_mev = describe_errors(self.total, with_gpa=True).split(", ")
        lines += ["# all frames, MAE / RMSE", *(f"# {text}" for text in in_mev), _LINE]
        # errors are compared with them; the size of energies says nothing: their zero is arbitrary
        labels = self.labels
        sizes = [
            f"{q} {show_metric(q, labels.metric(f'{q}:RMSE'))}"
            for q in labelled(self.total)
            if q not in "EQ"
        ]
        if sizes:  # in the same block: before its last line
            lines[-1:] = [f"# RMS of the labels: {', '.join(sizes)}", _LINE]
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
        """Return errors by kind of calculation and by composition, the worst first.

        A grouping with a single group is left out.
        """
        groupings = {
            " or ".join(KIND_NAMES): self.by_kind,
            "composition": self.by_composition,
        }
        # stresses are shown, which are virials of frames of any size
        columns = _columns(metrics_of(labelled(self.total).replace("V", "")))
        metric = self._metric
        tables = []
        for title, groups in groupings.items():
            if len(groups) < 2:
                continue
            # groups without the label, whose error is nan, come last
            order = sorted(
                groups.items(),
                key=lambda item: -np.nan_to_num(item[1].metric(metric), nan=-1.0),
            )
            more = ""
            if len(groups) > MAX_GROUPS:
                more = f", the {MAX_GROUPS} of largest error of {len(groups):,}"
            heads = Column(title), Column("frames", "", ".0f")
            worst = dict(order[:MAX_GROUPS])
            tables.append(
                error_table(f"# errors by {title}{more}", heads, columns, worst)
            )
        return tables

    def write_details(self, prefix: str | Path) -> list[Path]:
        """Write labels beside predictions to ``<prefix>.e.out``, ``.f.out``, ...; return the files.

        One block per system, headed by its name; atoms are in the order of the files of the data,
        without virtual atoms; nan is written for a label that a frame does not have.
        """
        written = []
        for name in dict.fromkeys(
            name for frame in self.frames for name in frame.label
        ):
            label = LABELS[name]
            for quantity in label.errors:
                frames = list(self.frames)
                if quantity.per == "volume":  # an open frame has none
                    frames = [frame for frame in frames if frame.volume is not None]
                if (
                    label.per_pair
                ):  # second derivatives are not computed without a label
                    frames = [frame for frame in frames if name in frame.label]
                if any(name in frame.label for frame in frames):
                    file = Path(f"{prefix}.{quantity.name}.out")
                    written.append(_write_table(file, frames, label, quantity))
        return written

    def plot(self, path: str | Path) -> Path:
        """Draw predictions against labels and return the path of the figure."""
        from deepmd_ema.report.plots import plot_parity

        count = f"{counted(len(self.frames), 'frame')} of {counted(len(self.by_system), 'system')}"
        weights = self.info.describe().partition(":")[0]
        return plot_parity(
            self.pairs(), path, f"{self.info.path.name}: {weights}; {count}"
        )

    def pairs(self) -> dict[str, tuple[NDArray[Any], NDArray[Any], str]]:
        """Return labels, predictions and unit by quantity, and by component if it has up to nine.

        Energies and their derivatives are always included, empty without a label, unless frames
        have other labels only. Energies, virials and other sums over atoms are per atom.
        """
        derived = (ENERGY, FORCE, VIRIAL)
        pairs = {}
        labelled = dict.fromkeys(name for frame in self.frames for name in frame.label)
        for name in derived if labelled.keys() & {*derived} else labelled:
            label = LABELS[name]
            # the error per atom, so that frames of all sizes can be in one picture
            quantity = next(
                (error for error in label.errors if error.per == "atom"),
                label.errors[0],
            )
            axes = [""] if name in derived or len(_axes(label)) > 9 else _axes(label)
            # models of tensors may have rows of some elements alone: the others are not compared
            is_masked = label.per_atom and self.frames[0].counted is not None
            labels = [np.zeros(0)]
            predictions = [np.zeros(0)]
            for frame in self.frames:
                if name in frame.label:
                    for values, side in (
                        (frame.label[name], labels),
                        (frame.prediction[name], predictions),
                    ):
                        scaled = (
                            values[frame.counted]
                            if is_masked
                            else values / (frame.size if quantity.per else 1)
                        )
                        side.append(np.ravel(scaled))
            # (values, components)
            label_columns = np.concatenate(labels).reshape(-1, len(axes))
            prediction_columns = np.concatenate(predictions).reshape(-1, len(axes))
            unit = quantity.unit_symbol or "unit of the labels"
            for k, axis in enumerate(axes):
                columns = label_columns[:, k], prediction_columns[:, k], unit
                pairs[f"{quantity.title} {axis}".strip()] = columns
        return pairs

    def forces_by_element(self) -> Table:
        """Return the errors of the forces on the atoms of each element that has some, in meV/Å."""
        heads = Column("element"), Column("atoms", "", ".0f")
        columns = _columns(metrics_of("F"))
        return error_table("# forces by element", heads, columns, self.by_element)

    def worst(self) -> Table:
        """Return the frames of largest force error, and where they are.

        Without forces they are ranked by the energy, or by the quantity that is predicted.
        """
        metric = self._metric
        by = METRICS[metric[0]].title.lower()
        columns = ("F:RMSE", "E:RMSE") if metric[0] in "FE" else (metric,)
        frames = worst_frames(self.frames, metric, WORST)
        rows: list[list[float | str]] = []
        for frame in frames if len(frames) > 1 else ():
            # a frame of a system is one of a file, in which a person looks for it
            place = self.systems[frame.source[0]].where(frame.source[1])
            errors = [displayed(frame.errors, column) for column in columns]
            rows.append([*errors, f"{place.file} frame {place.frame}"])
        title = f"# the {len(rows)} frames of largest {by} error (frames count from 0)"
        # a frame has one energy, whose error is no mean
        heads = _columns([column.replace("E:RMSE", "E:error") for column in columns])
        return Table(title, [*heads.values(), Column("where")], rows)


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
    """Return the errors of a model on systems.

    Second derivatives are included where frames have them as a label.

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
    labels = loaded.config.fitting_net.labels
    if atomic and ENERGY in loaded.model.labels:
        labels = (*labels, ATOM_ENERGY)
    if compiled:
        loaded.require_energies("--compile")
    # read where they are: second derivatives, which are compared, and weights of forces
    optional = (HESSIAN, ATOM_PREF) if ENERGY in labels else ()
    opened = open_labelled(systems, loaded.config, (*labels, *optional), rglob_patterns)
    frames = first_frames(opened, num_frames)
    report = predict(loaded, opened, frames, device, labels, compiled=compiled)
    if not any(frame.label for frame in report.frames):
        missing = f"one of {', '.join(labels)}"
        if ENERGY in labels:
            missing = "an energy, a force or a virial"
        raise UserError(
            f"no frame of {', '.join(map(str, systems))} has {missing} to compare."
        )
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
    new_batches = partial(
        sequential_batches,
        systems,
        network.layout,
        cache,
        atoms_at_once(where),
        labels=labels,
        frames=frames,
    )
    if (
        isinstance(network, EnergyModel) and not compiled
    ):  # in compiled code tables are slower
        tabulate(network)
    evaluated: nn.Module = network
    pad: Pad | None = None
    # the first batch is an example, by which the code is traced
    if compiled and (first := next(new_batches(), None)) is not None:
        if not isinstance(network, EnergyModel):
            raise UserError(
                "--compile: the file holds compiled code already. Leave it out."
            )
        # a compiler serves sets of models, here of one task without a name
        models = ModelSet({"": network})
        compiler = Compiler(CompileConfig(), "--compile", in_training=False)
        compiler.refuse(network.training, compiler.trace(network, first.to(where)))
        if compiler.serves(network):
            models.compiler = compiler
            # sizes of batches are rounded up, so that few of them are compiled
            pad = pad_for(compiler.options, network.layout)
        else:
            tabulate(network)
        evaluated = models.of("")
    most: Sequence[int] = ()

    def watched() -> Iterator[Batch]:
        """Yield the batches, and note the most neighbors of an atom in all of them."""
        nonlocal most
        for batch in new_batches():
            most = [max(counts) for counts in zip(batch.most, most or batch.most)]
            yield batch

    batches = prefetch(watched(), where, pad)
    with tqdm(
        total=sum(map(len, frames)), unit=" frames", disable=None, leave=False
    ) as bar:
        # a compiled file has no second derivatives
        has_hessian = not loaded.is_compiled
        total = evaluate(
            evaluated,
            batches,
            where,
            progress=bar.update,
            collect=True,
            hessian=has_hessian,
        )
    if text := network.layout.describe_dropped(most):
        logger.warning("%s: %s", loaded.info.path, text)
    # frames have numbers of the source that was opened, of which a system may be a part
    opened = {system.whole.name: system.whole for system in systems}
    report = ErrorReport(
        loaded.info, loaded.config.type_map, total, total.frames, opened
    )
    _refuse_non_finite(report, loaded)
    return report


def refuse_details(prefix: str | Path) -> None:
    """Check that :meth:`ErrorReport.write_details` would replace no files but its own.

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
        systems,
        ReadSpec.of_model(config, labels),
        config.descriptor.cutoff,
        rglob_patterns,
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
    # a system that is listed twice counts twice in the errors
    for line in (*texts, *repeated(system.name for system in opened)):
        logger.warning("%s", line)
    return opened


def first_frames(systems: Sequence[FrameSource], most: int) -> list[range]:
    """Return the first ``most`` frames of each system; 0 takes all."""
    return [
        range(min(s.num_frames, most) if most > 0 else s.num_frames) for s in systems
    ]


def describe_neighbors(
    systems: Sequence[str | Path],
    rcut: float,
    type_map: Sequence[str] | None = None,
    mixed_type: bool = False,
    rglob_patterns: Sequence[str] | None = None,
) -> str:
    """Return the lines of ``dp neighbor-stat``: shortest distance and most neighbors.

    Args:
        systems: systems, or folders searched for systems.
        rcut: cutoff radius, angstrom.
        type_map: the elements; by default those of type_map.raw, which are in the first line.
        mixed_type: whether neighbors of all types are counted together.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        DataError: if the data cannot be read, or two atoms are in one place.
    """
    paths = [str(path) for path in systems]
    names = list(type_map) if type_map else stored_type_map(paths, rglob_patterns)
    opened = open_checked(paths, ReadSpec(names), rcut, rglob_patterns)
    # frames are read one by one, as their neighbors are counted: they may not fit in memory
    places = [(system, k) for system in opened for k in range(system.num_frames)]
    frames = (system.frame(k) for system, k in places)
    geometries = ((frame.coord, frame.box, frame.atom_type) for frame in frames)
    statistics = neighbor_statistics(geometries, rcut, len(names))
    if statistics.min_distance == 0:
        number = int(np.argmin(statistics.frame_min))
        system, k = places[number]
        place = system.where(k)
        a, b = statistics.frame_pair[number]
        raise DataError(
            f"{place.file}: frame {place.frame} (from 0): atoms {a} and {b} are in one place."
        )
    lines = [] if type_map else [f"type_map: {names}"]
    most = [statistics.max_total] if mixed_type else statistics.max_neighbors
    # as DeePMD-kit prints an array, but in one line without an ellipsis
    numbers = np.array2string(np.array(most), max_line_width=10**6, threshold=10**6)
    lines += [
        f"min_nbor_dist: {statistics.min_distance:f}",
        f"max_nbor_size: {numbers}",
    ]
    return "\n".join(lines)


def _refuse_non_finite(report: ErrorReport, loaded: LoadedModel) -> None:
    """Raise DataError if a frame has no finite prediction, as with two atoms in one place."""
    bad = [
        frame
        for frame in report.frames
        if not all(np.isfinite(value).all() for value in frame.prediction.values())
    ]
    if not bad:
        return
    # a batch fails as a whole: the frames that made it fail are searched
    systems = [
        report.systems[name] for name in dict.fromkeys(frame.source[0] for frame in bad)
    ]
    descriptor = loaded.config.descriptor
    check_systems(
        systems, [], report.type_map, descriptor, min_distance=SAME_PLACE
    ).raise_problems()
    for name, number in (frame.source for frame in bad):
        frame = report.systems[name].frame(number)
        short = describe_short_pair(
            frame, loaded.model, report.type_map, descriptor.cutoff
        )
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


def _columns(metrics: Sequence[str]) -> dict[str, Column]:
    return {
        metric: Column(metric.replace(":", " "), METRICS[metric[0]].display_unit, ".3f")
        for metric in metrics
    }


def _error_lines(errors: Errors) -> list[str]:
    """Return every error that was measured in the wording of DeePMD-kit, which scripts read."""
    summary = errors.summary()
    lines = []
    for quantity in QUANTITIES.values():
        per_atom = "/Natoms" if quantity.per == "atom" else ""
        unit = quantity.unit_symbol.partition("/atom")[0]  # without what the title says
        for kind in ("mae", "rmse"):
            value = summary[f"{kind}_{quantity.name}"]
            if not math.isnan(value):
                title = f"{quantity.title:<6s} {kind.upper()}{per_atom}"
                lines.append(f"{title:<18s} : {value:e} {unit}".rstrip())
    return lines


def _write_table(
    path: Path, frames: Sequence[FrameResult], label: Label, quantity: Quantity
) -> Path:
    """Write labels and predictions of a quantity side by side, in a block for each system."""
    axes = _axes(label)
    symbol = label.symbol or quantity.name
    unit = ""
    if (
        quantity.per == "volume"
    ):  # a file that DeePMD-kit does not write; its header has the unit
        symbol = "s"
        unit = f" ({quantity.unit_symbol})"
    columns = " ".join(
        f"{kind}_{symbol}{axis}" for kind in ("data", "pred") for axis in axes
    )
    blocks: dict[str, list[NDArray[Any]]] = {}
    for frame in frames:
        # stress is the opposite of the virial per volume
        scale = {"atom": frame.size, "volume": -(frame.volume or 0.0)}.get(
            quantity.per, 1
        )
        # one row, or a row for each atom: (rows, components)
        predicted = (frame.prediction[label.name] / scale).reshape(-1, len(axes))
        reference = np.full_like(predicted, np.nan)
        if label.name in frame.label:
            reference = (frame.label[label.name] / scale).reshape(-1, len(axes))
        rows = np.hstack([reference, predicted])
        if label.per_atom and frame.counted is not None:
            rows = rows[frame.counted]  # atoms that have what is predicted
        blocks.setdefault(frame.source[0], []).append(rows)
    with (
        atomic_write(path, "Choose another -d.") as part,
        part.open("w", encoding="utf-8", errors="replace") as file,
    ):
        for system, parts in blocks.items():
            header = printable(f"{system}{unit}: {columns}")
            np.savetxt(file, np.vstack(parts), header=header)
    return path
