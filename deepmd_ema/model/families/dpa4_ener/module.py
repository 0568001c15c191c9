"""The network of gated layers from the descriptor of an atom to its energy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.layers import SMALL, Dense, Source
from deepmd_ema.model.families.ener.module import EnergyFitting
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import module_list
from deepmd_ema.model.ops.reference import with_vjp

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4_ener.section import DPA4EnerConfig

# B atoms, N inputs, D of them features, Q cases, M numbers of a layer


class DPA4Fitting(EnergyFitting):
    """Atomic energies by gated layers; otherwise as `EnergyFitting`."""

    def _network(self, config: DPA4EnerConfig, seed: int) -> GatedNetwork:
        return GatedNetwork(
            config, self.num_inputs, self.dim_in, Source(seed, self.dtype)
        )

    def _evaluate(self, inputs: Tensor, shares: list[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs of the networks (A,) and their gradients by the inputs (A, N)."""
        parts = [inputs] if len(self.nets) == 1 else inputs.split(shares)
        # the batched call of the base class, `ops.values_and_gradients`, serves plain layers only
        outputs = [
            net.evaluate(net_inputs, self.case_embd)
            for net, net_inputs in zip(self.nets, parts, strict=True)
        ]
        energies, gradients = zip(*outputs, strict=True)
        return torch.cat(energies), torch.cat(gradients)

    def _values(self, index: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B,) of a network."""
        values: Tensor = self.nets[index](inputs, self.case_embd)
        return values[:, 0]


class GatedNetwork(nn.Module):
    """Layers ``(x W + b) sigma(x V + c)`` (Shazeer, arXiv:2002.05202), then a linear map.

    The linear map has no bias: each element has one.

    Args:
        config: the section ``model.fitting_net``.
        num_inputs: N.
        num_features: D, the first of the inputs.
        source: of the initial parameters.
    """

    def __init__(
        self, config: DPA4EnerConfig, num_inputs: int, num_features: int, source: Source
    ) -> None:
        super().__init__()
        # without the inputs; a width of 0 is resolved here
        widths = config.widths(num_inputs)
        self.hidden_layers = module_list(
            GatedLayer(n, m, config.activation_function, source.part("hidden", k))
            for k, (n, m) in enumerate(pairwise([num_inputs, *widths]))
        )
        self.case_film: CaseModulation | None = None
        if config.case_film_embd and config.dim_case_embd:
            self.case_film = CaseModulation(
                config.dim_case_embd,
                [num_features, *widths],
                config.activation_function,
                source.part("case"),
            )
        self.output_layer = Dense([num_inputs, *widths][-1], 1, source.part("out"))

    def evaluate(self, x: Tensor, case: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output (B,) and its gradient with respect to the inputs (B, N)."""
        # forward, not self(...): hooks of sharded networks would take the backward pass that runs
        # inside of with_vjp for the one of the step
        value, gradient = with_vjp(lambda inputs: self.forward(inputs, case)[:, 0], x)
        return value, gradient(torch.ones_like(value))

    def forward(self, x: Tensor, case: Tensor | None = None) -> Tensor:
        """Return the output (B, 1); ``case`` (Q,) distinguishes the task."""
        out: Tensor = self.output_layer(self.hidden(x, case))
        return out

    def hidden(self, x: Tensor, case: Tensor | None = None) -> Tensor:
        """Return the input (B, H) of the output layer."""
        # (4 D,), computed once for all layers
        code = None
        if self.case_film is not None:
            assert case is not None
            code = self.case_film.code(case)
            # only features are modulated, frame and atom parameters are not
            num_features = self.case_film.widths[0]
            features = self.case_film(x[:, :num_features], code, 0)
            x = torch.cat([features, x[:, num_features:]], 1)
        for k, layer in enumerate(self.hidden_layers):
            x = layer(x)
            if self.case_film is not None:
                x = self.case_film(x, cast("Tensor", code), k + 1)
        return x


class GatedLayer(nn.Module):
    """A linear map of which one half gates the other.

    Args:
        num_in: inputs.
        num_out: outputs.
        act: name of the activation function of the gates.
        source: of the initial parameters.
    """

    def __init__(self, num_in: int, num_out: int, act: str, source: Source) -> None:
        super().__init__()
        # one product for values and gates, as DeePMD-kit stores them
        self.linear = Dense(num_in, 2 * num_out, source, bias=True)
        self.activation = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, M)."""
        value, gate = self.linear(x).chunk(2, -1)
        return value * self.activation.value(gate)


class CaseModulation(nn.Module):
    """Scales and shifts the numbers of layers by the task (Perez et al., arXiv:1709.07871).

    Args:
        num_cases: Q.
        widths: numbers of the features and of each hidden layer.
        act: name of the activation function.
        source: of the initial parameters.
    """

    def __init__(
        self, num_cases: int, widths: Sequence[int], act: str, source: Source
    ) -> None:
        super().__init__()
        self.widths = list(widths)
        # widths of DeePMD-kit: 4 Q rounded up to a multiple of 32, and 4 D
        hidden, wide = 32 * math.ceil(4 * num_cases / 32), 4 * widths[0]
        self.case_layer1 = Dense(num_cases, hidden, source.part(1), act)
        self.case_layer2 = Dense(hidden, wide, source.part(2))
        # zeros: all tasks start from the network without modulation
        self.projectors = nn.ParameterList(
            source.filled((wide, 2 * width), 0.0) for width in widths
        )
        # names with adam: a Muon optimizer leaves these parameters to Adam (see dpa4.layers)
        self.adam_case_film_scale_strength_log = source.filled(
            (len(widths),), math.log(SMALL)
        )
        self.adam_case_film_shift_strength_log = source.filled(
            (len(widths),), math.log(SMALL)
        )

    def code(self, case: Tensor) -> Tensor:
        """Return the code of a task (4 D,) from the vector of it (Q,)."""
        code: Tensor = self.case_layer2(self.case_layer1(case))
        return code

    def forward(self, x: Tensor, code: Tensor, index: int) -> Tensor:
        """Return the numbers of a layer (B, M), those of ``widths[index]``, scaled and shifted."""
        # (M,) each, the same for all atoms; bounded, so that no task switches a layer off at once
        scale, shift = torch.tanh(code @ self.projectors[index]).chunk(2)
        strengths = (
            self.adam_case_film_scale_strength_log,
            self.adam_case_film_shift_strength_log,
        )
        scale_strength, shift_strength = (
            strength[index : index + 1].exp() for strength in strengths
        )
        return x * (1 + scale_strength * scale) + shift_strength * shift
