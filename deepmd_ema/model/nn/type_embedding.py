"""A vector for each element, which networks that serve all elements take as an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.config.elements import NUM_STATES, occupied_states
from deepmd_ema.model.nn.layers import Network, freeze

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import TypeEmbeddedOptions


class TypeEmbedding(nn.Module):
    """One dense layer of the one-hot vector of an element.

    DPA-1, Zhang et al., arXiv:2208.08236, eq. 7.

    With ``use_econf_tebd`` it is a layer of the occupied one-electron states of the element, 1 or
    -1 over the root of their number. Elements then have names: ``name_elements`` must be called.

    Args:
        options: of the section ``model.descriptor``.
        num_types: T.
        width: numbers of an embedding.
        dtype: precision of the parameters.
        seed: of the initial parameters.

    Attributes:
        electrons: whether elements are distinguished by electronic configurations.
    """

    def __init__(
        self,
        options: TypeEmbeddedOptions,
        num_types: int,
        width: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.electrons = options.use_econf_tebd
        bias = options.use_tebd_bias
        # (T, inputs) of each element; electronic states are set by `name_elements`
        rows = (
            torch.zeros(num_types, NUM_STATES, dtype=dtype)
            if self.electrons
            else torch.eye(num_types, dtype=dtype)
        )
        self._rows = nn.Buffer(rows, persistent=False)
        self.net = Network(
            [rows.shape[1], width],
            "linear",
            timestep=False,
            dtype=dtype,
            seed=seed,
            bias=bias,
        )
        freeze(self.net, options.trainable)

    def forward(self) -> Tensor:
        """Return the embeddings of all elements (T, width)."""
        return self.net(self._rows)

    def name_elements(self, type_map: Sequence[str]) -> None:
        """Say which elements these are, symbols of the periodic table where ``electrons``."""
        if self.electrons:
            # 1 for an occupied state, -1 for an empty one, over the root of their number
            states = torch.tensor(
                [occupied_states(symbol) for symbol in type_map], dtype=torch.float64
            )
            self._rows.copy_((2 * states - 1) * NUM_STATES**-0.5)


def pick(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]`` (..., C) by a product.

    Its derivative adds in a fixed order, on any device.

    A ``table`` (..., T, C) of more dimensions is picked from with an ``index`` (..., K).
    """
    return one_hot(index, table.shape[-2], table.dtype) @ table  # (..., T) x (T, C)


def one_hot(index: Tensor, num_types: int, dtype: torch.dtype) -> Tensor:
    """Return (..., T), 1 in the column of each element."""
    return (index[..., None] == torch.arange(num_types, device=index.device)).to(dtype)
