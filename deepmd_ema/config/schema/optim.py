"""The sections ``learning_rate``, ``optimizer`` and ``loss``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from deepmd_ema.config.fields import (
    Check,
    WithoutEffect,
    fraction,
    not_negative,
    not_negative_int,
    option,
    positive,
    positive_int,
    redefined,
    section,
)
from deepmd_ema.config.labels import (
    ATOM_ENERGY,
    ATOM_PREF,
    ATOM_WEIGHT,
    ENERGY,
    FORCE,
    HESSIAN,
    VIRIAL,
)
from deepmd_ema.config.messages import Names
from deepmd_ema.text import every_steps

DEFAULT_STOP_LR = 5e-8  # last learning rate without stop_lr and stop_lr_ratio

_ratio = Check(lambda v: 0 < v <= 1, "a number > 0 and <= 1")
_part = Check(lambda v: 0 <= v <= 1, "a number from 0 to 1")


@section
class _Schedule:
    """Options of all schedules: first and last learning rate, and a warm-up."""

    type: ClassVar[str]
    without_effect: ClassVar[WithoutEffect] = {
        "scale_by_worker": ("linear", "the learning rate is taken as it is")
    }

    start_lr: float = option(
        check=positive, doc="Learning rate at the start, after the warm-up."
    )
    stop_lr: float | None = option(
        None,
        "Learning rate at the end; null is 5e-8, unless `stop_lr_ratio` is given.",
        not_negative,
    )
    stop_lr_ratio: float | None = option(
        None, "`stop_lr` as a fraction of `start_lr`.", _ratio
    )
    warmup_steps: int = option(
        0, "Length of the linear warm-up.", not_negative_int, unit="steps"
    )
    warmup_ratio: float | None = option(
        None,
        "Length of the warm-up as a fraction of all steps, instead of `warmup_steps`.",
        fraction,
    )
    warmup_start_factor: float = option(
        0.0, "First learning rate of the warm-up over `start_lr`.", _part
    )

    @property
    def end_lr(self) -> float:
        """Learning rate at the end, from ``stop_lr``, ``stop_lr_ratio`` or the default."""
        if self.stop_lr_ratio is not None:
            return self.start_lr * self.stop_lr_ratio
        return DEFAULT_STOP_LR if self.stop_lr is None else self.stop_lr

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the length of the warm-up of a run of ``num_steps`` steps."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return int(self.warmup_ratio * num_steps)

    def summary(self, num_steps: int = 0) -> str:
        """Return type and main options as text.

        Args:
            num_steps: length of the run; 0 while it is not known.
        """
        start = f"{self.start_lr:g}"
        if self.warmup_ratio:
            start = f"rises to {start} in {100 * self.warmup_ratio:g} % of the steps"
        elif self.warmup_steps:
            start = f"rises to {start} in {self.warmup_steps:,} steps"
        return f"{self.type}: {start}, {self._shape_words(num_steps)}"

    def _shape_words(self, num_steps: int) -> str:
        """Return the shape of the decay and the last rate as text."""
        raise NotImplementedError


@section
class ExpScheduleConfig(_Schedule):
    """Exponential decay from `start_lr` to `stop_lr`."""

    type = "exp"

    decay_steps: int = option(
        5000, "Steps between two decays.", positive_int, unit="steps"
    )
    decay_rate: float | None = option(
        None,
        "Factor of one decay; null: such that the last step has `stop_lr`.",
        _ratio,
    )
    smooth: bool = option(
        False, "Whether to decay at each step instead of at every `decay_steps`."
    )

    def used_decay_steps(self, num_steps: int) -> int:
        """Return the steps between two decays of a run of ``num_steps`` steps."""
        steps = max(1, num_steps - self.num_warmup_steps(num_steps))
        if self.decay_rate is not None or self.decay_steps < steps:
            return self.decay_steps
        # DeePMD-kit's rule for a run shorter than one decay, in which the rate would never fall
        return 100 if steps // 10 > 100 else steps // 100 + 1

    def _shape_words(self, num_steps: int) -> str:
        # without the length of the run the rule of used_decay_steps cannot be applied yet
        rate = "" if self.decay_rate is None else f" by {self.decay_rate:g}"
        used = self.used_decay_steps(num_steps) if num_steps else self.decay_steps
        return (
            f"falls exponentially to {self.end_lr:g}, "
            f"{every_steps(1 if self.smooth else used)}{rate}"
        )


@section
class CosineScheduleConfig(_Schedule):
    """Half a cosine from `start_lr` to `stop_lr`."""

    type = "cosine"

    def _shape_words(self, num_steps: int) -> str:
        return f"falls along half a cosine to {self.end_lr:g}"


@section
class WsdScheduleConfig(_Schedule):
    """Warm-up, stable, decay: `start_lr` until the last part of the run, then down to `stop_lr`."""

    type = "wsd"

    decay_phase_ratio: float = option(
        0.1, "Part of the run in which the rate goes down.", _ratio
    )
    decay_type: str = option(
        "inverse_linear",
        "How the rate goes down.",
        choices=("inverse_linear", "cosine", "linear"),
    )

    def _shape_words(self, num_steps: int) -> str:
        return f"stays, and {self._fall_words()}"

    def _fall_words(self) -> str:
        shape = {
            "inverse_linear": "with its inverse linear",
            "cosine": "along half a cosine",
            "linear": "linearly",
        }
        last = f"in the last {100 * self.decay_phase_ratio:g} % of the steps"
        return f"falls {shape[self.decay_type]} to {self.end_lr:g} {last}"


@section
class InvSqrtScheduleConfig(WsdScheduleConfig):
    """Inverse square root of the step, which needs no length of the run; optionally down to
    `stop_lr` at its end.

    `start_lr * sqrt(a / (a + t))`, t steps after the warm-up (arXiv:2602.03702). Only in dp-ema.
    """

    type = "invsqrt"

    a: float = option(
        1000.0,
        "Steps after which the rate is `start_lr / sqrt(2)`; larger is slower.",
        positive,
        unit="steps",
    )
    decay_phase_ratio: float = option(
        0.0,
        "Part of the run, its last, in which the rate goes down to `stop_lr`; 0: none.",
        _part,
    )

    def _shape_words(self, num_steps: int) -> str:
        fall = f", and {self._fall_words()}" if self.decay_phase_ratio else ""
        return (
            f"falls as the inverse square root of the step, by half in {3 * self.a:,.0f} "
            f"steps{fall}"
        )


# The unions are annotations of options: fields.options reads the types of a section from them.
ScheduleConfig = (
    ExpScheduleConfig | CosineScheduleConfig | WsdScheduleConfig | InvSqrtScheduleConfig
)


@section
class GroupConfig:
    """Parameters by their names, with a learning rate and a weight decay of their own."""

    pattern: str = option(
        check=Check(
            lambda v: v.strip() != "",
            'a pattern of names of parameters, e.g. "descriptor.*"',
        ),
        doc="Names of parameters as checkpoints have them, with `*`, `?` and `[...]` as in names "
        "of files.",
    )
    lr_scale: float = option(1.0, "Factor of the learning rate.", positive)
    weight_decay: float | None = option(
        None, "Weight decay; null: that of the optimizer.", not_negative
    )


_GROUPS = (
    "Parameters with a learning rate or weight decay of their own; one that several patterns "
    "match belongs to the first, one that none matches has those of the optimizer. Only in dp-ema."
)


@section
class AdamConfig:
    """Adam; weight decay is an L2 term of the gradient."""

    type = "Adam"

    adam_beta1: float = option(0.9, "Decay of the mean of the gradient.", fraction)
    adam_beta2: float = option(
        0.999, "Decay of the mean of the squared gradient.", fraction
    )
    weight_decay: float = option(0.0, "Weight of the L2 term.", not_negative)
    groups: list[GroupConfig] = option([], _GROUPS)


@section
class AdamWConfig(AdamConfig):
    """Adam with decoupled weight decay."""

    type = "AdamW"

    weight_decay: float = option(0.001, "Decoupled weight decay.", not_negative)


@section
class AdamWScheduleFreeConfig(AdamWConfig):
    """AdamW without a schedule: gradients at points between z, which they move, and an average x of
    all z.

    The live weights are these points. x is an average of `training.averaging` of type
    `schedule_free`, which is added if the list has none. Only in dp-ema.
    """

    type = "AdamWScheduleFree"

    adam_beta1: float = option(
        0.9, "Part of x in the live weights; the rest is z.", fraction
    )
    r: float = option(
        0.0,
        "Power of the step with which the weights of points in x grow: the mean age of x is 1 / "
        "(r + 2) of the steps. 0: all weigh the same.",
        not_negative,
    )


@section
class AdaMuonConfig:
    """Orthogonal momentum with an adaptive step for matrices, Adam for vectors and scalars."""

    type = "AdaMuon"

    momentum: float = option(
        0.95,
        "Decay of the mean gradient of a matrix.",
        fraction,
        alias=("muon_momentum",),
    )
    adam_beta1: float = option(
        0.9, "Decay of the mean of the gradient of a vector.", fraction
    )
    adam_beta2: float = option(
        0.95, "Decay of the mean of the squared gradient of a vector.", fraction
    )
    weight_decay: float = option(
        0.001, "Decoupled weight decay, of matrices only.", not_negative
    )
    lr_adjust: float = option(
        10.0,
        "Above 0: vectors have the learning rate divided by this, and updates of a matrix of R "
        "rows and C columns are multiplied by `sqrt(max(1, R / C))`. Else: all have the learning "
        "rate, and updates of matrices are multiplied by `lr_adjust_coeff * sqrt(max(R, C))`.",
    )
    lr_adjust_coeff: float = option(0.2, "See `lr_adjust`.", positive)
    groups: list[GroupConfig] = option([], _GROUPS)


@section
class HybridMuonConfig(AdaMuonConfig):
    """Orthogonal momentum for matrices, damped where gradients disagree; Adam for the rest, and by
    name.
    """

    type = "HybridMuon"
    without_effect: ClassVar[WithoutEffect] = {
        "flash_muon": (True, "it names a kernel of DeePMD-kit for the same numbers")
    }

    lr_adjust: float = redefined(AdaMuonConfig, "lr_adjust", 0.0)
    lr_adjust_coeff: float = redefined(AdaMuonConfig, "lr_adjust_coeff", 0.18)
    muon_mode: str = option(
        "slice",
        "What parameters of more than two dims are: matrices of the last two (slice), one matrix "
        "whose columns are the last (flat), or no matrices (2d).",
        choices=("slice", "flat", "2d"),
    )
    enable_gram: bool = option(
        True,
        "Whether matrices that are not square are made orthogonal by their Gram matrix: fewer "
        "operations.",
    )
    magma_muon: bool = option(
        True, "Whether updates of matrices are damped where gradients disagree."
    )


@section
class SOAPConfig(AdamWConfig):
    """Adam in the eigenbasis of Shampoo's preconditioner for matrices, AdamW for vectors.

    Only in dp-ema.
    """

    type = "SOAP"

    adam_beta1: float = redefined(AdamWConfig, "adam_beta1", 0.95)
    adam_beta2: float = redefined(AdamWConfig, "adam_beta2", 0.95)
    shampoo_beta: float = option(
        0.95, "Decay of the covariances of rows and columns of gradients.", fraction
    )
    precondition_frequency: int = option(
        10,
        "Steps between two changes of the bases, after as many first steps.",
        positive_int,
        unit="steps",
    )
    max_precond_dim: int = option(
        1000,
        "Longest side of a matrix that has a basis; a longer one is not rotated.",
        positive_int,
    )


@section
class LKFConfig:
    """Layer-wise Kalman filter; it fits energies and forces, has no learning rate, and needs much
    memory.
    """

    type = "LKF"
    # no option: the filter has no rate or decay that a group could change
    groups: ClassVar[tuple[GroupConfig, ...]] = ()

    kf_blocksize: int = option(
        5120,
        "Largest number of weights in a block; each block takes 8 bytes times the square of its "
        "size.",
        positive_int,
    )
    kf_start_pref_e: float = option(
        1.0, "Factor of energy errors at the start.", positive
    )
    kf_limit_pref_e: float = option(
        1.0, "Factor of energy errors at the end.", positive
    )
    kf_start_pref_f: float = option(
        1.0, "Factor of force errors at the start.", positive
    )
    kf_limit_pref_f: float = option(1.0, "Factor of force errors at the end.", positive)


GradientConfig = (
    AdamConfig
    | AdamWConfig
    | AdamWScheduleFreeConfig
    | AdaMuonConfig
    | HybridMuonConfig
    | SOAPConfig
)
OptimizerConfig = GradientConfig | LKFConfig


_weight = partial(
    option, check=not_negative
)  # declares the weight of a term of the loss


Weights: TypeAlias = dict[str, tuple[float, float]]
"""First and last weight of each term of a loss."""


def active_weights(loss: Any, terms: Iterable[str]) -> Weights:
    """Return ``start_pref_*`` and ``limit_pref_*`` of the terms where one of both is not zero."""
    pairs = {
        term: (getattr(loss, f"start_pref_{term}"), getattr(loss, f"limit_pref_{term}"))
        for term in terms
    }
    return {term: pair for term, pair in pairs.items() if any(pair)}


_delta = Check(
    lambda v: len(v) == 3 and min(v) > 0 if isinstance(v, list) else v > 0,
    "a number > 0, or three of them for energy, force and virial",
)


@section
class QuantityLossConfig:
    """A loss of a quantity other than the energy."""

    type: ClassVar[str]

    @property
    def weights(self) -> Weights:
        """First and last weight of each term, by its column in ``lcurve.out``.

        A term with weights of zero is shown and not trained.
        """
        raise NotImplementedError

    def labels(self, predicted: Sequence[str]) -> Names:
        """Return the labels that the terms compare with.

        Args:
            predicted: names of the predicted labels: that of a frame, then that of an atom if any.
        """
        # columns of terms of atoms have "local" in their names
        uses = ["local" in name for name, pair in self.weights.items() if any(pair)]
        are_atomic = (False, True)
        return tuple(
            name
            for name, is_atomic in zip(predicted, are_atomic, strict=False)
            if is_atomic in uses
        )

    def summary(self) -> str:
        """Return the active terms as text."""
        terms = [
            f"{n} {a:g}" + (f" to {b:g}" if a != b else "")
            for n, (a, b) in self.weights.items()
            if a or b
        ]
        return f"{self.type}, weights: {', '.join(terms)}"


@section
class TensorLossConfig(QuantityLossConfig):
    """Squared errors of dipoles or polarizabilities."""

    type = "tensor"

    pref: float = option(check=not_negative, doc="Weight of the tensor of a frame.")
    pref_atomic: float = option(
        check=not_negative, doc="Weight of the tensors of atoms."
    )
    enable_atomic_weight: bool = option(
        False,
        "Whether errors of an atom are multiplied by its number in `atomic_weight.npy`, 1 without "
        "one.",
    )

    @property
    def weights(self) -> Weights:
        """First and last weight of each active term."""
        both = {"rmse_local": self.pref_atomic, "rmse_global": self.pref}
        return {name: (weight, weight) for name, weight in both.items() if weight}

    def labels(self, predicted: Sequence[str]) -> Names:
        """Return the labels that the terms compare with, and weights of atoms."""
        labels = super().labels(predicted)
        return (*labels, ATOM_WEIGHT) if self.enable_atomic_weight else labels


@section
class DosLossConfig(QuantityLossConfig):
    """Squared errors of densities of states, and of their sums up to each energy.

    A weight follows the learning rate from `start_pref` to `limit_pref`.
    """

    type = "dos"

    start_pref_dos: float = _weight(
        0.0, "Weight of the density of states at the start."
    )
    limit_pref_dos: float = _weight(
        0.0, "Weight of the density of states when the learning rate is 0."
    )
    start_pref_cdf: float = _weight(0.0, "Weight of its sums at the start.")
    limit_pref_cdf: float = _weight(
        0.0, "Weight of its sums when the learning rate is 0."
    )
    start_pref_ados: float = _weight(1.0, "Weight of those of atoms at the start.")
    limit_pref_ados: float = _weight(
        1.0, "Weight of those of atoms when the learning rate is 0."
    )
    start_pref_acdf: float = _weight(0.0, "Weight of their sums at the start.")
    limit_pref_acdf: float = _weight(
        0.0, "Weight of their sums when the learning rate is 0."
    )

    @property
    def weights(self) -> Weights:
        """First and last weight of each active term: either of them is not zero."""
        names = {
            "ados": "local_dos",
            "acdf": "local_cdf",
            "dos": "global_dos",
            "cdf": "global_cdf",
        }
        return {
            f"rmse_{names[term]}": pair
            for term, pair in active_weights(self, names).items()
        }


_METRICS = ("smooth_mae", "mae", "mse", "rmse", "mape")


@section
class PropertyLossConfig(QuantityLossConfig):
    """Errors of a property in units of the spread of the data, summed over the frames of a
    batch.
    """

    type = "property"

    loss_func: str = option(
        "smooth_mae", "Function of the error that is minimized.", choices=_METRICS
    )
    metric: list[str] = option(
        ["mae"],
        "Errors that the learning curve shows.",
        Check(lambda v: set(v) <= set(_METRICS), f"some of {', '.join(_METRICS)}"),
    )
    beta: float = option(1.0, "Error from which `smooth_mae` is linear.", positive)

    @property
    def weights(self) -> Weights:
        """First and last weight of each term; metrics have none."""
        return {"loss": (1.0, 1.0), **dict.fromkeys(self.metric, (0.0, 0.0))}

    def summary(self) -> str:
        """Return the function that is minimized as text."""
        return f"{self.type}, {self.loss_func}"


@section
class EnerLossConfig:
    """Weighted errors of energies, forces, virials and more.

    A weight follows the learning rate from `start_pref` to `limit_pref`:
    `limit + (start - limit) * lr / start_lr`.
    """

    type = "ener"
    aliases = ("ener_hess",)  # DeePMD-kit's type for a loss with Hessians

    start_pref_e: float = _weight(0.02, "Weight of the energy at the start.")
    limit_pref_e: float = _weight(
        1.0, "Weight of the energy when the learning rate is 0."
    )
    start_pref_f: float = _weight(1000.0, "Weight of the forces at the start.")
    limit_pref_f: float = _weight(
        1.0, "Weight of the forces when the learning rate is 0."
    )
    start_pref_v: float = _weight(0.0, "Weight of the virial at the start.")
    limit_pref_v: float = _weight(
        0.0, "Weight of the virial when the learning rate is 0."
    )
    start_pref_ae: float = _weight(0.0, "Weight of the atomic energies at the start.")
    limit_pref_ae: float = _weight(
        0.0, "Weight of the atomic energies when the learning rate is 0."
    )
    start_pref_pf: float = _weight(
        0.0, "Weight, at the start, of the forces weighted per atom by `atom_pref.npy`."
    )
    limit_pref_pf: float = _weight(
        0.0, "Weight of the forces weighted per atom when the learning rate is 0."
    )
    start_pref_h: float = _weight(
        0.0,
        "Weight, at the start, of the second derivatives of the energy (`hessian.npy`).",
    )
    limit_pref_h: float = _weight(
        0.0, "Weight of the second derivatives when the learning rate is 0."
    )
    use_default_pf: bool = option(
        False, "Whether systems without `atom_pref.npy` take a weight of 1 per atom."
    )
    relative_f: float | None = option(
        None,
        "Divide force errors by the length of the force plus this number.",
        positive,
        unit="eV/angstrom",
    )
    use_huber: bool = option(
        False, "Whether errors above `huber_delta` count linearly."
    )
    huber_delta: float | list[float] = option(
        0.01,
        "Where the Huber loss turns linear: one number, or [energy, force, virial].",
        _delta,
    )
    loss_func: str = option(
        "mse", "Squared (`mse`) or absolute (`mae`) errors.", choices=("mse", "mae")
    )
    f_use_norm: bool = option(
        False,
        "Whether the length of the force error of an atom counts instead of its components.",
    )
    intensive_ener_virial: bool = option(
        False,
        "Whether squared errors of energy and virial are divided by the squared number of atoms.",
    )

    @property
    def error(self) -> str:
        """Function of a difference: ``mse``, ``huber`` or ``mae``.

        ``use_huber`` has no effect on ``mae``.
        """
        return "huber" if self.use_huber and self.loss_func == "mse" else self.loss_func

    @property
    def weights(self) -> Weights:
        """First and last weight of each active term (``e``, ``f``, ...)."""
        return active_weights(self, _TERMS)

    def labels(self, predicted: Sequence[str]) -> Names:
        """Return the labels that the active terms compare with, whatever the model predicts."""
        return tuple(
            dict.fromkeys(label for term in self.weights for label in _TERMS[term][1])
        )

    def summary(self) -> str:
        """Return kind of the errors and the active terms as text."""
        terms = [
            f"{_TERMS[t][0]} {a:g}" + (f" to {b:g}" if a != b else "")
            for t, (a, b) in self.weights.items()
        ]
        return f"{self.error}, weights: {', '.join(terms)}"


# term -> the quantity that it compares, and the labels that it needs
_TERMS = {
    "e": ("energy", (ENERGY,)),
    "f": ("force", (FORCE,)),
    "v": ("virial", (VIRIAL,)),
    "ae": ("atomic energy", (ATOM_ENERGY,)),
    "pf": ("weighted force", (FORCE, ATOM_PREF)),
    "h": ("Hessian", (HESSIAN,)),
}
LossConfig = EnerLossConfig | TensorLossConfig | PropertyLossConfig | DosLossConfig
