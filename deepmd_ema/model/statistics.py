"""What a new model learns from data before training: spread of the environment, energy of each element."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from deepmd_ema.labels import APARAM, ATOM_ENERGY, FPARAM
from deepmd_ema.model.bias import FrameEnergies, set_bias
from deepmd_ema.model.kernels.switch import switch

if TYPE_CHECKING:
    from torch import Tensor

    from deepmd_ema.batch import Batch
    from deepmd_ema.config.schema.model import ModelConfig

# F frames, A atoms, K neighbor slots, T types, P frame parameters, Q atom parameters
Array: TypeAlias = np.ndarray

SMALLEST_SPREAD = 1e-2  # of the environment, as DeePMD-kit has it
SPREAD_UNSEEN = 1e-1  # of the environment of a type that the data do not hold


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data, from which means, spreads and biases follow. A row of sums is (count, sum, sum of squares).

    Attributes:
        type_map: T names of elements.
        radial: (T, 3) sums of the radial column of the environment matrix by type of centre, over all ``sel`` slots.
        angular: (T, 3) the same of the three angular columns together.
        bias: (T,) energy of each element, eV.
        bias_std: (T,) spread of the residual of the fit, eV.
        fparam: (P, 3) sums of the frame parameters, or None.
        aparam: (Q, 3) sums of the atom parameters, or None.
        observed: elements that the data hold, sorted by name.
        set_davg_zero: whether the mean of the environment is not used.
        protect: smallest spread of frame and atom parameters.
        rmse_per_atom: root mean square residual of the energy fit, eV/atom, or None without energies.
        undetermined: elements whose energies the data do not tell apart.
    """

    type_map: tuple[str, ...]
    radial: Array
    angular: Array
    bias: Array
    bias_std: Array
    fparam: Array | None = None
    aparam: Array | None = None
    observed: tuple[str, ...] = ()
    set_davg_zero: bool = False
    protect: float = 0.01
    rmse_per_atom: float | None = None
    undetermined: tuple[str, ...] = ()

    def environment(self) -> tuple[Array, Array]:
        """Return mean and spread (T, 4) of the columns of the environment matrix."""
        radial_mean, radial_spread = _mean_and_spread(self.radial, SMALLEST_SPREAD)
        _, angular_spread = _mean_and_spread(self.angular, SMALLEST_SPREAD)
        unseen = self.radial[:, 0] == 0
        spread = np.stack([radial_spread, angular_spread, angular_spread, angular_spread], 1)
        mean = np.zeros_like(spread)
        if not self.set_davg_zero:
            mean[:, 0] = np.where(unseen, 0.0, radial_mean)
        return mean, np.where(unseen[:, None], SPREAD_UNSEEN, spread)

    def buffers(self) -> dict[str, Array]:
        """Return buffer name to value, in a shape that expands to that of the buffer."""
        mean, spread = self.environment()
        out = {
            "descriptor.mean": mean[:, None],
            "descriptor.stddev": spread[:, None],
            "out_bias": self.bias[None, :, None],
            "out_std": self.bias_std[None, :, None],
        }
        for name, sums in (("fparam", self.fparam), ("aparam", self.aparam)):
            if sums is not None:
                average, deviation = _mean_and_spread(sums, self.protect)
                out |= {f"fitting.{name}_avg": average, f"fitting.{name}_inv_std": 1 / deviation}
        return out

    def lines(self) -> list[str]:
        """Return what a user wants to know of the fit of the energies, one line each."""
        shown = [t for t, name in enumerate(self.type_map) if name in self.observed]
        out = ["energy of each element: " + ", ".join(f"{self.type_map[t]} {self.bias[t]:.6g} eV" for t in shown)]
        if self.rmse_per_atom is not None:
            out.append(f"what it leaves unexplained: {self.rmse_per_atom:.4g} eV/atom (RMSE)")
        if self.undetermined:
            names = ", ".join(self.undetermined)
            out.append(f"the compositions in the data do not tell the energies of {names} apart: they share them")
        return out


def collect_statistics(config: ModelConfig, batches: Iterable[Batch]) -> Statistics:
    """Return the statistics of all frames in ``batches``, in one pass.

    Args:
        config: ``model`` with ``sel`` resolved to numbers.
        batches: on the CPU, in the layout of the model.
    """
    sums = _Sums(config)
    for batch in batches:
        sums.add(batch)
    fit = set_bias(sums.energies, sums.atomic)
    return Statistics(
        type_map=tuple(config.type_map),
        radial=sums.radial,
        angular=sums.angular,
        bias=fit.bias,
        bias_std=fit.std,
        fparam=sums.fparam,
        aparam=sums.aparam,
        observed=tuple(sorted(name for name, seen in zip(config.type_map, sums.radial[:, 0] > 0) if seen)),
        set_davg_zero=config.descriptor.set_davg_zero,
        protect=config.data_stat_protect,
        rmse_per_atom=fit.rmse_per_atom,
        undetermined=fit.undetermined,
    )


@dataclass
class _Sums:
    config: ModelConfig
    radial: Array = field(init=False)
    angular: Array = field(init=False)
    atomic: Array = field(init=False)
    energies: FrameEnergies = field(init=False)
    fparam: Array | None = None
    aparam: Array | None = None

    def __post_init__(self) -> None:
        self.radial, self.angular, self.atomic = (np.zeros((len(self.config.type_map), 3)) for _ in range(3))
        self.energies = FrameEnergies(self.config)

    def add(self, batch: Batch) -> None:
        config = self.config
        radial, angular = _environment_sums(config, batch)
        self.radial += radial
        self.angular += angular
        if config.fitting_net.numb_fparam and FPARAM in batch.conditions:
            self.fparam = _added(self.fparam, batch.conditions[FPARAM])
        if config.fitting_net.numb_aparam and APARAM in batch.conditions:
            self.aparam = _added(self.aparam, batch.conditions[APARAM])
        self.energies.add(batch)
        if ATOM_ENERGY in batch.labels:
            seen_atoms = batch.has_label[ATOM_ENERGY][batch.atom_frame]
            energy = batch.labels[ATOM_ENERGY].view(-1)
            self.atomic += _by_type(torch.stack([seen_atoms, seen_atoms * energy, seen_atoms * energy**2], 1), batch)


def _environment_sums(config: ModelConfig, batch: Batch) -> tuple[Array, Array]:
    """Return the sums (T, 3) of the radial and of the angular columns by type of centre; empty slots count as zeros."""
    descriptor = config.descriptor
    assert not isinstance(descriptor.sel, str), "sel must be resolved to numbers"
    num_slots = sum(descriptor.sel)
    vector = batch.vector
    distance = torch.linalg.vector_norm(vector, dim=-1)
    weight = switch(distance, descriptor.rcut, descriptor.rcut_smth)
    inverse = (distance + descriptor.env_protection).reciprocal_()
    radial = weight.mul_(inverse)
    _drop_excluded(descriptor.exclude_types, batch, radial)
    angular = inverse.mul_(radial)
    along = torch.bmm(angular[:, None], vector).sum((1, 2))
    square = angular.mul_(distance).square_().sum(1)
    ones = torch.full_like(along, num_slots)
    sums = torch.stack([ones, radial.sum(1), (radial * radial).sum(1)], 1)
    return _by_type(sums, batch), _by_type(torch.stack([3 * ones, along, square], 1), batch)


def _drop_excluded(exclude_types: Iterable[list[int]], batch: Batch, radial: Tensor) -> None:
    atoms, slots = batch.atoms_by_type, batch.sections
    for first, second in exclude_types:
        radial[atoms[first], slots[second]] = 0
        radial[atoms[second], slots[first]] = 0


def _by_type(per_atom: Tensor, batch: Batch) -> Array:
    return np.stack([part.sum(0).numpy() for part in per_atom.split(batch.type_counts)])


def _added(sums: Array | None, values: Tensor) -> Array:
    table = values.numpy()
    new = np.stack([np.full(table.shape[1], float(len(table))), table.sum(0), (table**2).sum(0)], 1)
    return new if sums is None else sums + new


def _mean_and_spread(sums: Array, smallest: float) -> tuple[Array, Array]:
    count = np.maximum(sums[:, 0], 1)
    mean = sums[:, 1] / count
    variance = np.maximum(sums[:, 2] / count - mean**2, 0)
    return mean, np.maximum(np.sqrt(variance), smallest)
