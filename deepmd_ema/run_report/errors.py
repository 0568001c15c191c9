"""Errors of all weights of a run on its frames, and their tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.run import TaskData
from deepmd_ema.data.source import FrameSource, evenly_spaced
from deepmd_ema.infer.evaluate import WORST, ErrorReport, predict
from deepmd_ema.infer.load import load_model
from deepmd_ema.labels import ENERGY, FORCE, METRICS, VIRIAL
from deepmd_ema.metrics import Errors, FrameResult, force_errors_by_type, group_frames, worst_frames
from deepmd_ema.report.table import Cell, Column, Table, significant
from deepmd_ema.weight_names import LIVE

VALIDATION, TRAINING = "validation", "training"
KINDS = ("RMSE", "MAE")
_LABELS = (ENERGY, FORCE, VIRIAL)
_QUANTITIES = "EFVS"
_DIGITS = 3
_MAX_GROUPS = 40  # rows of a table of systems or kinds of frames
_TEXT = "s"  # of a column of numbers that are texts already


@dataclass(frozen=True)
class Tested:
    """Errors of some weights on frames of a part of the data.

    Attributes:
        task: empty in a run of one.
        weights: ``live`` or the name of an average.
        part: ``validation`` or ``training``.
        report: the errors.
        kinds: kind of calculation by system and frame, where the data name one.
    """

    task: str
    weights: str
    part: str
    report: ErrorReport
    kinds: Mapping[tuple[str, int], str]

    @property
    def quantities(self) -> str:
        """Letters of the quantities that some frame has a label of."""
        return "".join(q for q in _QUANTITIES if np.isfinite(self.report.total.metric(f"{q}:RMSE")))


def folder_of(data: Mapping[str, TaskData]) -> str:
    """Return the folder that all systems are in."""
    names = {os.path.dirname(os.path.abspath(s.name)) for of_task in data.values() for part in of_task for s in part}
    return os.path.commonpath(names)


def evaluate(
    file: Path, data: Mapping[str, TaskData], weights: Sequence[str], num_frames: int, device: str | None
) -> Iterator[Tested]:
    """Yield the errors by task, weights and part of the data.

    Args:
        file: training checkpoint.
        data: frames of each task.
        weights: ``live`` and names of averages.
        num_frames: most frames of each part, evenly spaced; 0: all for validation, as many for training.
        device: on which the model is evaluated.
    """
    cache = PairCache()
    for task, of_task in data.items():
        valid = evenly_spaced(of_task.valid, num_frames) if num_frames else of_task.valid
        number = sum(source.num_frames for source in valid) or num_frames
        train = evenly_spaced(of_task.train, number) if number else of_task.train
        for name in weights:
            loaded = load_model(file, average=None if name == LIVE else name, head=task or None)
            for part, sources in ((VALIDATION, valid), (TRAINING, train)):
                if sources:
                    ranges = [range(source.num_frames) for source in sources]
                    report = predict(loaded, sources, ranges, device, _LABELS, cache)
                    yield Tested(task, name, part, report, _kinds_of_calculation(sources))


def table_of_quantities(tested: Sequence[Tested], title: str, before: Errors | None = None) -> Table:
    """Return a row for each error of each quantity, with a column for each set of weights.

    Args:
        tested: errors of one part of the data.
        title: of the column of quantities.
        before: errors of the weights that the run started with, for a column of their own.
    """
    columns = [Column(one.weights, "" if one.weights == LIVE else "averaged", _TEXT) for one in tested]
    errors = [one.report.total for one in tested]
    if before is not None:
        columns, errors = [Column("at the start", "loaded", _TEXT), *columns], [before, *errors]
    rows = list[Sequence[Cell]]()
    for quantity in _together(tested):
        metric = METRICS[quantity]
        for kind in KINDS:
            values = [metric.display_factor * of_weights.metric(f"{quantity}:{kind}") for of_weights in errors]
            rows.append((f"{metric.title} {kind}, {metric.display_unit}", *map(_shown, values)))
    return Table("", (Column(title), *columns), rows)


def table_of_weights(tested: Sequence[Tested]) -> Table:
    """Return a row of errors for each of ``tested``."""
    quantities = _together(tested)
    rows = [(f"{one.task} {one.weights}, {one.part}".strip(), *_cells(one.report.total, quantities)) for one in tested]
    return Table("", (Column("weights, frames"), *_columns(quantities)), rows)


def tables_of_groups(one: Tested, base: str) -> Iterator[Table]:
    """Yield the errors by system, composition and kind of calculation, where there are several.

    Args:
        one: errors of some weights.
        base: folder of all systems, which is left out of their names.
    """
    report = one.report
    groups = {
        "system": {os.path.relpath(name, base): errors for name, errors in report.by_system.items()},
        "composition": group_frames(report.frames, composition_of(report.type_map)),
    }
    if one.kinds:
        groups["kind of calculation"] = group_frames(report.frames, lambda frame: one.kinds.get(frame.source, "none"))
    for name, errors in groups.items():
        if len(errors) > 1:
            rows = [(key, *_cells(of, one.quantities)) for key, of in list(errors.items())[:_MAX_GROUPS]]
            more = f" (the first {_MAX_GROUPS} of {len(errors)})" * (len(errors) > _MAX_GROUPS)
            where = f", in {base}" * (name == "system")
            yield Table(f"by {name}{more}{where}", (Column(name), *_columns(one.quantities)), rows)


def table_of_elements(one: Tested) -> Table:
    """Return the errors of the forces on the atoms of each element."""
    unit, factor = METRICS["F"].display_unit, METRICS["F"].display_factor
    rows = list[Sequence[Cell]]()
    for name, errors in zip(one.report.type_map, force_errors_by_type(one.report.frames, len(one.report.type_map))):
        if atoms := errors.summary()["num_atoms"]:
            rows.append((name, atoms, *(_shown(factor * errors.metric(f"F:{kind}")) for kind in KINDS)))
    numbers = [Column(f"Force {kind}", unit, _TEXT) for kind in KINDS]
    return Table("forces by element", (Column("element"), Column("atoms", "", ",.0f"), *numbers), rows)


def table_of_worst_frames(one: Tested, base: str) -> Table:
    """Return the frames of largest force error, or energy error without forces, and where they are.

    Args:
        one: errors of some weights.
        base: folder of all systems, which is left out of the names of files.
    """
    by = "force" if "F" in one.quantities else "energy"
    frames = worst_frames(one.report.frames, f"{by[0].upper()}:RMSE", WORST)
    formula, rows = composition_of(one.report.type_map), list[Sequence[Cell]]()
    for frame in frames:
        place = one.report.systems[frame.source[0]].where(frame.source[1])
        errors = [_shown(METRICS[q].display_factor * frame.errors.metric(f"{q}:RMSE")) for q in one.quantities]
        rows.append((str(place.frame), *errors, formula(frame), os.path.relpath(place.file, base)))
    columns = [Column(f"{METRICS[q].title} RMSE", METRICS[q].display_unit, _TEXT) for q in one.quantities]
    title = f"the {len(rows)} frames of largest {by} error; frames of a file count from 0; files in {base}"
    return Table(title, (Column("frame", "", _TEXT), *columns, Column("composition"), Column("file")), rows)


def composition_of(type_map: Sequence[str]) -> Callable[[FrameResult], str]:
    """Return a function that returns the formula of a frame."""

    def formula(frame: FrameResult) -> str:
        counts = np.bincount(frame.atom_type, minlength=len(type_map))
        return " ".join(f"{name}{n}" for name, n in zip(type_map, counts) if n)

    return formula


def _columns(quantities: str) -> tuple[Column, ...]:
    errors = [(METRICS[quantity], kind) for quantity in quantities for kind in KINDS]
    return (Column("frames", "", ",.0f"), *(Column(f"{q.title} {kind}", q.display_unit, _TEXT) for q, kind in errors))


def _cells(errors: Errors, quantities: str) -> list[Cell]:
    factors = [(q, METRICS[q].display_factor) for q in quantities]
    values = [factor * errors.metric(f"{q}:{kind}") for q, factor in factors for kind in KINDS]
    return [errors.summary()["num_frames"], *map(_shown, values)]


def _shown(error: float) -> str:
    return significant(error, _DIGITS) if np.isfinite(error) else "–"


def _together(tested: Sequence[Tested]) -> str:
    return "".join(q for q in _QUANTITIES if any(q in one.quantities for one in tested))


def _kinds_of_calculation(sources: Sequence[FrameSource]) -> dict[tuple[str, int], str]:
    """Return the kinds of calculation by system and number of the frame in it, where the data name one."""
    found = [(source.name, zip(source.numbers.tolist(), source.kinds or ())) for source in sources]
    return {(name, number): kind for name, own in found for number, kind in own if kind}
