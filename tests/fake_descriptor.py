"""A descriptor that is not the house's: two layers of messages, with options that se_e2_a does not have.

It has neither ``sel`` nor ``neuron``, and no tree in ``interchange``: what it needs beside its section and its module
would be a fact about se_e2_a in a wrong room.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from parallel_runs import train_here
from torch import nn

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.config.fields import option, positive, positive_int
from deepmd_ema.config.schema.descriptor import DESCRIPTORS as SECTIONS
from deepmd_ema.model.build import DESCRIPTORS
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """Messages of neighbors, twice."""

    type: ClassVar[str] = "fake"
    aliases: ClassVar[tuple[str, ...]] = ("make_believe",)
    neighbors_option: ClassVar[str] = "most"
    has_type_embedding: ClassVar[bool] = False

    rcut: float = option(4.0, unit="angstrom", check=positive, doc="Cutoff radius.")
    width: int = option(8, check=positive_int, doc="Features of an atom.")
    most: int | None = option(None, check=positive_int, doc="Most neighbors; null counts them in the data.")
    precision: str = option("default", choices=("default", "float64", "float32"), doc="Precision of the parameters.")

    @property
    def cutoff(self):
        return self.rcut

    @property
    def neighbors(self):
        return None if self.most is None else (self.most,)

    def with_neighbors(self, found):
        return self if self.most is not None else replace(self, most=found.max_total + 2)

    def with_neighbors_of(self, saved):
        return replace(self, most=saved.most) if isinstance(saved, FakeConfig) and self.most is None else self

    def problems(self, type_map):
        if self.width < len(type_map):
            yield "width", f" = {self.width}: expected at least {len(type_map)}, one for each element."

    def summary(self):
        return f"fake, rcut {self.rcut:g} angstrom, most {self.most or 'auto'}, width {self.width}"

    numbers_per_pair = 20
    vacuum_needs = ""


class FakeDescriptor(nn.Module):
    """Features of an atom from those of its neighbors, which come from those of their neighbors."""

    mixed_types = True
    passes_messages = True

    def __init__(self, config, num_types, seed):
        super().__init__()
        self.rcut, self.most, self.dim_out, self.num_types = config.rcut, config.most, config.width, num_types
        self.dtype = precision(config.precision)
        generator = torch.Generator().manual_seed(seed_for("fake", seed))

        def parameter(*shape):
            values = torch.randn(shape, dtype=torch.float64, generator=generator) / shape[0] ** 0.5
            return nn.Parameter(values.to(self.dtype))

        self.element = parameter(num_types, self.dim_out)
        self.edge = parameter(2, self.dim_out)
        self.updates = nn.ParameterList(parameter(2 * self.dim_out, self.dim_out) for _ in range(2))
        self.register_buffer("share", torch.ones((), dtype=self.dtype))

    sum_names = ("neighbors",)

    def layout(self, excluded_pairs):
        return NeighborLayout(self.rcut, (self.most,), self.num_types, by_type=False, excluded_pairs=excluded_pairs)

    def features(self, vector, batch):
        distance = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        u = (distance / self.rcut).clamp(0, 1)
        switch = u**3 * (-6 * u * u + 15 * u - 10) + 1
        edge = torch.tanh(torch.cat([1 / distance, distance], -1).to(self.dtype) @ self.edge) * switch.to(self.dtype)
        node = self.element[batch.atom_type]
        for update in self.updates:
            message = (edge * node[batch.neighbor]).sum(1) * self.share
            node = node + torch.tanh(torch.cat([node, message], -1) @ update)
        return node

    def forward(self, batch):
        features, vjp = torch.func.vjp(lambda vector: self.features(vector, batch), batch.vector)
        return features, lambda grad_features: vjp(grad_features)[0]

    def measure(self, batch):
        close = torch.linalg.vector_norm(batch.vector, dim=-1) < self.rcut
        return {"neighbors": np.array([len(close), float(close.sum())])}

    def apply_statistics(self, sums):
        atoms, neighbors = sums["neighbors"]
        self.share.fill_(atoms / max(1.0, neighbors))

    def stat_settings(self):
        return {"most": self.most}

    def blocks(self):
        return []


def register(put=dict.__setitem__):
    """Make ``fake`` a type of ``model.descriptor``; ``put(table, name, value)`` may undo it later."""
    put(SECTIONS, "fake", FakeConfig)
    put(DESCRIPTORS, "fake", FakeDescriptor)


def train_fake_here(folder, how):
    """Train on the fake descriptor as one rank of several."""
    register()
    return train_here(folder, how)
