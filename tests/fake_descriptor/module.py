"""The descriptor fake."""

import numpy as np
import torch
from torch import nn

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.model.bridging import source_gate
from deepmd_ema.utils import seed_for


class FakeDescriptor(nn.Module):
    """Features of an atom from those of its neighbors, which come from those of their neighbors."""

    mixed_types = True
    passes_messages = True

    def __init__(self, config, num_types, seed):
        super().__init__()
        self.rcut, self.most, self.dim_out, self.num_types = (
            config.rcut,
            config.most,
            config.width,
            num_types,
        )
        self.dtype, self.window = precision(config.precision), config.window
        generator = torch.Generator().manual_seed(seed_for("fake", seed))

        def parameter(*shape):
            values = (
                torch.randn(shape, dtype=torch.float64, generator=generator)
                / shape[0] ** 0.5
            )
            return nn.Parameter(values.to(self.dtype))

        self.element = parameter(num_types, self.dim_out)
        self.edge = parameter(2, self.dim_out)
        self.updates = nn.ParameterList(
            parameter(2 * self.dim_out, self.dim_out) for _ in range(2)
        )
        self.register_buffer("share", torch.ones((), dtype=self.dtype))

    sum_names = ("neighbors",)

    def layout(self, excluded_pairs):
        return NeighborLayout(
            self.rcut,
            (self.most,),
            self.num_types,
            by_type=False,
            excluded_pairs=excluded_pairs,
        )

    def features(self, vector, batch):
        distance = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        u = (distance / self.rcut).clamp(0, 1)
        switch = u**3 * (-6 * u * u + 15 * u - 10) + 1
        edge = torch.tanh(
            torch.cat([1 / distance, distance], -1).to(self.dtype) @ self.edge
        ) * switch.to(self.dtype)
        if self.window is not None:
            gate = source_gate(
                distance.squeeze(-1), distance.squeeze(-1) < self.rcut, self.window
            )
            edge = edge * gate[batch.neighbor].unsqueeze(-1).to(self.dtype)
        node = self.element[batch.atom_type]
        for update in self.updates:
            message = (edge * node[batch.neighbor]).sum(1) * self.share
            node = node + torch.tanh(torch.cat([node, message], -1) @ update)
        return node

    def forward(self, batch):
        features, vjp = torch.func.vjp(
            lambda vector: self.features(vector, batch), batch.vector
        )
        return features, lambda grad_features: vjp(grad_features)[0]

    def measure(self, batch):
        close = torch.linalg.vector_norm(batch.vector, dim=-1) < self.rcut
        return {"neighbors": np.array([len(close), float(close.sum())])}

    def apply_statistics(self, sums):
        atoms, neighbors = sums["neighbors"]
        self.share.fill_(atoms / max(1.0, neighbors))
