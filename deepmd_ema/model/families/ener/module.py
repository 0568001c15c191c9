"""The network from the descriptor of an atom to its energy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import APARAM, FPARAM
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.errors import ConfigError, DataError
from deepmd_ema.model.interface import Block, Fitting, mean_and_spread
from deepmd_ema.model.nn.layers import Network, freeze, module_list
from deepmd_ema.model.ops.operations import Operations, UsesOperations
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.fitting_base import FittingOptions

# A atoms, D features, P frame parameters, Q atom parameters, T types


class FittingNetwork(Network):
    """A network of one output, which may be sharded.

    It gathers its parameters when one of its methods is called.
    """

    def evaluate(self, x: Tensor, operations: Operations) -> tuple[Tensor, Tensor]:
        """Return the output (B,) and its gradient with respect to the inputs (B, N)."""
        return operations.values_and_gradients(x, [self], [x.shape[0]])


class EnergyFitting(UsesOperations, Fitting):
    """Atomic energies from one network per type, or from one network for all types.

    A network per type sees the atoms of its type only.

    Attributes:
        num_out: outputs of a network.

    Args:
        config: the section ``model.fitting_net``.
        dim_in: D.
        num_types: T.
        seed: of the initial parameters when the section has none.
        mixed_types: whether one network serves all types, because the features distinguish them.
    """

    num_out = 1

    def __init__(
        self,
        config: FittingOptions,
        dim_in: int,
        num_types: int,
        seed: int,
        mixed_types: bool,
    ) -> None:
        super().__init__()
        self.mixed_types = mixed_types
        self.dtype = precision(config.precision)
        self.dim_in = dim_in
        self.num_fparam = config.numb_fparam
        self.num_aparam = config.numb_aparam
        # networks whose energy is counted from that of an atom without neighbors, so that such an
        # atom has exactly its energy of atom_ener. DeePMD-kit does so for the one network of all
        # types as soon as one type has an energy
        fixed_types = {
            t for t, energy in enumerate(config.atom_ener or ()) if energy is not None
        }
        self.from_vacuum = frozenset(
            {0} if fixed_types and mixed_types else fixed_types
        )
        start = seed if config.seed is None else config.seed
        # gated layers (dpa4_ener) may take the case as a modulation of all layers instead
        self.case_is_input = not getattr(config, "case_film_embd", False)
        self.num_inputs = (
            dim_in
            + config.numb_fparam
            + config.numb_aparam
            + (config.dim_case_embd if self.case_is_input else 0)
        )
        self.nets = module_list(
            self._network(config, seed_for("fitting", start, t))
            for t in range(1 if mixed_types else num_types)
        )
        freeze(self, config.trainable)
        # float64 in any precision: energies of elements may be hundreds of eV, of which float32
        # would keep 1e-5 eV
        self.bias_atom_e = nn.Buffer(
            torch.zeros(num_types, self.num_out, dtype=torch.float64)
        )
        # only what the networks read has buffers: `apply_statistics` and `share_networks` look for
        # them, and checkpoints have no entries without use
        for name, count in ((FPARAM, self.num_fparam), (APARAM, self.num_aparam)):
            if count:
                self.register_buffer(
                    f"{name}_avg", torch.zeros(count, dtype=self.dtype)
                )
                self.register_buffer(
                    f"{name}_inv_std", torch.ones(count, dtype=self.dtype)
                )
        # a buffer, so that the model of a task keeps in its file which task it is
        self.case_embd: Tensor | None
        case = (
            torch.zeros(config.dim_case_embd, dtype=self.dtype)
            if config.dim_case_embd
            else None
        )
        self.register_buffer("case_embd", case)
        # the section holds the same numbers: they are not saved again
        default = (
            None
            if config.default_fparam is None
            else torch.tensor(config.default_fparam, dtype=torch.float64)
        )
        self._default_fparam: Tensor | None
        self.register_buffer("_default_fparam", default, persistent=False)

    def _network(self, config: Any, seed: int) -> Any:
        """Return a network with random parameters."""
        widths = [self.num_inputs, *config.neuron]
        return FittingNetwork(
            widths,
            config.activation_function,
            timestep=config.resnet_dt,
            dtype=self.dtype,
            seed=seed,
            num_out=self.num_out,
        )

    def share_networks(self, other: EnergyFitting, whose: str) -> None:
        """Take the networks of ``other``, and the mean and spread of their inputs.

        ``whose`` names both for messages.

        Raises:
            ConfigError: if they have another number of inputs.
        """
        if other.num_inputs != self.num_inputs:
            raise ConfigError(
                f"{whose} share a fitting network, but their descriptors have {other.num_inputs} "
                f"and {self.num_inputs} numbers (with frame and atom parameters). Share the "
                "descriptor too, or give both one size."
            )
        self.nets = other.nets
        # shared networks need inputs on one scale; biases of elements stay those of each task
        for name in (
            f"{part}_{what}" for part in (FPARAM, APARAM) for what in ("avg", "inv_std")
        ):
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
        """Set mean and inverse spread of the frame and atom parameters that the networks read."""
        for name, values in sums.items():
            if not hasattr(self, f"{name}_avg"):
                continue
            mean, spread = mean_and_spread(values, protect)
            getattr(self, f"{name}_avg").copy_(torch.as_tensor(mean))
            getattr(self, f"{name}_inv_std").copy_(torch.as_tensor(1 / spread))

    def blocks(self) -> list[Block]:
        """Return the networks, each of which is used as a whole, once per batch."""
        return [(net, ("evaluate",)) for net in self.nets]

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energies of the atoms (A,) float64, eV, and their gradient by features (A, D).

        Atoms are in the order of their types unless one network serves all types.
        """
        inputs, shares = self._inputs(features, batch)
        energy, gradient = self._evaluate(inputs, shares)
        if self.from_vacuum:
            energies = list(energy.split(shares))
            # minus the energy of the same atoms without neighbors: their features are zero (the
            # section refuses descriptors where they are not), parameters and case stay. It does not
            # depend on positions, so that the gradient is that of the first term
            for index in self.from_vacuum:
                atom_inputs = inputs.split(shares)[index]
                vacuum = torch.cat(
                    [
                        torch.zeros_like(atom_inputs[:, : self.dim_in]),
                        atom_inputs[:, self.dim_in :],
                    ],
                    1,
                )
                energies[index] = energies[index] - self._values(index, vacuum)
            energy = torch.cat(energies)
        energy = energy.double() + self.bias_atom_e.view(-1)[batch.atom_type]
        return energy, gradient[:, : self.dim_in].to(features.dtype)

    def _inputs(self, features: Tensor, batch: Batch) -> tuple[Tensor, list[int]]:
        """Return the inputs of the networks (A, N), and the number of atoms of each network.

        They are features, frame and atom parameters, and the case of the task.
        """
        parts = [features.to(self.dtype)]
        for name, count, owner in (
            (FPARAM, self.num_fparam, "frame"),
            (APARAM, self.num_aparam, "atom"),
        ):
            if count:
                values = batch.conditions.get(name)
                if (
                    values is None
                    and name == FPARAM
                    and self._default_fparam is not None
                ):
                    values = self._default_fparam.expand(batch.num_frames, -1)
                if values is None:
                    raise DataError(
                        f"this model needs {name}: {count} numbers for each {owner}."
                    )
                # (F, P) of frames or (A, Q) of atoms; those of a frame are repeated for its atoms
                values = (
                    values.to(self.dtype) - getattr(self, f"{name}_avg")
                ) * getattr(self, f"{name}_inv_std")
                parts.append(values[batch.atom_frame] if name == FPARAM else values)
        if self.case_embd is not None and self.case_is_input:
            parts.append(self.case_embd.expand(features.shape[0], -1))
        inputs = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return inputs, [inputs.shape[0]] if self.mixed_types else list(
            batch.type_counts
        )

    def _evaluate(self, inputs: Tensor, shares: list[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs of the networks (A,) and their gradients by the inputs (A, N)."""
        nets = self.nets
        if not self.skips_absent:
            # sharded: each network gathers its parameters when it is called, a collective in which
            # every rank takes part, also one without atoms of the type
            outputs = [
                net.evaluate(net_inputs, self.ops)
                for net, net_inputs in zip(nets, inputs.split(shares), strict=True)
            ]
            energies, gradients = zip(*outputs, strict=True)
            return torch.cat(energies), torch.cat(gradients)
        if not torch.is_grad_enabled():
            # evaluation only: in training, every parameter must have a gradient on every rank, and
            # those of absent types get zeros
            nets = [net for net, count in zip(nets, shares, strict=True) if count]
            shares = [count for count in shares if count]
        return self.ops.values_and_gradients(inputs, nets, shares)

    def _values(self, index: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B,) of a network."""
        values: Tensor = self.nets[index](inputs)
        return values[:, 0]
