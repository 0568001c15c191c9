"""Deviation of the predictions of several models, frame by frame: ``dp-ema model-devi``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.source import ReadSpec
from deepmd_ema.errors import UserError
from deepmd_ema.files import atomic_write
from deepmd_ema.infer.evaluate import first_frames, open_labelled, predict
from deepmd_ema.infer.load import LoadedModel, load_model
from deepmd_ema.model.metrics import FrameResult
from deepmd_ema.report.table import Column, Table, render
from deepmd_ema.text import printable

# M models, F frames, N atoms

# columns of DeePMD-kit, whose order scripts rely on: virials, then forces
COLUMNS = (
    "step",
    *(f"{kind}_devi_{letter}" for letter in "vf" for kind in ("max", "min", "avg")),
    "devi_e",
)
_LABELS = (ENERGY, FORCE, VIRIAL)
_WIDTH = 19  # of a column in the file, as DeePMD-kit writes it


@dataclass(frozen=True)
class DeviationOptions:
    """Options of the measurement of deviations.

    Attributes:
        real_error: whether the labels take the place of the mean over the models.
        atomic: whether each atom's deviation of the force is kept.
        relative: level in eV/angstrom; deviations of forces are divided by the length of the force
            plus this level.
        relative_v: level in eV per atom; the same for virials.
        frequency: steps of the trajectory between two frames.
    """

    real_error: bool = False
    atomic: bool = False
    relative: float | None = None
    relative_v: float | None = None
    frequency: int = 1


@dataclass(frozen=True)
class DeviationReport:
    """Deviations of models.

    Attributes:
        models: descriptions of the models that were compared.
        systems: by the name of the system, (F, 8) numbers in the order of ``COLUMNS``: eV per atom,
            eV/angstrom, or plain numbers where relative; with the atoms' deviations of the force
            (F, 8 + N) if these were requested, nan beyond the atoms of a smaller frame.
    """

    models: Sequence[str]
    systems: Mapping[str, NDArray[np.float64]]

    def write(self, path: str | Path) -> Path:
        """Write a block of rows per system, in the format of ``dp model-devi``; return the path."""
        path = Path(path)
        with (
            atomic_write(path, "Choose another -o.") as part,
            part.open("w", encoding="utf-8", errors="replace") as file,
        ):
            for name, rows in self.systems.items():
                head = "step".ljust(10) + "".join(
                    column.ljust(_WIDTH) for column in COLUMNS[1:]
                )
                head += (
                    "atm_devi_f(N)".ljust(_WIDTH)
                    if rows.shape[1] > len(COLUMNS)
                    else ""
                )
                formats = ["%12d", *["%19.6e"] * (rows.shape[1] - 1)]
                header = f"{printable(name)}\n{head}"
                np.savetxt(file, rows, fmt=formats, delimiter="", header=header)
        return path

    def text(self) -> str:
        """Return the models, and the mean and largest deviation of the force of each system."""
        place = COLUMNS.index("max_devi_f")
        rows: list[list[float | str]] = []
        for name, deviations in self.systems.items():
            most = deviations[:, place]
            # deviations from labels are nan where a frame has none
            worst = int(np.argmax(np.nan_to_num(most, nan=-math.inf)))
            labelled = most[~np.isnan(most)]
            mean = float(labelled.mean()) if len(labelled) else math.nan
            frame = worst if len(labelled) else math.nan
            rows.append([name, len(deviations), mean, float(most[worst]), frame])
        numbers = {"frames": ".0f", "mean": ".4g", "largest": ".4g", "in frame": ".0f"}
        columns = (
            Column("system"),
            *(Column(name, "", spec) for name, spec in numbers.items()),
        )
        table = Table("max_devi_f, frames count from 0", columns, rows)
        return "\n".join([*self.models, *render(table)])


def measure_deviation(
    models: Sequence[str | Path],
    systems: Sequence[str | Path],
    options: DeviationOptions | None = None,
    use_average: bool = False,
    averages: Sequence[str] = (),
    head: str | None = None,
    device: str | None = None,
    rglob_patterns: Sequence[str] | None = None,
) -> DeviationReport:
    """Return the deviations of the predictions of models for the frames of systems.

    Args:
        models: ``.pt`` checkpoints, folders of runs, frozen ``.dp`` or ``.yaml`` files.
        systems: systems, or folders searched for systems.
        options: what is measured.
        use_average: takes the averaged weights of training checkpoints.
        averages: which averages, or ``live``; each model is taken once with each of them. Implies
            ``use_average``.
        head: which model of files that hold several.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        UserError: if a model or the data cannot be read, or the models do not go together.
    """
    options = options or DeviationOptions()
    weights: Sequence[str | None] = averages or [None]
    loaded = [
        load_model(path, use_average, name, head) for path in models for name in weights
    ]
    for model in loaded:
        model.require_energies("model-devi")
    descriptions = [f"{model.info.path}: {model.info.describe()}" for model in loaded]
    _check_models(loaded, options)
    labels = _LABELS if options.real_error else ()
    # data are checked for the largest cutoff, and frames have their neighbors searched once
    widest = max(
        (model.config for model in loaded), key=lambda config: config.descriptor.cutoff
    )
    opened = open_labelled(systems, widest, labels, rglob_patterns)
    every = first_frames(opened, 0)
    cache = PairCache()
    reports = [predict(model, opened, every, device, labels, cache) for model in loaded]
    rows = {}
    for system in opened:
        by_model = [
            [frame for frame in report.frames if frame.source[0] == system.name]
            for report in reports
        ]
        rows[system.name] = _rows(by_model, options)
    return DeviationReport(descriptions, rows)


def frame_deviation(
    predictions: Sequence[Mapping[str, NDArray[Any]]],
    labels: Mapping[str, NDArray[Any]] | None,
    options: DeviationOptions,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the deviations of one frame and those of the forces on its atoms.

    They are (7,) in the order of ``COLUMNS`` without the step, and (N,). The deviation of a number
    is the root of the mean over the models of its squared distance to their mean (to the label, if
    ``labels`` are given). Of a force it is the length of the vector of its three, of a virial the
    number is per atom, and its average is the length of the nine over 3.

    Args:
        predictions: of each model: energy (), force (N, 3), virial (9,).
        labels: the same from the data, or None; nan where one is missing.
        options: the levels of relative deviations.
    """
    spread = {}
    center = {}
    for name in _LABELS:
        # (models, ...)
        values = np.stack(
            [np.asarray(prediction[name], np.float64) for prediction in predictions]
        )
        size = 1 if name == FORCE else len(predictions[0][FORCE])
        if labels is None:
            reference = values.mean(axis=0)
        else:
            reference = labels.get(name, np.full(values.shape[1:], np.nan))
        center[name] = reference / size
        spread[name] = np.sqrt(np.square(values / size - center[name]).mean(axis=0))
    virial = spread[VIRIAL]  # (9,)
    force = np.linalg.norm(spread[FORCE], axis=-1)  # (N,)
    if options.relative_v is not None:
        virial = virial / (np.linalg.norm(center[VIRIAL]) + options.relative_v)
    if options.relative is not None:
        force = force / (np.linalg.norm(center[FORCE], axis=-1) + options.relative)
    row = [virial.max(), virial.min(), np.linalg.norm(virial) / 3]
    row += [force.max(), force.min(), force.mean(), spread[ENERGY]]
    return np.array(row), force


def _rows(
    by_model: Sequence[Sequence[FrameResult]], options: DeviationOptions
) -> NDArray[np.float64]:
    """Return the rows of a system from its frames, as each model predicts them."""
    # frames of mixed systems differ in their atoms: short rows end with nan
    width = max(frame.num_atoms for frame in by_model[0]) if options.atomic else 0
    rows = np.full((len(by_model[0]), len(COLUMNS) + width), np.nan)
    for number, frames in enumerate(zip(*by_model)):
        labels = frames[0].label if options.real_error else None
        predictions = [frame.prediction for frame in frames]
        rows[number, 1 : len(COLUMNS)], atoms = frame_deviation(
            predictions, labels, options
        )
        if options.atomic:
            rows[number, len(COLUMNS) : len(COLUMNS) + len(atoms)] = atoms
    rows[:, 0] = options.frequency * np.arange(len(rows))
    return rows


def _check_models(loaded: Sequence[LoadedModel], options: DeviationOptions) -> None:
    """Raise UserError if there is nothing to compare, or if models do not read the same data."""
    if len(loaded) < 2 and not options.real_error:
        raise UserError(
            "-m: one model, and deviations are those of two or more. Give more models or averages "
            "(--average live A), or --real_error for the errors of one."
        )
    # elements, parameters and so on; other cutoffs are no obstacle
    first = loaded[0]
    expected = vars(ReadSpec.of_model(first.config, ()))
    for other in loaded[1:]:
        for what, theirs in vars(ReadSpec.of_model(other.config, ())).items():
            if theirs != expected[what]:
                raise UserError(
                    f"{other.info.path}: {what} is {theirs}, and {expected[what]} in "
                    f"{first.info.path}. Models that are compared read the same data."
                )
