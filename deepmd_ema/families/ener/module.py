"""The network from the descriptor of an atom to its energy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.errors import ConfigError, DataError
from deepmd_ema.labels import APARAM, FPARAM
from deepmd_ema.model.nn.layers import Network, freeze, module_list
from deepmd_ema.model.ops.reference import Operations, UsesOperations
from deepmd_ema.model.sums import mean_and_spread
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.families.ener.section import EnerFittingConfig
    from deepmd_ema.model.interface import Block

# A atoms, D features, P frame parameters, Q atom parameters, T types


class FittingNetwork(Network):
    """A network of one output, which may be sharded: it gathers its parameters when one of its methods is called."""

    def evaluate(self, x: Tensor, operations: Operations) -> tuple[Tensor, Tensor]:
        """Return the output (B,) and its gradient with respect to the inputs (B, N)."""
        return operations.values_and_gradients(x, [self], [x.shape[0]])


class EnergyFitting(UsesOperations):
    """Atomic energies: one network per type that sees only the atoms of its type, or one network for all.

    Args:
        config: the section ``model.fitting_net``.
        dim_in: D.
        num_types: T.
        excluded_types: types whose atoms have no energy of their own.
        seed: of the initial parameters when the section has none.
        mixed_types: whether one network serves all types, because the features distinguish them.
    """

    def __init__(
        self,
        config: EnerFittingConfig,
        dim_in: int,
        num_types: int,
        excluded_types: tuple[int, ...],
        seed: int,
        mixed_types: bool,
    ) -> None:
        super().__init__()
        self.mixed_types = mixed_types
        self.dtype = precision(config.precision)
        self.dim_in, self.num_fparam, self.num_aparam = dim_in, config.numb_fparam, config.numb_aparam
        self.excluded_types = frozenset(excluded_types)
        # nets whose energy is measured from that of an atom without neighbors; DeePMD-kit measures that of one net for
        # all types so as soon as one type has an energy
        given = {t for t, energy in enumerate(config.atom_ener or ()) if energy is not None}
        self.from_vacuum = frozenset({0} if given and mixed_types else given)
        self.skips_absent = True  # the nets of elements that a batch does not have, in evaluation
        start = seed if config.seed is None else config.seed
        self.case_is_input = self._case_is_input(config)
        self.num_inputs = dim_in + config.numb_fparam + config.numb_aparam + config.dim_case_embd * self.case_is_input
        self.nets = module_list(
            self._network(config, seed_for("fitting", start, t)) for t in range(1 if mixed_types else num_types)
        )
        freeze(self, config.trainable)
        counted = torch.tensor([t not in self.excluded_types for t in range(num_types)], dtype=torch.float64)
        self._counted: Tensor
        self.register_buffer("_counted", counted, persistent=False)
        self.bias_atom_e: Tensor
        self.register_buffer("bias_atom_e", torch.zeros(num_types, 1, dtype=torch.float64))
        for name, count in ((FPARAM, self.num_fparam), (APARAM, self.num_aparam)):
            if count:
                self.register_buffer(f"{name}_avg", torch.zeros(count, dtype=self.dtype))
                self.register_buffer(f"{name}_inv_std", torch.ones(count, dtype=self.dtype))
        self.case_embd: Tensor | None
        case = torch.zeros(config.dim_case_embd, dtype=self.dtype) if config.dim_case_embd else None
        self.register_buffer("case_embd", case)
        default = None if config.default_fparam is None else torch.tensor(config.default_fparam, dtype=torch.float64)
        self._default_fparam: Tensor | None
        self.register_buffer("_default_fparam", default, persistent=False)

    def _case_is_input(self, config: Any) -> bool:
        """Return whether the case embedding is an input of the networks."""
        return True

    def _network(self, config: Any, seed: int) -> Any:
        """Return a network with random parameters."""
        return FittingNetwork(
            [self.num_inputs, *config.neuron],
            config.activation_function,
            timestep=config.resnet_dt,
            dtype=self.dtype,
            seed=seed,
            num_out=1,
        )

    def share_networks(self, other: EnergyFitting, whose: str) -> None:
        """Take the networks of ``other`` and what their inputs are measured by; ``whose`` names both for messages.

        Raises:
            ConfigError: if they have another number of inputs.
        """
        if other.num_inputs != self.num_inputs:
            raise ConfigError(
                f"{whose} share a fitting network, but their descriptors have {other.num_inputs} and {self.num_inputs} "
                "numbers (with frame and atom parameters). Share the descriptor too, or give both one size."
            )
        self.nets = other.nets
        for name in (f"{part}_{what}" for part in (FPARAM, APARAM) for what in ("avg", "inv_std")):
            if hasattr(self, name):
                setattr(self, name, getattr(other, name))

    @property
    def case(self) -> int:
        """Place of the one in the case embedding; 0 without one."""
        return 0 if self.case_embd is None else int(self.case_embd.argmax())

    def set_case(self, index: int) -> None:
        """Set the case embedding, if there is one, to a one at ``index``."""
        if self.case_embd is not None:
            self.case_embd.zero_()[index] = 1

    def apply_statistics(self, sums: Mapping[str, np.ndarray], protect: float) -> None:
        """Set mean and inverse spread of the frame and atom parameters that the data have."""
        for name, values in sums.items():
            mean, spread = mean_and_spread(values, protect)
            getattr(self, f"{name}_avg").copy_(torch.as_tensor(mean))
            getattr(self, f"{name}_inv_std").copy_(torch.as_tensor(1 / spread))

    def blocks(self) -> list[Block]:
        """Return the networks, each of which is used as a whole, once per batch."""
        return [(net, ("evaluate",)) for net in self.nets]

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energy of each atom (A,) float64, eV, and its gradient with respect to its features (A, D)."""
        inputs, shares = _inputs(self, features, batch)
        energy, gradient = self._evaluate(inputs, shares)
        energy = _from_vacuum(self, energy, inputs, shares).double() + self.bias_atom_e.view(-1)[batch.atom_type]
        gradient = gradient[:, : self.dim_in].to(features.dtype)
        if not self.excluded_types:
            return energy, gradient
        counted = self._counted[batch.atom_type]
        return energy * counted, gradient * counted[:, None].to(gradient)

    def _evaluate(self, inputs: Tensor, shares: list[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs of the networks (A,) and their gradients with respect to the inputs (A, N)."""
        nets = self.nets
        if not self.skips_absent:  # each gathers its parameters when it is called
            found = [net.evaluate(own, self.ops) for net, own in zip(nets, inputs.split(shares), strict=True)]
            energies, gradients = zip(*found, strict=True)
            return torch.cat(energies), torch.cat(gradients)
        if not torch.is_grad_enabled():
            # in training the parameters of absent types get gradients of zero, as those of all ranks must
            nets = [net for net, count in zip(nets, shares, strict=True) if count]
            shares = [count for count in shares if count]
        return self.ops.values_and_gradients(inputs, nets, shares)

    def _values(self, index: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B,) of a network."""
        values: Tensor = self.nets[index](inputs)
        return values[:, 0]

    def _parameters_of(self, batch: Batch) -> list[Tensor]:
        out = []
        if self.num_fparam:
            fparam = batch.conditions.get(FPARAM)
            if fparam is None:
                if self._default_fparam is None:
                    raise DataError(f"this model needs fparam: {self.num_fparam} numbers for each frame.")
                fparam = self._default_fparam.expand(batch.num_frames, -1)
            out.append(_normalised(self, FPARAM, fparam)[batch.atom_frame])
        if self.num_aparam:
            if APARAM not in batch.conditions:
                raise DataError(f"this model needs aparam: {self.num_aparam} numbers for each atom.")
            out.append(_normalised(self, APARAM, batch.conditions[APARAM]))
        if self.case_embd is not None and self.case_is_input:
            out.append(self.case_embd.expand(batch.atom_type.shape[0], -1))
        return out


def _inputs(fitting: EnergyFitting, features: Tensor, batch: Batch) -> tuple[Tensor, list[int]]:
    """Return the inputs of the networks (A, N), in their precision, and the rows of each network."""
    inputs, beside = features.to(fitting.dtype), fitting._parameters_of(batch)
    if beside:
        inputs = torch.cat([inputs, *beside], 1)
    return inputs, [inputs.shape[0]] if fitting.mixed_types else list(batch.type_counts)


def _from_vacuum(fitting: EnergyFitting, energy: Tensor, inputs: Tensor, shares: list[int]) -> Tensor:
    """Return energies (A,) without those of the same atoms without neighbors, where they are measured so."""
    if not fitting.from_vacuum:
        return energy
    parts = list(energy.split(shares))
    for index in fitting.from_vacuum:
        parts[index] = parts[index] - fitting._values(index, _in_vacuum(inputs.split(shares)[index], fitting.dim_in))
    return torch.cat(parts)


def _in_vacuum(inputs: Tensor, dim_in: int) -> Tensor:
    """Return the inputs (B, N) of the same atoms without neighbors."""
    return torch.cat([torch.zeros_like(inputs[:, :dim_in]), inputs[:, dim_in:]], 1)


def _normalised(fitting: EnergyFitting, name: str, values: Tensor) -> Tensor:
    return (values.to(fitting.dtype) - getattr(fitting, f"{name}_avg")) * getattr(fitting, f"{name}_inv_std")
