"""The energy model: descriptor, fitting and bias give energies, forces and virials of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, both_orders
from deepmd_ema.config.labels import ATOM_ENERGY, ENERGY, FORCE, HESSIAN, VIRIAL
from deepmd_ema.model.hessian import hessian
from deepmd_ema.model.interface import Fitting, NetworkEnergies
from deepmd_ema.model.ops.gather import sum_over_reverse
from deepmd_ema.model.ops.operations import (
    OF_DEVICE,
    REFERENCE,
    use_operations,
    with_operations,
)

if TYPE_CHECKING:
    from typing_extensions import Self  # part of typing since Python 3.11

    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.interface import Descriptor, ShortRange
    from deepmd_ema.model.statistics import Statistics

# F frames, A atoms, K neighbor slots, T types, D features, M reverse slots

# numbers of a matrix of frames and atoms, which is the fastest way for few of both
MAX_MEMBERSHIP = 1 << 18
VALUES_PER_ATOM = 10  # numbers of a virial and an index, which are summed


class EnergyModel(nn.Module):
    """Energies that add up over atoms, with forces and virials that are their exact derivatives.

    The gradient is part of the forward pass: descriptor and fitting return it as an ordinary
    function of the parameters, so a loss of forces needs one backward pass. Where ``batch.vector``
    requires a gradient, the outputs can be differentiated with respect to it as well, which takes
    longer.

    Args:
        config: the section ``model``.
        descriptor: features of each atom and their vector-Jacobian product.
        fitting: energy of each atom and its gradient.
        short_range: pair energies that act at short distances, or None.

    Attributes:
        type_map: names of the elements.
        labels: names of what is predicted, as far as data have it as labels.
        excluded_types: types whose atoms have no energy of their own.
        layout: how ``batch`` must hold the neighbors.
        min_nbor_dist: shortest distance in the training data, angstrom, or None when it is not
            known.
        has_tables: whether embedding nets are read from tables, where no gradients by parameters
            are wanted.
        out_bias: (1, T, W) float64 buffer, energy added for each atom of a type, eV; W is 1.
        out_std: (1, T, W) float64 buffer, spread of the residual of the bias; kept for DeePMD-kit,
            not used.
    """

    def __init__(
        self,
        config: ModelConfig,
        descriptor: Descriptor,
        fitting: Fitting,
        short_range: ShortRange | None,
    ) -> None:
        super().__init__()
        self.descriptor: Descriptor = descriptor
        self.fitting = fitting
        self.short_range = short_range
        self.type_map = list(config.type_map)
        self.excluded_types = config.excluded_types
        self.labels = config.fitting_net.labels
        self.layout = descriptor.layout(both_orders(config.pair_exclude_types))
        self.min_nbor_dist: float | None = None
        self.has_tables = False
        # an energy is one number for an atom; fittings of other quantities have a width
        width = getattr(fitting, "width", 1)
        self.out_bias = nn.Buffer(
            torch.zeros(1, len(self.type_map), width, dtype=torch.float64)
        )
        # (T,) 1, and 0 for types whose atoms have no energy of their own
        counted = torch.tensor(
            [t not in self.excluded_types for t in range(len(self.type_map))],
            dtype=torch.float64,
        )
        self._counted = nn.Buffer(counted, persistent=False)
        self.out_std = nn.Buffer(torch.ones_like(self.out_bias))
        use_operations(self, OF_DEVICE.get(self.out_bias.device.type, REFERENCE))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert all tensors, and take the operations for their device."""
        # `to`, `cuda` and `double` of a module all come here
        moved = super()._apply(fn, recurse)
        use_operations(self, OF_DEVICE.get(self.out_bias.device.type, REFERENCE))
        return moved

    def forward(
        self,
        batch: Batch,
        create_graph: bool | None = None,
        need_virial: bool = True,
        need_hessian: bool = False,
    ) -> dict[str, Tensor]:
        """Return energies (F,), atomic energies (A,), forces (A, 3) and virials (F, 9), float64.

        Args:
            batch: frames with neighbors in ``layout``, on the device of the model.
            create_graph: whether the outputs can be differentiated with respect to the parameters,
                and to the vectors if they require a gradient; by default in training mode only.
            need_virial: whether virials are computed.
            need_hessian: whether the Hessians are computed as well, those of the frames one after
                the other, each ((3 N)^2,) with the atoms as in the files; by a backward pass per
                coordinate of the largest frame.
        """
        graph = self.training if create_graph is None else create_graph
        # the gradients of other operations can be differentiated by the parameters alone
        is_twice_by_vectors = need_hessian or (graph and batch.vector.requires_grad)
        model = with_operations(self, REFERENCE) if is_twice_by_vectors else self
        if not need_hessian:
            with torch.set_grad_enabled(graph):
                return outputs_of(*model.energy_and_gradient(batch), batch, need_virial)
        # the second derivative needs a graph by vectors, whatever the caller wants
        with torch.enable_grad():
            moved = replace(batch, vector=batch.vector.detach().requires_grad_())
            atom_energy, pair = model.energy_and_gradient(moved)
            out = outputs_of(atom_energy, pair, moved, need_virial)
            out[HESSIAN] = hessian(pair, moved, graph)
        return out if graph else {name: value.detach() for name, value in out.items()}

    def energy_and_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return energies of atoms (A,), eV, and the gradient of their sum by vectors (A, K, 3).

        It has the unit eV/angstrom. The bias is added here and has no gradient.
        """
        if self.short_range is not None:
            atom_energy, pair = self.short_range(batch, self._network, self._counted)
        else:
            energies = self._network(batch)
            atom_energy = energies.atom_energy
            pair = energies.vjp(energies.grad_features)
        return atom_energy + (self.out_bias.view(-1) * self._counted)[
            batch.atom_type
        ], pair

    def _network(self, batch: Batch) -> NetworkEnergies:
        """Return the energies of the networks and what their gradient follows from."""
        features, vjp = self.descriptor(batch)
        atom_energy, grad_features = self.fitting(features, batch)
        if self.excluded_types:
            counted = self._counted[batch.atom_type]  # (A,)
            atom_energy = atom_energy * counted
            grad_features = grad_features * counted[:, None].to(grad_features)
        return NetworkEnergies(atom_energy, grad_features, vjp)

    def evaluate_all_blocks(self) -> None:
        """Evaluate all blocks from now on, whatever elements a batch has.

        Needed where they are sharded: to gather a block is a collective.
        """
        for part in self.modules():
            if isinstance(part, Fitting):
                part.skips_absent = False

    def apply_statistics(self, statistics: Statistics) -> None:
        """Write means, spreads and biases into the buffers."""
        self.descriptor.apply_statistics(statistics.measured)
        self.fitting.apply_statistics(statistics.conditions, statistics.protect)
        self.out_bias.copy_(torch.as_tensor(statistics.fit.bias).view_as(self.out_bias))
        self.out_std.copy_(torch.as_tensor(statistics.fit.std).view_as(self.out_std))


def run(
    model: EnergyModel, batch: Batch, need_virial: bool = True
) -> dict[str, Tensor]:
    """Return ``model(batch)``: what ``torch.compile(run, dynamic=True)`` compiles.

    A function of the module, not a method of one: models of one structure then share their graphs,
    because parameters and buffers are inputs of a graph. The number of graphs is that of kinds of
    sizes (doc/decisions.md).
    """
    return model(batch, need_virial=need_virial)


def outputs_of(
    atom_energy: Tensor, pair: Tensor, batch: Batch, need_virial: bool
) -> dict[str, Tensor]:
    """Return energies, forces and virials from atomic energies (A,) and the gradient (A, K, 3).

    ``F_i = sum_j g_ij - sum_j g_ji`` and ``W = -sum_ij r_ij (x) g_ij`` for the gradient g by the
    vectors r (doc/decisions.md).
    """
    sum_of_frames = frame_sums(batch)
    out = {
        ENERGY: sum_of_frames(atom_energy),
        ATOM_ENERGY: atom_energy,
        FORCE: pair.sum(1)
        - sum_over_reverse(pair, batch.neighbor, batch.reverse),  # (A, 3)
    }
    if need_virial:
        # (A, 3, K) x (A, K, 3): one product for each atom makes no matrix of pairs (A, K, 9)
        per_atom = torch.bmm(pair.transpose(1, 2), batch.vector).flatten(1)  # (A, 9)
        out[VIRIAL] = -sum_of_frames(per_atom)
    return out


def frame_sums(batch: Batch) -> Callable[[Tensor], Tensor]:
    """Return a function from (A, ...) float64 of atoms to sums over the frames (F, ...).

    Each sum has a fixed order on every device.
    """
    num_frames = batch.num_frames
    num_atoms = batch.atom_frame.shape[0]
    frame = batch.atom_frame
    frames = torch.arange(num_frames, device=frame.device)
    # a graph takes the matrix always: whether it is small would otherwise be part of the graph
    is_small = (
        torch.compiler.is_compiling()
        or not batch.sizes
        or num_frames * num_atoms <= MAX_MEMBERSHIP
    )
    # the table of atoms by frame would be larger than the matrix if frames differ much in size
    if is_small or VALUES_PER_ATOM * max(batch.sizes) > num_atoms:
        member_of = (frames[:, None] == frame).double()  # (F, A)
        return member_of.matmul
    # (F, most atoms of a frame), as `reverse` of neighbors: the rows of its atoms, A where none is
    rows = frames.new_full((num_frames, max(batch.sizes)), num_atoms)
    atoms = torch.arange(num_atoms, device=frame.device)
    rows = rows.index_put((frame, batch.place_in_frame), atoms)

    def sum_of_frames(per_atom: Tensor) -> Tensor:
        flat = sum_over_reverse(per_atom.view(num_atoms, 1, -1), frame[:, None], rows)
        return flat.view(num_frames, *per_atom.shape[1:])

    return sum_of_frames
