"""DPA-4 (SeZM): coefficients of spherical harmonics of atoms, and messages of them between atoms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood, NeighborLayout
from deepmd_ema.families.dpa4.block import Block, FeedForward
from deepmd_ema.families.dpa4.frames import Edges, Radial
from deepmd_ema.families.dpa4.grids import GridOptions
from deepmd_ema.families.dpa4.initial import EnvironmentSeed, Pairs, RadialBasis, RadialNetwork
from deepmd_ema.families.dpa4.layers import ScalarNorm, Source, TypeTable
from deepmd_ema.families.dpa4.rotations import FrameRotations, num_coefficients, quaternions
from deepmd_ema.model.bridging import source_gate
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.nn.layers import freeze, module_list
from deepmd_ema.model.nn.type_embedding import one_hot
from deepmd_ema.model.ops.gather import gather_neighbors
from deepmd_ema.model.ops.reference import with_vjp
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing since Python 3.11

    from deepmd_ema.families.dpa4.section import DPA4Config
    from deepmd_ema.model.interface import Block as ShardedBlock
    from deepmd_ema.model.interface import Sums, Vjp

# A atoms, S neighbor slots, E = A S pairs, T types, D coefficients of an atom, C channels, N radial functions

LATEST_VERSION = 1.2
SMOOTH_VERSION = 1.1  # from here on, few neighbors near the cutoff count as little as they should
FLOOR = 0.25  # added to sums of squared envelopes before they are divided by
FILM_STRENGTH = 0.01


class DPA4Descriptor(nn.Module):
    """Scalars of atoms after messages of spherical harmonics (DPA-4, arXiv:2606.02419).

    The rotation of each pair into its frame is free about the axis of the pair, and results do not depend on it, so it
    need not be random in training.

    Args:
        config: the section ``model.descriptor``.
        num_types: T.
        seed: of the initial parameters when the section has none.
    """

    mixed_types = True
    passes_messages = True
    version_tensor: Tensor

    def __init__(self, config: DPA4Config, num_types: int, seed: int) -> None:
        super().__init__()
        self.section, self.num_types, self.infers_in_bfloat16 = config, num_types, False
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        source = Source(seed_for("dpa4", seed if config.seed is None else config.seed), self.dtype)
        lmax, channels = config.largest_degree + config.extra_node_l, config.channels
        self.type_embedding = TypeTable(num_types, channels, source.part("elements"))
        self.env_seed_embedding: EnvironmentSeed | None = None
        if config.use_env_seed:
            self.env_seed_embedding = EnvironmentSeed(config, num_types, source.part("environment"))
            norms = [ScalarNorm((1, channels), config.eps, source) if config.edge_norm else nn.Identity()
                     for _ in range(2)]  # fmt: skip
            self.film_scale_norm, self.film_shift_norm = norms
            self.film_scale_strength_log = source.filled((1,), math.log(FILM_STRENGTH))
            self.film_shift_strength_log = source.filled((1,), math.log(FILM_STRENGTH))
        self.radial_basis = RadialBasis(config, self.dtype)
        self.radial_embedding = RadialNetwork(config, (lmax + 1) * channels, source.part("radial"))
        self.rotations = FrameRotations(lmax, max(config.orders, default=0), self.dtype)
        # DeePMD-kit's name is blocks, which here is that of a method
        self.layers = module_list(
            Block(config, index, source.part("block", index)) for index in range(len(config.degrees))
        )
        self.readout_pre_layers = module_list(
            self._readout(config, source.part("readout", index)) for index in range(config.readout_layers - 1)
        )
        self.output_ffn = self._readout(config, source.part("output"))
        self.register_buffer("version_tensor", torch.tensor(LATEST_VERSION, dtype=torch.float64))
        self._version_vector = self.version_tensor.view(1)
        freeze(self, config.trainable)

    def _readout(self, config: DPA4Config, source: Source) -> FeedForward:
        lmax = config.readout_degree
        grid: GridOptions | None = None
        if config.so3_readout != "none":
            places = range(num_coefficients(lmax))
            grid = GridOptions(lmax, lmax, min(config.kmax, lmax), places, config.so3_readout)
        return FeedForward(
            lmax, config.channels, config.hidden_width(config.glu_activation), grid, act=config.activation_function,
            gated=config.glu_activation, bias=config.mlp_bias, source=source,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert all tensors."""
        found = super()._apply(fn, recurse)
        # of the same memory; torch.compile traces a model twice that has a scalar on the CPU as an input
        self._version_vector = self.version_tensor.view(1)
        return found

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.section.channels

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return the layout of neighbors: all within the cutoff."""
        section = self.section
        assert section.neighbors is not None
        return NeighborLayout(
            section.rcut, section.neighbors, self.num_types, by_type=False, excluded_pairs=excluded_pairs
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums over data: none are needed."""
        return ()

    def measure(self, batch: Batch) -> Sums:
        """Return no sums."""
        return {}

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Do nothing: no numbers of this descriptor come from data."""

    def stat_settings(self) -> Mapping[str, Any]:
        """Return no settings."""
        return {}

    def blocks(self) -> list[ShardedBlock]:
        """Return none: all networks are used in every step."""
        return []

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, C) and their vector-Jacobian product."""
        return with_vjp(lambda vector: self._features(vector, batch), batch.vector)

    def _features(self, vector: Tensor, batch: Batch) -> Tensor:
        """Return the features of atoms (A, C) from the vectors of pairs (A, S, 3)."""
        neighborhood = batch.within()
        table = self.type_embedding()
        own_type = one_hot(batch.atom_type, self.num_types, self.dtype)
        dropped = self.excluded(batch, neighborhood)
        pairs = Pairs.of(vector.to(self.dtype), self.section, dropped)
        basis = self.radial_basis(pairs)
        is_smooth = self._version_vector > SMOOTH_VERSION - 0.05
        floor = torch.where(is_smooth, FLOOR, self.section.eps).to(self.dtype)
        scale = (pairs.envelope.square().sum(1) + floor).rsqrt()
        hidden, last = self.radial_embedding(basis)
        hidden = hidden * torch.where(is_smooth, pairs.envelope, 1)[..., None]
        last = last.unflatten(-1, (-1, self.section.channels))  # H, L + 1, C
        rotation = self.rotations(quaternions(pairs.direction.flatten(0, 1)))  # E, 2 M + 1, D
        gate = self._gate(pairs, neighborhood)
        scalar = own = own_type @ table
        if self.env_seed_embedding is not None:
            logits = self.env_seed_embedding(pairs, basis, gate, scale, batch)
            scalar = self._conditioned(own, logits)
        x = scalar[None]
        if self.env_seed_embedding is not None and rotation.shape[-1] > 1:
            weighted = (gate * scale[:, None])[..., None] * rotation[:, 0, 1:].unflatten(0, gate.shape)
            # harmonics of the neighbors times radial numbers, which are linear maps of hidden ones
            moments = torch.bmm(weighted.transpose(1, 2), hidden).transpose(0, 1)
            maps = last.transpose(0, 1)
            x = torch.cat([x, *(moments[n**2 - 1 : (n + 1) ** 2 - 1] @ maps[n] for n in range(1, len(maps)))])
        else:
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, rotation.shape[-1] - 1))
        neighbor, reverse = neighborhood.neighbor, neighborhood.reverse
        # where each slot is in `reverse`; the last entry, written by what is none, is thrown away
        place = torch.full((neighbor.numel() + 1,), reverse.numel(), device=reverse.device)
        place = place.index_put((reverse.flatten(),), torch.arange(reverse.numel(), device=reverse.device))
        edges = Edges(
            neighbor=neighbor,
            reverse=reverse,
            place=place[:-1].view(neighbor.shape),
            envelope=pairs.envelope,
            weight=pairs.envelope * gate,
            scale=scale,
            rotation=rotation,
            radial=Radial(
                hidden=hidden.flatten(0, 1),
                last=last,
                table=table,
                own=own_type,
                neighbor=one_hot(batch.neighbor_type, self.num_types, self.dtype),
            ),
        )
        # as in DeePMD-kit, only messages and networks of blocks, and only on GPUs
        wants = self.section.use_amp if self.training else self.infers_in_bfloat16
        is_mixed = wants and x.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if is_mixed else nullcontext():
            for layer, size in zip(self.layers, self._sizes()):
                x = layer(x[:size], edges)
        x = x.to(self.dtype)
        x = x[: num_coefficients(self.section.readout_degree)]
        for network in (*self.readout_pre_layers, self.output_ffn):
            x = x + network(x)
        return x[0]

    def _gate(self, pairs: Pairs, neighborhood: Neighborhood) -> Tensor:
        """Return the factors (A, S) of all that neighbors send, which are 1 without bridging."""
        window = self.section.window
        if window is None:
            return torch.ones_like(pairs.distance)
        is_near = pairs.distance < self.section.rcut
        if pairs.is_seen is not None:
            is_near = is_near & pairs.is_seen
        of_atoms = source_gate(pairs.distance, is_near, window)
        return gather_neighbors(of_atoms[:, None], neighborhood.neighbor, neighborhood.reverse).squeeze(-1)

    def _sizes(self) -> list[int]:
        """Return the numbers of coefficients of an atom in each block."""
        return [num_coefficients(lmax + self.section.extra_node_l) for lmax in self.section.degrees]

    def _conditioned(self, own: Tensor, logits: Tensor) -> Tensor:
        """Return the embeddings of atoms (A, C), scaled and shifted by their surroundings (A, 2 C)."""
        scale, shift = logits.chunk(2, -1)
        factor = self.film_scale_strength_log.exp() * torch.tanh(self.film_scale_norm(scale))
        return own * (1 + factor) + self.film_shift_strength_log.exp() * torch.tanh(self.film_shift_norm(shift))
