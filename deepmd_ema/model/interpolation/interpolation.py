"""Evaluation of the embedding nets of a descriptor: by series, from tables, or at each pair."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.interpolation.series import (
    MAX_ERROR,
    MAX_TERMS,
    MIN_HALF,
    MULTIPLE,
    STRETCH,
    Transform,
    fit,
    terms_for,
    transform,
)
from deepmd_ema.model.interpolation.sums import DirectSum, NeighborSum
from deepmd_ema.model.nn.layers import RadialFunctions

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.model.interpolation.tables import Tables

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, F functions

# values of the option `interpolate`
AUTO = "auto"
ALWAYS = "always"
NEVER = "never"
# the number of terms kept for later batches gives an error so many times smaller than what is
# accepted
MARGIN = 2


class Interpolation(nn.Module):
    """Evaluates embedding nets of one number once per site, or leaves them to its caller.

    While weights change a net is a series between the ends of each batch. The error of every series
    is estimated, and one that is too short is not used: it is made again with more terms, or the
    net is evaluated at each pair. A model that is only evaluated has tables. There are no
    parameters, and no state that files hold.

    The module that has it as ``interpolation`` also has a method ``radial_range``, the range of s
    (:meth:`~deepmd_ema.model.descriptor.env_statistics.EnvironmentMatrix.radial_range`).

    Args:
        choice: ``always``, ``never``, or ``auto``, which leaves it to a training run.
        precision: of the nets, for the accuracy.
        width: numbers that the layers of one of the nets have for a pair.

    Attributes:
        terms: N of the first series of an evaluation; 0: each pair is evaluated directly.
        max_error: of the derivative of a series, over its largest value.
        recording: whether evaluations without gradients are recorded as well.
        needed: terms that are enough for all evaluations since it was set to 0, with a margin; more
            than `MAX_TERMS` if a net was evaluated at each pair.
        direct_numbers: that the layers would have for all pairs of these evaluations, if each was
            evaluated directly.
        evaluated_sites: at which nets were evaluated instead.
        tables: of a model that is only evaluated; None: the range of s is that of each batch.
    """

    def __init__(self, choice: str, precision: torch.dtype, width: int = 0) -> None:
        super().__init__()
        self.choice = choice
        self.precision = precision
        self.width = width
        self.terms = 0
        self.max_error = MAX_ERROR[precision]
        self.recording = False
        self.needed = self.direct_numbers = self.evaluated_sites = 0
        self.tables: Tables | None = None
        for name in Transform._fields:  # buffers, because graphs take these as inputs
            self.register_buffer(
                name, torch.empty(0, dtype=torch.float64), persistent=False
            )

    def serves(self, batch: Batch) -> bool:
        """Whether the nets are evaluated here for a batch."""
        return (
            self.terms > 0 if self.tables is None else self.tables.serve(batch.neighbor)
        )

    def use(self, terms: int) -> None:
        """Evaluate nets as series that have this length at first from now on; 0: directly."""
        if terms == self.terms:
            return
        self.terms = terms
        if terms:
            for name, value in transform(terms)._asdict().items():
                setattr(self, name, value)

    def forward(
        self,
        left: Tensor,
        s: Tensor,
        net: RadialFunctions,
        beside: Tensor | None = None,
        which: int = 0,
        in_place: bool = True,
        further: Tensor | None = None,
    ) -> NeighborSum:
        """Return ``sum_k left[k] net(s_k)`` over the neighbors of each atom.

        With further inputs of the net it is ``sum_kn left[k, n] net(s_k, n)``.

        Args:
            left: (A, K, C F) of each pair.
            s: (A, K) first input of the net.
            net: whose functions of s these are.
            beside: (F, inputs) further inputs that make F functions of the net; None: it has no
                other.
            which: of several ``beside`` with which the net is evaluated.
            in_place: whether polynomials are made in place, which is for eager mode and not
                differentiable twice by s.
            further: (B,) numbers at which a net of one input is evaluated as well, for ``beyond``
                of the sum.
        """
        if self.tables is not None:
            return self.tables.sum(left, s, net, beside, which, in_place, further)
        # the ends of this batch, so that no s is outside; a list of no pairs has none
        low, high = (
            s.detach().aminmax() if s.numel() else (s.new_zeros(()), s.new_ones(()))
        )
        centre = 0.5 * (low + high)
        half = (0.5 * STRETCH * (high - low)).clamp(min=MIN_HALF)
        constants = Transform(*(getattr(self, name) for name in Transform._fields))
        fitted = fit(
            net, beside, centre.unsqueeze(0), half, constants, self.max_error, further
        )
        series = fitted.series
        terms = fitted.terms
        # evaluations without gradients may be those of averages; how many averages there are must
        # not change the training
        if not torch.compiler.is_dynamo_compiling() and (
            torch.is_grad_enabled() or self.recording
        ):
            self.direct_numbers += s.numel() * net.numbers_per_row
            self.evaluated_sites += terms if beside is None else terms * len(beside)
            enough = MAX_TERMS + MULTIPLE
            if series is not None:
                enough = terms  # where the error is nan
                if math.isfinite(fitted.error):
                    accepted = self.max_error / MARGIN
                    enough = min(terms_for(terms, fitted.error, accepted), MAX_TERMS)
            self.needed = max(self.needed, enough)
        if series is None:
            return DirectSum(left, s, net, beside, fitted.beyond)
        return series.sum(left, s, in_place, fitted.beyond)
