"""The output bias of a model, the energy that each atom of an element adds, from the energies of data.

A fit finds, by least squares over frames f, the energies x of the elements t that explain what is given::

    sum_t counts[f, t] * x[t] = target[f]

``set`` takes the labels as the target, as the statistics of a new model do. ``change`` takes what the model leaves
unexplained, label minus prediction, and adds x to the bias that the model has. There each frame is divided by its
number of atoms first: the sum over t of ``counts[f, t] / num_atoms[f]`` is 1 for every frame, so the residual of the
least squares is orthogonal to ones, which says that the mean residual per atom is zero. DeePMD-kit fits total energies,
which is the same when all frames have the same number of atoms; otherwise its mean per atom is not zero.

The mean is not zero where the fit may not have its way: if the config fixes the energy of an element or an excluded
element has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from deepmd_ema.config.labels import ENERGY, LABELS
from deepmd_ema.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from deepmd_ema.batch import Batch
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.model.model_set import TaskModel

# F frames, T types
Array: TypeAlias = np.ndarray

_ROUNDING = 1e-10  # of numbers in double precision after a fit, relative to the labels


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
        """Take in the labels of a batch, and what a model gives for it: (F,) eV.

        Raises:
            DataError: if the model gives no finite energy for a frame.
        """
        name = self.config.fitting_net.labels[0]
        if name not in batch.labels:
            return
        num_types = len(self.config.type_map)
        seen = batch.has_label[name].numpy() > 0
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
                f"{system}: frame {frame} (from 0): the model gives no finite energy. Does it hold nan, or do two "
                "atoms stand in one place?"
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
        """Atoms of each type that have an energy of their own (F, T), or fractions of them for a mean over atoms."""
        counts = np.concatenate(self._counts)
        counts[:, list(self.config.excluded_types)] = 0
        return counts / counts.sum(1, keepdims=True).clip(1) if self.config.fitting_net.intensive else counts

    def residual(self, change: Array | None = None) -> Array:
        """Return label minus prediction (F,), eV, of the model with its bias moved by ``change`` (T,)."""
        residual = np.concatenate(self._labels) - np.concatenate(self._predicted)
        return residual if change is None else residual - self.counts @ change


@dataclass(frozen=True, eq=False)
class BiasFit:
    """Energies of elements that a fit has found.

    Attributes:
        bias: (T,) eV, or (T, W) of another quantity.
        std: of the same shape, spread over frames of the energy that it leaves unexplained, eV; ones without energies.
        rmse_per_atom: root mean square of the same, eV/atom (of a mean over atoms, of this), or None without energies.
        undetermined: elements whose energies the compositions do not determine separately.
    """

    bias: Array
    std: Array
    rmse_per_atom: float | None = None
    undetermined: tuple[str, ...] = ()


def energies_of(model: EnergyModel | TaskModel, config: ModelConfig, batches: Iterable[Batch]) -> FrameEnergies:
    """Return the energies of all frames in ``batches`` beside those of the model with the weights it has now.

    Args:
        model: on any device; nothing in it changes.
        config: its section ``model``.
        batches: on the CPU, in the layout of the model.

    Raises:
        DataError: if the model gives no finite energy for a frame.
    """
    frames = FrameEnergies(config)
    for batch in batches:
        # without autograd the forces cost a twelfth of the energies: there is no way of its own without them
        frames.add(batch, model(batch.to(model.out_bias.device), create_graph=False, need_virial=False)[ENERGY])
    return frames


def set_bias(frames: FrameEnergies, atomic: Array | None = None) -> BiasFit:
    """Return the bias that explains the labels best, whatever the model gives.

    Energies that the config gives come first, then means of atomic labels; the rest is fitted.

    Args:
        frames: with their labels.
        atomic: (T, 3, ...) number, sum and sum of squares of the labels of atomic energies, or None.
    """
    bias, known = _given_energies(frames.config, atomic)
    if not len(frames):
        return BiasFit(bias, np.ones_like(bias))
    target = np.concatenate(frames._labels)
    if not frames.config.fitting_net.distinguish_types:
        # the sum of a row is 1 for a mean over atoms, else the atoms that have the quantity
        sizes = frames.counts.sum(1)
        # a frame without such atoms has nothing to do with the bias
        values = target[sizes > 0] / sizes[sizes > 0, None]
        if not len(values):
            return BiasFit(bias, np.ones_like(bias))
        residual = values - values.mean(0)
        spread = np.zeros_like(bias) + _unit_of_loss(values, residual)
        return BiasFit(bias + values.mean(0), spread, float(np.sqrt(np.mean(residual**2))))
    target = target - frames.counts[:, known] @ bias[known]
    return _fit(frames, target, bias, ~known, np.ones(len(frames)))


def change_bias(frames: FrameEnergies, bias: Array) -> BiasFit:
    """Return ``bias`` moved so that the mean residual per atom of the model is zero.

    Elements whose energy the config fixes (``preset_out_bias``, ``fitting_net.atom_ener``) stay as they are. Where the
    compositions do not determine elements separately, the change with the smallest sum of squares is used.

    Args:
        frames: at least one, with the energies that the model gives with ``bias``.
        bias: (T,) eV, of the model now.
    """
    assert len(frames), "no frame has an energy"
    fixed = _given_energies(frames.config)[1]
    return _fit(frames, frames.residual(), np.array(bias, float), ~fixed, 1 / frames.num_atoms)


def fixed_elements(config: ModelConfig) -> tuple[str, ...]:
    """Return the elements whose energy the config gives, which no fit changes."""
    known = _given_energies(config)[1]
    return tuple(name for name, given in zip(config.type_map, known) if given)


def _fit(frames: FrameEnergies, target: Array, start: Array, free: Array, weight: Array) -> BiasFit:
    """Add to ``start`` (T,), where ``free``, the energies that explain ``target`` (F,) best."""
    config, counts = frames.config, frames.counts
    change = np.zeros_like(start)
    change[free], _, rank, _ = np.linalg.lstsq(
        counts[:, free] * weight[:, None], (target.T * weight).T, rcond=config.fitting_net.rcond
    )
    residual = target - counts @ change
    spread = residual.std(0)
    if config.fitting_net.loss == "property":
        spread = _unit_of_loss(target, residual)
    per_atom = residual if frames.config.fitting_net.intensive else (residual.T / frames.num_atoms).T
    seen = [t for t in np.flatnonzero(free) if counts[:, t].any()]
    return BiasFit(
        start + change,
        np.zeros_like(start) + spread,
        rmse_per_atom=float(np.sqrt(np.mean(per_atom**2))),
        undetermined=tuple(config.type_map[t] for t in seen) if rank < len(seen) else (),
    )


def _unit_of_loss(values: Array, residual: Array) -> Array:
    """Return the standard deviation of ``residual`` (F, ...), which is left of ``values`` (F, ...).

    The loss of a property is in units of it. Where the bias explains all frames there is none, and the unit is that of
    the labels: DeePMD-kit divides by zero.
    """
    spread: Array = residual.std(0)
    is_rounding = spread <= _ROUNDING * np.abs(values).max(0)
    return np.where(is_rounding, 1.0, spread)


def _given_energies(config: ModelConfig, atomic: Array | None = None) -> tuple[Array, Array]:
    """Return energies (T,) and which of them are known without a fit."""
    num_types = len(config.type_map)
    preset = (config.preset_out_bias or {}).get("energy") or [None] * num_types
    vacuum = list(config.fitting_net.atom_ener or []) + [None] * num_types
    energies = [one if one is not None else two for one, two in zip(preset, vacuum)]
    known = np.array([one is not None for one in energies])
    bias = np.array([0.0 if one is None else float(np.ravel(one)[0]) for one in energies])
    if ENERGY not in config.fitting_net.labels:
        bias = np.zeros((num_types, *LABELS[config.fitting_net.labels[0]].shape))
    if atomic is not None:
        measured = ~known & (atomic[:, 0].reshape(num_types, -1)[:, 0] > 0)
        bias[measured] = atomic[measured, 1] / atomic[measured, 0]
        known |= measured
    return bias, known
