"""DPA-4 (SeZM): messages of coefficients of spherical harmonics between atoms."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.model.bridging import source_gate
from deepmd_ema.model.descriptor.env_statistics import EnvironmentDescriptor
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.families.dpa4.convolution import Block, FeedForward
from deepmd_ema.model.families.dpa4.frames import Edges, Radial
from deepmd_ema.model.families.dpa4.grids import GridOptions
from deepmd_ema.model.families.dpa4.layers import (
    Dense,
    DistanceFunctions,
    ScalarNorm,
    Source,
    TypeTable,
)
from deepmd_ema.model.families.dpa4.rotations import (
    FrameRotations,
    num_coefficients,
    quaternions,
)
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import freeze, module_list
from deepmd_ema.model.nn.type_embedding import one_hot, pick
from deepmd_ema.model.ops.gather import gather_neighbors
from deepmd_ema.model.ops.reference import axis_features, with_vjp
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing since Python 3.11

    from deepmd_ema.model.families.dpa4.section import DPA4Config
    from deepmd_ema.model.interface import Vjp

# A atoms, S neighbor slots, N radial functions, C channels

RADIAL_NORM_EPS = 1e-7  # added to mean squares of hidden numbers of the distance


def cutoff_envelope(distance: Tensor, rcut: float, exponent: int) -> Tensor:
    """Return ``(1 - x)^4 sum_(k < p) binom(k + 3, 3) x^k``, x = r / rcut, 0 from the cutoff on.

    It is 1 at 0 with p - 1 derivatives of 0, and has three derivatives of 0 at the cutoff.
    """
    # x is not beyond 1, so that powers of it stay small in empty slots, which are far away
    u = (1 - distance / rcut).clamp(0, 1)
    x = 1 - u
    # Horner scheme, from the highest power down
    series = torch.full_like(x, math.comb(exponent + 2, 3))
    for k in range(exponent - 2, -1, -1):
        series = math.comb(k + 3, 3) + x * series
    return u.square().square() * series


@dataclass(frozen=True)
class Pairs:
    """Pairs of atoms in the precision of the descriptor.

    Attributes:
        distance: (A, S) angstrom.
        direction: (A, S, 3) unit vectors.
        envelope: (A, S) of edges; 0 where there is no neighbor.
        is_seen: (A, S) bool, False of pairs that are excluded; None where none is.
    """

    distance: Tensor
    direction: Tensor
    envelope: Tensor
    is_seen: Tensor | None

    @classmethod
    def of(cls, vector: Tensor, config: DPA4Config, dropped: Tensor | None) -> Pairs:
        """Return the pairs of vectors (A, S, 3) without those ``dropped`` (A, S)."""
        # the root has a derivative at 0, too
        distance = (vector.square().sum(-1) + config.eps**2).sqrt()
        envelope = cutoff_envelope(distance, config.rcut, config.env_exp[1])
        if dropped is not None:
            envelope = envelope.masked_fill(dropped, 0)
        return cls(
            distance,
            vector / distance[..., None],
            envelope,
            None if dropped is None else ~dropped,
        )


class RadialBasis(DistanceFunctions):
    """Functions of the distance times an envelope, which are 0 at the cutoff.

    Args:
        config: the section ``model.descriptor``.
        dtype: precision of the parameters.
    """

    def __init__(self, config: DPA4Config, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.rcut = config.rcut
        self.exponent = config.env_exp[0]

    def forward(self, pairs: Pairs) -> Tensor:
        """Return (A, S, N)."""
        distance = pairs.distance[..., None]
        basis = self.functions(distance)
        envelope = cutoff_envelope(distance, self.rcut, self.exponent)
        if pairs.is_seen is not None:
            envelope = envelope * pairs.is_seen[..., None]
        return basis * envelope


class Activated(nn.Module):
    """An activation function as a module.

    Args:
        name: as in the input.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activation = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return y, of the shape of x."""
        return self.activation.value(x)


class RadialNetwork(nn.Module):
    """Dense layers without biases: numbers that vanish at the cutoff stay so.

    Args:
        config: the section ``model.descriptor``.
        num_out: outputs.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, num_out: int, source: Source) -> None:
        super().__init__()
        hidden = [width or config.channels for width in config.radial_mlp]
        modules: list[nn.Module] = []
        # one list of modules, so that parameters have the names that they have in DeePMD-kit
        for index, (num_in, width) in enumerate(pairwise([config.n_radial, *hidden])):
            modules.append(Dense(num_in, width, source.part(index)))
            if config.edge_norm:
                modules.append(ScalarNorm((width,), RADIAL_NORM_EPS, source))
            modules.append(Activated(config.activation_function))
        modules.append(
            Dense([config.n_radial, *hidden][-1], num_out, source.part("last"))
        )
        self.net = module_list(modules)

    def forward(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden numbers (..., H) from (..., N), and the map after them (H, O)."""
        # callers fold the last map into others, so that the numbers of all degrees are not computed
        *hidden, last = self.net
        for module in hidden:
            basis = module(basis)
        return basis, cast("Dense", last).matrix


class EnvironmentSeed(nn.Module):
    """Scale and shift of the embedding of an atom by its surroundings.

    They follow from products of moments, as features of DeepPot-SE do.

    Args:
        config: the section ``model.descriptor``.
        num_types: number of elements.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, num_types: int, source: Source) -> None:
        super().__init__()
        channels = config.channels
        act = config.activation_function
        bias = config.mlp_bias
        width = min(channels, 128)
        # widths by the rules of DeePMD-kit, for which there are no options
        type_width = min(32, max(8, channels // 4))
        self.axis = min(4 if width < 64 else 8, max(1, width - 1))
        radial_width = max(32, width - 2 * type_width)
        hidden = min(256, max(2 * width, radial_width + 2 * type_width))
        self.rbf_proj_layer1 = Dense(
            config.n_radial, radial_width, source.part("radial", 1), act, bias
        )
        self.rbf_proj_layer2 = Dense(
            radial_width, radial_width, source.part("radial", 2), bias=bias
        )
        self.env_type_embed = TypeTable(num_types, type_width, source.part("elements"))
        self.g_layer1 = Dense(
            radial_width + 2 * type_width, hidden, source.part("pairs", 1), act, bias
        )
        self.g_layer2 = Dense(hidden, width, source.part("pairs", 2), bias=bias)
        self.output_proj = Dense(
            width * self.axis, 2 * channels, source.part("out"), zero=True
        )

    def forward(
        self, pairs: Pairs, basis: Tensor, gate: Tensor, scale: Tensor, batch: Batch
    ) -> Tensor:
        """Return (A, 2 C).

        Args:
            pairs: of atoms.
            basis: (A, S, N) radial functions.
            gate: (A, S) factors of neighbors.
            scale: (A,) factor of sums over neighbors.
            batch: for the elements.
        """
        strength = (pairs.envelope * gate / pairs.distance * scale[:, None])[..., None]
        rows = torch.cat([strength, strength * pairs.direction], -1).transpose(
            1, 2
        )  # (A, 4, S)
        table = self.env_type_embed()
        neighbor = pick(table, batch.neighbor_type)
        centre = pick(table, batch.atom_type)[:, None].expand_as(neighbor)
        radial = self.rbf_proj_layer2(self.rbf_proj_layer1(basis))
        embedded = self.g_layer2(
            self.g_layer1(torch.cat([radial, neighbor, centre], -1))
        )
        moments = torch.bmm(rows, embedded)  # (A, 4, width)
        out: Tensor = self.output_proj(axis_features(moments, self.axis))
        return out


# A atoms, S neighbor slots, E = A S pairs, T types, D coefficients of an atom, C channels, N radial
# functions

# versions of the formulas, which files of DeePMD-kit carry
LATEST_VERSION = 1.2
SMOOTH_VERSION = (
    1.1  # from here on, few neighbors near the cutoff count as little as they should
)
FLOOR = 0.25  # added to sums of squared envelopes before they are divided by
FILM_STRENGTH = 0.01  # first factor of scales and shifts by the surroundings


class DPA4Descriptor(EnvironmentDescriptor):
    """Scalars of atoms after messages of spherical harmonics (DPA-4, arXiv:2606.02419).

    The rotation of each pair into its frame is free about the axis of the pair, and results do not
    depend on it, so it need not be random in training.

    Args:
        config: the section ``model.descriptor``.
        num_types: T.
        seed: of the initial parameters when the section has none.

    Attributes:
        infers_in_bfloat16: whether blocks are computed in bfloat16 on GPUs in evaluation;
            ``use_amp`` is for training.
    """

    mixed_types = True
    passes_messages = True

    def __init__(self, config: DPA4Config, num_types: int, seed: int) -> None:
        super().__init__()
        self.section = config
        self.num_types = num_types
        self.infers_in_bfloat16 = False
        self.dim_out = config.channels
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        source = Source(
            seed_for("dpa4", seed if config.seed is None else config.seed), self.dtype
        )
        lmax, channels = config.largest_degree + config.extra_node_l, config.channels
        self.type_embedding = TypeTable(num_types, channels, source.part("elements"))
        self.env_seed_embedding: EnvironmentSeed | None = None
        if config.use_env_seed:
            self.env_seed_embedding = EnvironmentSeed(
                config, num_types, source.part("environment")
            )
            norms = [
                ScalarNorm((1, channels), config.eps, source)
                if config.edge_norm
                else nn.Identity()
                for _ in range(2)
            ]
            self.film_scale_norm, self.film_shift_norm = norms
            self.film_scale_strength_log = source.filled((1,), math.log(FILM_STRENGTH))
            self.film_shift_strength_log = source.filled((1,), math.log(FILM_STRENGTH))
        self.radial_basis = RadialBasis(config, self.dtype)
        self.radial_embedding = RadialNetwork(
            config, (lmax + 1) * channels, source.part("radial")
        )
        self.rotations = FrameRotations(lmax, max(config.orders, default=0), self.dtype)
        # they are called blocks in DeePMD-kit, which is the name of a method here
        self.layers = module_list(
            Block(config, index, source.part("block", index))
            for index in range(len(config.degrees))
        )
        self.readout_pre_layers = module_list(
            self._readout(config, source.part("readout", index))
            for index in range(config.readout_layers - 1)
        )
        self.output_ffn = self._readout(config, source.part("output"))
        # a buffer, so that a model of an older version keeps its formulas in checkpoints
        self.version_tensor = nn.Buffer(
            torch.tensor(LATEST_VERSION, dtype=torch.float64)
        )
        self._version_vector = self.version_tensor.view(1)
        freeze(self, config.trainable)

    def _readout(self, config: DPA4Config, source: Source) -> FeedForward:
        lmax = config.readout_degree
        grid: GridOptions | None = None
        if config.so3_readout != "none":
            places = range(num_coefficients(lmax))
            grid = GridOptions(
                lmax, lmax, min(config.kmax, lmax), places, config.so3_readout
            )
        return FeedForward(
            config, lmax, config.hidden_width(config.glu_activation), grid, source
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert all tensors."""
        module = super()._apply(fn, recurse)
        # a view of one dimension, made again because the buffer has moved: torch.compile traces a
        # model twice that has a scalar on the CPU as an input
        self._version_vector = self.version_tensor.view(1)
        return module

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, C) and their vector-Jacobian product."""
        return with_vjp(lambda vector: self._features(vector, batch), batch.vector)

    def _features(self, vector: Tensor, batch: Batch) -> Tensor:
        """Return the features of atoms (A, C) from the vectors of pairs (A, S, 3)."""
        neighborhood = batch.within()
        table = self.type_embedding()
        atom_type = one_hot(batch.atom_type, self.num_types, self.dtype)
        dropped = self.excluded(batch, neighborhood)
        pairs = Pairs.of(vector.to(self.dtype), self.section, dropped)
        basis = self.radial_basis(pairs)
        # older versions have a floor of almost 0 and no envelope of radial numbers: sums over few
        # neighbors are divided by their own size, and bend just inside the cutoff. Versions are
        # compared on the device, because a step must not wait for it
        is_smooth = self._version_vector > SMOOTH_VERSION - 0.05
        floor = torch.where(is_smooth, FLOOR, self.section.eps).to(self.dtype)
        scale = (pairs.envelope.square().sum(1) + floor).rsqrt()
        hidden, last = self.radial_embedding(basis)
        hidden = hidden * torch.where(is_smooth, pairs.envelope, 1)[..., None]
        last = last.unflatten(-1, (-1, self.section.channels))  # (H, L + 1, C)
        rotation = self.rotations(
            quaternions(pairs.direction.flatten(0, 1))
        )  # (E, 2 M + 1, D)
        gate = self._gate(pairs, neighborhood)
        scalar = embedding = atom_type @ table  # (A, C)
        if self.env_seed_embedding is not None:
            logits = self.env_seed_embedding(pairs, basis, gate, scale, batch)
            # FiLM (Perez et al., arXiv:1709.07871): embeddings are scaled and shifted
            by_scale, by_shift = logits.chunk(2, -1)
            factor = self.film_scale_strength_log.exp() * torch.tanh(
                self.film_scale_norm(by_scale)
            )
            scalar = embedding * (1 + factor)
            scalar = scalar + self.film_shift_strength_log.exp() * torch.tanh(
                self.film_shift_norm(by_shift)
            )
        x = scalar[
            None
        ]  # (1, A, C), to which coefficients of higher degrees are joined
        if self.env_seed_embedding is not None and rotation.shape[-1] > 1:
            # the row of order 0 of a rotation has the harmonics of the direction of the pair
            harmonics = rotation[:, 0, 1:].unflatten(0, gate.shape)  # (A, S, D - 1)
            weighted = (gate * scale[:, None])[..., None] * harmonics
            # sums of harmonics times radial numbers, which are linear maps of hidden numbers: the
            # maps are applied to the sums (D - 1, A, H), not to every pair
            moments = torch.bmm(weighted.transpose(1, 2), hidden).transpose(0, 1)
            maps = last.transpose(0, 1)
            higher = [
                moments[n**2 - 1 : (n + 1) ** 2 - 1] @ maps[n]
                for n in range(1, len(maps))
            ]
            x = torch.cat([x, *higher])
        else:
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, rotation.shape[-1] - 1))
        neighbor, reverse = neighborhood.neighbor, neighborhood.reverse
        # the place of each slot in `reverse`; entries of `reverse` that are none write to the last
        # element, which is thrown away
        place = torch.full(
            (neighbor.numel() + 1,), reverse.numel(), device=reverse.device
        )
        place = place.index_put(
            (reverse.flatten(),), torch.arange(reverse.numel(), device=reverse.device)
        )
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
                atom_type=atom_type,
                neighbor_type=one_hot(batch.neighbor_type, self.num_types, self.dtype),
            ),
        )
        # as in DeePMD-kit, only messages and networks of blocks are in bfloat16, and only on GPUs
        wants = self.section.use_amp if self.training else self.infers_in_bfloat16
        is_mixed = wants and x.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if is_mixed else nullcontext():
            for layer, lmax in zip(self.layers, self.section.degrees):
                # degrees may fall from block to block: the highest coefficients are dropped
                x = layer(
                    x[: num_coefficients(lmax + self.section.extra_node_l)], edges
                )
        x = x.to(self.dtype)
        # features are invariant: coefficients of degree 0, after networks that may read higher ones
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
        # an atom with a neighbor that is too near sends nothing (see deepmd_ema.model.bridging)
        atom_gates = source_gate(pairs.distance, is_near, window)
        return gather_neighbors(
            atom_gates[:, None], neighborhood.neighbor, neighborhood.reverse
        ).squeeze(-1)
