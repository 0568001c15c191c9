"""The output bias of a model, the energy that each atom of an element adds, from energies of data.

A fit finds, by least squares over frames f, the energies x of the elements t that explain what is
given::

    sum_t counts[f, t] * x[t] = target[f]

``set`` takes the labels as the target, as the statistics of a new model do. ``change`` takes what
the model leaves unexplained, label minus prediction, and adds x to the bias that the model has.
There each frame is divided by its number of atoms first: the sum over t of ``counts[f, t] /
num_atoms[f]`` is 1 for every frame, so the residual of the least squares is orthogonal to ones,
which says that the mean residual per atom is zero. DeePMD-kit fits total energies, which is the
same when all frames have the same number of atoms; otherwise its mean per atom is not zero.

The mean is not zero where the fit may not have its way: if the config fixes the energy of an
element or an excluded element has none.

A model of a file is given to data of the same method or of another one. Labels of another method,
code or pseudopotential differ by an energy of each element, hundreds of eV, and around it little;
errors of a model do not have this form. ``move_bias`` distinguishes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from deepmd_ema.config.labels import ENERGY, LABELS, POLAR
from deepmd_ema.errors import DataError
from deepmd_ema.model.interface import label_weight
from deepmd_ema.text import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from deepmd_ema.batch import Batch
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.model.model_set import TaskModel

# F frames, T types
Array: TypeAlias = np.ndarray

# relative to the labels, of numbers in double precision after a fit
_ROUNDING = 1e-10
# labels are of another method if a shift of each element is this times what it leaves unexplained
_OF_ANOTHER_METHOD = 2.0
_MIN_SHIFT = (
    0.05  # eV/atom; a model may be as wrong where it has not been trained, and evenly
)
_MIN_FREEDOM = 3  # frames more than fitted numbers, to know what is left unexplained
_MAX_SHOWN = 6  # elements whose shift is named
# choices for the bias that a model has: fit it if labels differ, always, or never
AUTO = "auto"
FIT = "fit"
KEEP = "keep"


@dataclass
class FrameEnergies:
    """Energies of the frames that have one, beside their compositions; gathered batch by batch.

    Of a model of another quantity they are its values (F, W), with the same functions.

    Args:
        config: the section ``model``.
    """

    config: ModelConfig
    _counts: list[Array] = field(default_factory=list)
    _labels: list[Array] = field(default_factory=list)
    _predicted: list[Array] = field(default_factory=list)

    def add(self, batch: Batch, predicted: Tensor | None = None) -> None:
        """Add the labels of a batch that have a weight, and what a model gives for them: (F,) eV.

        Raises:
            DataError: if the model gives no finite energy for a frame.
        """
        name = self.config.fitting_net.labels[0]
        if name not in batch.labels:
            return
        num_types = len(self.config.type_map)
        seen = label_weight(batch, name).numpy() > 0
        # pairs of frame and type in one number: one count gives the compositions (F, T)
        cell = batch.atom_frame * num_types + batch.atom_type
        counts = torch.bincount(cell, minlength=batch.num_frames * num_types)
        self._counts.append(counts.view(-1, num_types).numpy()[seen].astype(float))
        self._labels.append(batch.labels[name].numpy()[seen])
        if predicted is None:
            return
        energy = predicted.cpu().numpy()
        if len(bad := np.flatnonzero(~np.isfinite(energy))):
            system, frame = batch.frames[bad[0]]
            raise DataError(
                f"{system}: frame {frame} (from 0): the model gives no finite energy. Does it "
                "hold nan, or do two atoms stand in one place?"
            )
        self._predicted.append(energy[seen])

    def __len__(self) -> int:
        return sum(map(len, self._labels))

    @property
    def num_atoms(self) -> Array:
        """Atoms of each frame (F,)."""
        return np.concatenate(self._counts).sum(1)

    @property
    def counts(self) -> Array:
        """Atoms of each type that have an energy of their own (F, T).

        For a mean over atoms these are fractions of them.
        """
        counts = np.concatenate(self._counts)
        counts[:, list(self.config.excluded_types)] = 0
        return (
            counts / counts.sum(1, keepdims=True).clip(1)
            if self.config.fitting_net.intensive
            else counts
        )

    @property
    def effect(self) -> Array:
        """Change of the prediction of a frame per unit of the bias of each type (F, T)."""
        return self.counts * np.asarray(self.config.fitting_net.bias_effect)

    @property
    def weight(self) -> Array:
        """Factor that makes a value of a frame one per atom (F,): 1 for a mean over atoms."""
        num_atoms = self.num_atoms
        return (
            np.ones_like(num_atoms)
            if self.config.fitting_net.intensive
            else 1 / num_atoms
        )

    def residual(self, change: Array | None = None) -> Array:
        """Return label minus prediction (F, ...), eV.

        With ``change`` (T, ...) it is that of the model with its bias moved by it.
        """
        residual = np.concatenate(self._labels) - np.concatenate(self._predicted)
        return residual if change is None else residual - self.effect @ change


@dataclass(frozen=True, eq=False)
class BiasFit:
    """Energies of elements that a fit has found.

    Attributes:
        bias: (T,) eV, or (T, W) of another quantity.
        std: of the same shape, spread over frames of the energy that it leaves unexplained, eV;
            ones without energies.
        rmse_per_atom: root mean square of the same, eV/atom (of a mean over atoms, of this), or
            None without energies.
        undetermined: elements whose energies the compositions do not determine separately.
        rank: how many numbers the frames determine for each component.
    """

    bias: Array
    std: Array
    rmse_per_atom: float | None = None
    undetermined: tuple[str, ...] = ()
    rank: int = 0


@dataclass(frozen=True, eq=False)
class BiasMove:
    """Output bias of a model of a file for data, and the difference of labels from predictions.

    Numbers are per atom, of a mean over atoms those of a frame; of a quantity with several
    components root mean squares over these.

    Attributes:
        bias: (T,) eV, or (T, W) of another quantity.
        std: spread of frames around the bias, of the same shape.
        is_moved: whether elements that the model knows have another bias than in the file.
        shift: part of label minus prediction that another bias of these elements explains, root
            mean square over frames with the sign of the mean.
        spread: root mean square of what it leaves.
        is_of_another_method: whether the labels have another reference than the model.
        change: (T,) eV, or (T, W), that explains it, also where the bias stays.
        is_unique: whether the compositions determine the change of each element.
    """

    bias: Array
    std: Array
    is_moved: bool
    shift: float
    spread: float
    is_of_another_method: bool
    change: Array
    is_unique: bool

    def evidence(self, config: ModelConfig) -> str:
        """Return the difference as text.

        An example: ``energies differ by -641.5 eV/atom (spread 0.05)``.
        """
        label = LABELS[config.fitting_net.labels[0]]
        what = (
            "energies"
            if label.name == ENERGY
            else f"labels of {label.name.partition('[')[0]}"
        )
        unit = label.unit
        if not config.fitting_net.intensive:
            unit = f"{unit}/atom" if unit else "per atom"
        text = f"{what} differ by {f'{self.shift:.4g} {unit}'.rstrip()} (spread {self.spread:.2g})"
        if not self.is_of_another_method:
            return f"{text}: no other reference"
        # changes of elements are named if they are single numbers and the only solution
        if self.change.ndim == 1 and self.is_unique:
            moved = [
                f"{name} {change:.4g}"
                for name, change in zip(config.type_map, self.change)
                if change
            ]
            text += f", {first_few(moved, _MAX_SHOWN)} {label.unit}"
        return f"{text}: another reference"


def energies_of(
    model: EnergyModel | TaskModel, config: ModelConfig, batches: Iterable[Batch]
) -> FrameEnergies:
    """Return the energies of all frames in ``batches`` beside those of the model, as it is now.

    Of a model of another quantity they are its values.

    Args:
        model: on any device; nothing in it changes.
        config: its section ``model``.
        batches: on the CPU, in the layout of the model.

    Raises:
        DataError: if the model gives no finite energy for a frame.
    """
    frames = FrameEnergies(config)
    for batch in batches:
        # forces are computed as well: without autograd they cost a twelfth of the energies
        prediction = model(
            batch.to(model.out_bias.device), create_graph=False, need_virial=False
        )
        frames.add(batch, prediction[config.fitting_net.labels[0]])
    return frames


def set_bias(frames: FrameEnergies, atomic: Array | None = None) -> BiasFit:
    """Return the bias that explains the labels best, whatever the model gives.

    Energies that the config gives come first, then means of atomic labels; the rest is fitted.

    Args:
        frames: with their labels.
        atomic: (T, 3, ...) number, sum and sum of squares of the labels of atomic energies, or
            None.
    """
    # one bias for all elements: the mean of the values per atom, of frames before those of atoms
    is_one = not frames.config.fitting_net.distinguish_types
    if is_one and atomic is not None:
        # atoms of excluded elements do not have the quantity
        counted = np.delete(atomic, [*frames.config.excluded_types], axis=0).sum(0)
        atomic = None if len(frames) else np.zeros_like(atomic) + counted
    bias, is_fixed = _given_energies(frames.config, atomic)
    if not len(frames):
        return BiasFit(bias, np.ones_like(bias))
    target = np.concatenate(frames._labels)
    if is_one:
        # the sum of a row is 1 for a mean over atoms, else the atoms that have the quantity
        sizes = frames.counts.sum(1)
        # a frame without such atoms has nothing to do with the bias
        values = target[sizes > 0] / sizes[sizes > 0, None]
        if not len(values):
            return BiasFit(bias, np.ones_like(bias))
        residual = values - values.mean(0)
        spread = np.zeros_like(bias) + _unit_of_loss(values, residual)
        return BiasFit(
            bias + values.mean(0), spread, float(np.sqrt(np.mean(residual**2)))
        )
    counts = frames.counts
    target = target - counts[:, is_fixed] @ bias[is_fixed]  # left for the others
    return _fit(frames, counts, target, bias, ~is_fixed, np.ones(len(frames)))


def change_bias(frames: FrameEnergies, bias: Array) -> BiasFit:
    """Return ``bias`` moved so that the mean residual per atom of the model is zero.

    Elements whose energy the config fixes (``preset_out_bias``, ``fitting_net.atom_ener``) stay as
    they are. Where the compositions do not determine elements separately, the change with the
    smallest sum of squares is used.

    Args:
        frames: at least one, with the energies that the model gives with ``bias``.
        bias: (T,) eV, of the model now.
    """
    assert len(frames), "no frame has an energy"
    # divided by the number of atoms: the mean of the residual per atom is then 0 (module docstring)
    fixed = _given_energies(frames.config)[1]
    return _fit(
        frames,
        frames.effect,
        frames.residual(),
        np.array(bias, float),
        ~fixed,
        frames.weight,
    )


def move_bias(
    frames: FrameEnergies,
    bias: Array,
    std: Array,
    new: Iterable[str] = (),
    how: str = AUTO,
) -> BiasMove:
    """Return the bias that a model of a file has on data.

    Elements whose energy the config fixes stay as they are. Elements that the file does not have
    get what the model leaves unexplained. Those that it has are moved if this explains much more
    than it leaves: labels of another method.

    Args:
        frames: at least one, with the values that the model gives with ``bias``.
        bias: (T,) eV, or (T, W) of another quantity, of the model now.
        std: of the same shape, spread of values of frames in the data that the model was trained
            on.
        new: elements that the file does not have.
        how: ``fit`` moves known elements, ``keep`` does not, ``auto`` decides.
    """
    config = frames.config
    effect = frames.effect
    weight = frames.weight
    residual = frames.residual()
    if POLAR in config.fitting_net.labels:  # its bias is a multiple of the unit matrix
        diagonal = residual.reshape(-1, 3, 3).trace(axis1=1, axis2=2) / 3
        residual = diagonal[:, None] * np.eye(3).ravel()
    free = ~_given_energies(config)[1]
    is_new = np.isin(config.type_map, list(new)) & config.fitting_net.distinguish_types
    # two fits: with the bias of the file for the elements that it has, and with another for all
    unmoved = _fit(frames, effect, residual, bias, free & is_new, weight)
    moved = _fit(frames, effect, residual, bias, free, weight)
    # (F, ...) parts that both leave unexplained, per atom
    per_atom = weight.reshape(-1, *[1] * (residual.ndim - 1))
    left = per_atom * (residual - effect @ (unmoved.bias - bias))
    rest = per_atom * (residual - effect @ (moved.bias - bias))
    freedom = len(frames) - moved.rank
    # divided by the degrees of freedom: a fit leaves less than the spread of further frames
    spread = float(np.sqrt((rest**2).sum(0).mean() / max(freedom, 1)))
    if freedom < _MIN_FREEDOM:  # a few frames are explained by any numbers
        spread = max(spread, float(np.mean(std) * np.mean(weight)))
    explained = left - rest
    shift = float(np.sqrt(np.mean(explained**2)) * np.sign(explained.mean()))
    # other quantities have no unit in which a least shift could be given
    least = _MIN_SHIFT if ENERGY in config.fitting_net.labels else 0.0
    move = BiasMove(
        bias=unmoved.bias,
        std=unmoved.std,
        is_moved=False,
        shift=shift,
        spread=spread,
        is_of_another_method=abs(shift) > max(_OF_ANOTHER_METHOD * spread, least),
        change=moved.bias - bias,
        is_unique=not moved.undetermined,
    )
    if how == FIT or (how == AUTO and move.is_of_another_method):
        return replace(move, bias=moved.bias, std=moved.std, is_moved=True)
    return move


def with_given_energies(config: ModelConfig, bias: Array) -> Array:
    """Return ``bias`` (T, ...) with the energies that the config gives.

    Its options are ``preset_out_bias`` and ``atom_ener``.
    """
    energies, is_fixed = _given_energies(config)
    return np.where(is_fixed, energies, bias) if is_fixed.any() else bias


def fixed_elements(config: ModelConfig) -> tuple[str, ...]:
    """Return the elements whose energy the config gives, which no fit changes."""
    is_fixed = _given_energies(config)[1]
    return tuple(name for name, fixed in zip(config.type_map, is_fixed) if fixed)


def _fit(
    frames: FrameEnergies,
    counts: Array,
    target: Array,
    start: Array,
    free: Array,
    weight: Array,
) -> BiasFit:
    """Return ``start`` (T,) with the energies that explain ``target`` (F,) by ``counts`` (F, T).

    They are added where ``free``, by least squares over frames with ``weight`` (F,).
    """
    config = frames.config
    change = np.zeros_like(start)
    columns = counts[:, free]
    # one energy for all elements: its column is the number of all atoms
    if not config.fitting_net.distinguish_types:
        columns = columns.sum(1, keepdims=True)
    # numpy gives the smallest solution where compositions do not determine one
    solution = np.linalg.lstsq(
        columns * weight[:, None], (target.T * weight).T, rcond=config.fitting_net.rcond
    )
    change[free] = solution[0]
    rank = solution[2]
    residual = target - counts @ change
    spread = residual.std(0)
    if config.fitting_net.loss == "property":
        spread = _unit_of_loss(target, residual)
    per_atom = (residual.T * frames.weight).T
    # elements without an atom in any frame do not count as undetermined
    seen = [t for t in np.flatnonzero(free) if counts[:, t].any()]
    return BiasFit(
        start + change,
        np.zeros_like(start) + spread,
        rmse_per_atom=float(np.sqrt(np.mean(per_atom**2))),
        undetermined=tuple(config.type_map[t] for t in seen)
        if rank < min(len(seen), columns.shape[1])
        else (),
        rank=rank,
    )


def _unit_of_loss(values: Array, residual: Array) -> Array:
    """Return the standard deviation of ``residual`` (F, ...), which is left of ``values`` (F, ...).

    The loss of a property is in units of it. Where the bias explains all frames there is none, and
    the unit is that of the labels: DeePMD-kit divides by zero.
    """
    spread: Array = residual.std(0)
    is_rounding = spread <= _ROUNDING * np.abs(values).max(0)
    return np.where(is_rounding, 1.0, spread)


def _given_energies(
    config: ModelConfig, atomic: Array | None = None
) -> tuple[Array, Array]:
    """Return energies (T, ...) and which of them (T,) are fixed without a fit."""
    num_types = len(config.type_map)
    preset = (config.preset_out_bias or {}).get("energy") or [None] * num_types
    vacuum = list(config.fitting_net.atom_ener or []) + [None] * num_types
    # a preset comes before the energy in vacuum, and both before means of atomic labels
    energies = [
        vacuum_energy if preset_energy is None else preset_energy
        for preset_energy, vacuum_energy in zip(preset, vacuum)
    ]
    is_fixed = np.array([energy is not None for energy in energies])
    bias = np.array([0.0 if e is None else float(np.ravel(e)[0]) for e in energies])
    # options give energies only: the bias of another quantity begins at 0
    if ENERGY not in config.fitting_net.labels:
        bias = np.zeros((num_types, *LABELS[config.fitting_net.labels[0]].shape))
    if atomic is not None:
        measured = ~is_fixed & (atomic[:, 0].reshape(num_types, -1)[:, 0] > 0)
        bias[measured] = atomic[measured, 1] / atomic[measured, 0]
        is_fixed |= measured
    return bias, is_fixed
