"""Models evaluated by code that ``torch.compile`` makes, one graph for all models of a structure.

A graph serves all sizes of batches as well.

``torch._dynamo`` is imported where it is used: it takes half a second, and most runs do not
compile.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import ATOM_ENERGY, ENERGY, FORCE, VIRIAL
from deepmd_ema.config.schema.training import MODES_OF_CUDA_GRAPHS, CompileConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import UserError
from deepmd_ema.files import writing
from deepmd_ema.model.dummy_atoms import (
    Filled,
    Round,
    at_least_two,
    fill,
    pad,
    to_half_octave,
    to_prime,
)
from deepmd_ema.model.energy import EnergyModel, run
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.text import counted

logger = logging.getLogger(__name__)

T = TypeVar("T")

# torch before 2.13 uses names in its code that it does not declare, most of them in assertions
CODE_OPTIONS = (
    {"scalar_asserts": False, "assert_indirect_indexing": False}
    if torch.__version__ < "2.13"
    else {}
)
MAX_GRAPHS = 64  # limit of a process; then torch continues eagerly and warns
# by this step of a run weights that began at 0 have other values, and gradients their usual size
COMPARED_STEP = 20
# two sets of operations differ by at most 33 eps for all descriptors, in float64 and float32
MAX_ROUNDING = 100  # eps
# products in TF32 or bfloat16: the rounding of eager code and of compiled code, and as much again,
# as both are samples
ROUNDING_FACTOR = 4
# relative to the largest gradient: a smaller one is the rest of terms that cancel
MIN_GRADIENT = 1e-2


@dataclass(frozen=True)
class Graph:
    """A graph that was compiled.

    Attributes:
        purpose: what it evaluates.
        seconds: that the call took in which it was made, the first evaluation included.
        cached: whether its code was found on the disk.
        reason: why the graphs before it did not fit; empty for the first one.
    """

    purpose: str
    seconds: float
    cached: bool
    reason: str


@dataclass
class Compiler:
    """Evaluates models as :func:`~deepmd_ema.model.energy.run` does, by compiled code.

    Every parameter and buffer is an input of a graph, and torch guards everything else that a graph
    depends on, so that models of one structure share one graph and no model runs with the constants
    of another. Batches are filled up so that their sizes are of one kind
    (:mod:`~deepmd_ema.model.dummy_atoms`); gradients and values stay the same. Loaders fill them up
    ahead (:func:`pad_for`), and then predictions have the dummy frames and atoms too; a batch that
    is not filled up is so here, and its predictions are its own.

    The numbers of each new graph are compared with the eager ones (:meth:`difference`), again after
    20 steps, and where `due` says so. Where they differ by more than rounding, or torch cannot
    compile, models are evaluated eagerly from then on, and a warning says so. Other ranks follow in
    :meth:`agree`.

    Attributes:
        options: of torch.
        place: the option for compiled code, for messages.
        in_training: whether models in training mode are compiled.
        in_validation: whether models in evaluation mode are.
        graphs: made so far.
        due: modes, whether they are that of training, that are compared at their next evaluation.
        refused: a mode, whether it is that of training, and the reason why this rank evaluates it
            eagerly, which other ranks do not know yet.
    """

    options: CompileConfig
    place: str = "training.enable_compile"
    in_training: bool = True
    in_validation: bool = True
    graphs: list[Graph] = field(default_factory=list)
    due: set[bool] = field(default_factory=lambda: {False})
    refused: tuple[bool, str] = (False, "")
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.options.cache_dir is not None:
            # inductor takes the folder from the environment, when it makes code
            place = "training.compile_options.cache_dir"
            with writing(
                f"{place}: {self.options.cache_dir}",
                "Name another folder, or leave the option out.",
            ):
                os.makedirs(self.options.cache_dir, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(
                self.options.cache_dir
            )
        # modes are presets of options of inductor
        mode = self.options.mode if self.options.backend == "inductor" else None
        self._run = torch.compile(
            run, backend=self.options.backend, dynamic=self.options.dynamic, mode=mode
        )

    def serves(self, model: EnergyModel) -> bool:
        """Whether a model is compiled in the mode in which it is."""
        return self.in_training if model.training else self.validates(model)

    def validates(self, model: EnergyModel) -> bool:
        """Whether a model is compiled in evaluation mode; tables are faster than compiled code."""
        return self.in_validation and not model.has_tables

    def __call__(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        """Return predictions for ``batch``, with gradients by parameters in training mode."""
        graphs = len(self.graphs)
        training = model.training
        self._steps += training
        if training and self._steps == COMPARED_STEP:
            self.due.add(True)
        try:
            prediction = self._predict(model, batch)
        except Exception as error:
            prediction = run(model, batch)  # raises an error that is not the compiler's
            self.refuse(training, self._why_not(error))
            return prediction
        # a device must not be waited for while a step is captured
        is_captured = batch.vector.is_cuda and torch.cuda.is_current_stream_capturing()
        is_due = training in self.due and not is_captured
        if len(self.graphs) > graphs or is_due:
            self.due.discard(training)
            self.refuse(training, self.difference(model, batch))
            # it runs again, because CUDA graphs write over what they have returned
            prediction = (
                self._predict(model, batch) if self.serves(model) else run(model, batch)
            )
        # series too short give nan; a look costs nothing on a CPU, while a GPU would be waited for
        if prediction[ENERGY].device.type == "cpu" and not _is_finite(prediction):
            return self._evaluate_again(model, batch)
        return prediction

    def trace(self, model: EnergyModel, batch: Batch) -> str:
        """Make the graph of a model before it is used, and return the reason not to use it.

        The text is empty if there is none.
        Weights that are 0 are random numbers meanwhile: of a fresh model most gradients would be 0,
        and those that compiled code leaves out would not be noticed.

        It is made for a batch all of whose sizes differ, and differ from widths: torch would take
        sizes that are equal in the first batch for equal in all, and make another graph later. And
        the code depends a little on the sizes it was made for: a restart makes it for the same
        batch as the first start.
        """
        widths = {
            size
            for tensor in (*model.parameters(), *model.buffers())
            for size in tensor.shape
        }
        up = to_prime(widths) if self.options.dynamic else _rounding(self.options)
        with _without_zeros(model):
            return self.difference(model, _fill(batch, model.layout, up).batch)

    def refuse(self, training: bool, reason: str) -> None:
        """Evaluate models eagerly from now on if there is a reason.

        Args:
            training: whether it was found in training mode, else in evaluation mode.
            reason: for the warning; empty for none.
        """
        if reason and (self.in_training if training else self.in_validation):
            self.refused = training, reason
            # a refusal in evaluation mode leaves steps compiled, one in training refuses both
            self.in_training = self.in_training and not training
            self.in_validation = False
            evaluation = "The test is" if self.place == "--compile" else "Validation is"
            what = "Steps and validation are" if training else evaluation
            logger.warning("%s: %s. %s evaluated eagerly.", self.place, reason, what)

    def agree(self, world: World) -> None:
        """Evaluate eagerly on all ranks what one of them does. Must be called by every rank."""
        # gathered on rank 0 alone. The largest pair is one with a reason, if there is any, and of
        # these one of training, which refuses validation too
        refused = world.gather(self.refused)
        self.refuse(*world.broadcast_from_rank0(lambda: max(refused)))
        self.refused = False, ""

    def difference(self, model: EnergyModel, batch: Batch) -> str:
        """Return the first number of compiled code that is not the eager one to rounding.

        The text is empty if all are.

        Compares predictions, and in training mode the gradients by parameters of a weighted sum of
        all of them. Another order of the same sums changes them by the eps of the parameters times
        what cancels: half of the digits must agree, so that a difference is at most sqrt(eps) of
        the largest eager number, or 100 eps where that is more. Products in TF32 or bfloat16 round
        more, by as much as eager numbers differ from those of full precision: the bound is 4 times
        this, of the number or of the median over all. A number that is not finite differs.

        Args:
            model: in the mode and the context of products in which it is used.
            batch: evaluated both ways.

        Raises:
            UserError: without a C++ compiler.
        """
        # filled by the first evaluation, so that all differences are relative to the same numbers
        scale: dict[str, float] = {}
        eager, is_short = _with_series(
            model, lambda: _numbers(run, model, batch, scale)
        )
        bounds = dict.fromkeys(eager, _rounding_of_sums(model))
        if _has_reduced_products(model):
            with _full_precision(model):
                exact, _ = _with_series(
                    model, lambda: _numbers(run, model, batch, scale)
                )
            rounding = {
                name: float((eager[name] - value).abs().amax()) / scale[name]
                for name, value in exact.items()
            }
            usual = median(rounding.values())
            bounds = {
                name: max(bound, ROUNDING_FACTOR * max(rounding[name], usual))
                for name, bound in bounds.items()
            }
        try:
            compiled = _numbers(self._predict, model, batch, scale)
        except Exception as error:
            return self._why_not(error)
        if is_short and not bool(torch.isfinite(compiled[ENERGY]).all()):
            return ""  # the graph says that its series are too short for this batch
        off = {
            name: (compiled[name] - value).abs().nan_to_num(math.inf, math.inf)
            for name, value in eager.items()
        }
        # predictions come first, as a gradient depends on several of them; for nan `<=` is false
        name = next(
            (
                name
                for name, by in off.items()
                if not float(by.amax()) <= bounds[name] * scale[name]
            ),
            None,
        )
        if name is None:
            return ""
        at = int(off[name].argmax())
        value = float(compiled[name][at])
        expected = float(eager[name][at])
        share = float(off[name][at]) / scale[name]
        return (
            f"code compiled by torch {torch.__version__} gives other numbers: {name} {value:.6g} "
            f"instead of {expected:.6g} (difference {share:.1e} of {scale[name]:.3g}; rounding "
            f"gives less than {bounds[name]:.0e})"
        )

    def _why_not(self, error: Exception) -> str:
        """Return the reason why torch could not compile a model.

        Without a C++ compiler the first one is raised as a UserError.
        """
        # the errors of torch wrap those of inductor, some in `raise ... from`, some without
        chain: list[BaseException] = [error]
        while True:
            cause = chain[-1].__cause__ or chain[-1].__context__
            if cause is None or cause in chain:
                break
            chain.append(cause)
        from torch._inductor.exc import InvalidCxxCompiler

        lacks_compiler = any(isinstance(link, InvalidCxxCompiler) for link in chain)
        lacks_compiler = lacks_compiler or "InvalidCxxCompiler" in str(error)
        if lacks_compiler and not self.graphs:
            otherwise = (
                "Leave it out"
                if self.place.startswith("--")
                else "Set it to false to train eagerly"
            )
            raise UserError(
                f"{self.place}: {without_compiler('compiled code is made with')}. {otherwise}."
            ) from error
        logger.debug("torch.compile", exc_info=error)
        first = [*str(error).strip().splitlines(), "no message"][0][:300]
        return (
            f"torch {torch.__version__} could not compile the model ({type(chain[-1]).__name__}: "
            f"{first})"
        )

    def _predict(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        if batch.num_dummies[0]:
            prediction = self._evaluate(model, _without_labels(batch))
        else:
            filled = _fill(batch, model.layout, _rounding(self.options))
            prediction = filled.take(self._evaluate(model, filled.batch))
        return prediction

    def _evaluate_again(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        """Return eager predictions, and refuse the code if it was wrong.

        It was if these are finite and no longer series were needed.

        A graph has series of one length, on a CPU, and gives nan where a batch needs longer ones.
        """
        prediction, is_short = _with_series(
            model, lambda: run(model, batch), keep=model.training
        )
        if not is_short and _is_finite(prediction):
            text = (
                f"code compiled by torch {torch.__version__} gives energies that are not finite, "
                "eager code finite ones"
            )
            self.refuse(model.training, text)
        return prediction

    def _evaluate(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        import torch._dynamo
        import torch._inductor.config
        import torch.fx.experimental._config

        graphs, hits = _counts()
        began = time.perf_counter()
        if self.options.mode in MODES_OF_CUDA_GRAPHS:
            # CUDA graphs may write over the outputs of the step before from here on
            torch.compiler.cudagraph_mark_step_begin()
        with (
            # DDP would have the graph cut at its buckets; it needs no more than gradients
            torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, optimize_ddp=False),
            torch._inductor.config.patch(CODE_OPTIONS),
            # sizes that are equal in one batch stay separate symbols
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            # with virials: tasks without them share the graph
            prediction: dict[str, Tensor] = self._run(model, batch)
        graphs_now, hits_now = _counts()
        if graphs_now > graphs:
            from torch._dynamo.utils import get_compilation_metrics

            # the reason why earlier graphs do not fit, as far as torch reports it
            metrics = get_compilation_metrics() if self.graphs else []
            reason = (
                str(getattr(metrics[-1], "recompile_reason", None) or "")
                if metrics
                else ""
            )
            # the first guard that failed, without the line of code behind it
            reason = " ".join(reason.split("  # ")[0].split())[:200]
            purpose = "training" if model.training else "validation"
            seconds = time.perf_counter() - began
            graph = Graph(purpose, seconds, hits_now > hits, reason)
            self.graphs.append(graph)
            logger.info(
                "compiled graph %d for %s in %.1f s%s%s",
                len(self.graphs),
                graph.purpose,
                graph.seconds,
                " (code from the cache)" if graph.cached else "",
                f": {graph.reason}" if graph.reason else "",
            )
        return prediction

    def describe(self) -> str:
        """Return the number of graphs and the time that they took."""
        cached = sum(graph.cached for graph in self.graphs)
        return (
            f"{counted(len(self.graphs), 'graph')} in {self.seconds:.1f} s, code of {cached} from "
            "the cache"
        )

    @property
    def seconds(self) -> float:
        """Seconds that all graphs took."""
        return sum(graph.seconds for graph in self.graphs)


def pad_for(options: CompileConfig, layout: NeighborLayout) -> Callable[[Batch], Batch]:
    """Return the function that fills up batches of a layout for compiled code.

    A loader calls it in its thread.
    """
    return partial(pad, layout=layout, up=_rounding(options))


def _rounding(options: CompileConfig) -> Round:
    """Return the sizes to which batches are filled up: one graph serves all, or one graph each."""
    return at_least_two if options.dynamic else to_half_octave


def _fill(batch: Batch, layout: NeighborLayout, up: Round) -> Filled:
    """Return ``batch`` filled up as a loader does it.

    For a GPU its tensors are views of one buffer, which graphs made for tensors of their own do not
    take.
    """
    filled = fill(_without_labels(batch), layout, up)
    device = batch.vector.device
    if device.type == "cuda":
        return replace(filled, batch=filled.batch.pack().to(device))
    return filled


def _without_labels(batch: Batch) -> Batch:
    """Return the batch without what a model does not see, and a graph must not depend on."""
    return replace(
        batch, labels={}, has_label={}, frames=(), padding=False, num_dummies=(0, 0)
    )


def _counts() -> tuple[int, int]:
    """Return the number of graphs that were made, and of those whose code was found in a cache."""
    # private to torch: without it no later graph is logged, nor compared; the first ones are
    # compared by trace
    try:
        from torch._dynamo.utils import counters, get_compilation_metrics  # noqa: F401
    except ImportError:
        return 0, 0
    hits = (
        counters["aot_autograd"]["autograd_cache_hit"]
        + counters["inductor"]["fxgraph_cache_hit"]
    )
    return counters["stats"]["unique_graphs"], hits


def _numbers(
    evaluate: Callable[[EnergyModel, Batch], dict[str, Tensor]],
    model: EnergyModel,
    batch: Batch,
    scale: dict[str, float],
) -> dict[str, Tensor]:
    """Return predictions and gradients of their sum by parameters, each (n,) float64, by name.

    Gradients are there in training mode only.

    Args:
        evaluate: the model.
        model: in training or evaluation mode.
        batch: filled up or not.
        scale: the largest of each, which those of another evaluation are compared with; filled in
            if it is empty.
    """
    numbers = {name: value.flatten() for name, value in evaluate(model, batch).items()}
    # without the energies of elements, beside which those of networks may be too small to compare
    numbers[ATOM_ENERGY] = (
        numbers[ATOM_ENERGY] - model.out_bias.view(-1)[batch.atom_type]
    )
    if is_first := not scale:
        scale.update(
            {
                name: float(value.detach().abs().amax())
                for name, value in numbers.items()
            }
        )
        # the forces of a perfect crystal are zero: differences need a least scale
        atom_scale = scale[ATOM_ENERGY] = scale[ATOM_ENERGY] or 1.0
        least = {
            ENERGY: atom_scale,
            FORCE: atom_scale / model.layout.rcut,
            VIRIAL: atom_scale,
        }
        scale.update({name: max(scale[name], value) for name, value in least.items()})
    parameters = (
        {name: p for name, p in model.named_parameters() if p.requires_grad}
        if model.training
        else {}
    )
    if parameters:
        # weights cos 0, cos 1, ...: the plain sum of all forces is 0 for any parameters
        parts = [
            (v * torch.cos(torch.arange(len(v)).to(v))).sum() / scale[name]
            for name, v in numbers.items()
        ]
        gradients = torch.autograd.grad(
            torch.stack(parts).sum(),
            [*parameters.values()],
            allow_unused=True,
            materialize_grads=True,
        )
        by_name = {
            f"gradient by {name}": g.flatten()
            for name, g in zip(parameters, gradients)
            if g.numel()
        }
        numbers.update(by_name)
        if is_first:
            sizes = {name: float(g.abs().amax()) for name, g in by_name.items()}
            most = max(sizes.values()) or 1.0
            scale.update(
                {name: max(size, MIN_GRADIENT * most) for name, size in sizes.items()}
            )
    return {name: value.detach().double().clone() for name, value in numbers.items()}


def _is_finite(prediction: Mapping[str, Tensor]) -> bool:
    return bool(torch.isfinite(prediction[ENERGY]).all())


def _with_series(
    model: EnergyModel, evaluate: Callable[[], T], keep: bool = False
) -> tuple[T, bool]:
    """Return the result of an eager evaluation, and whether the series of graphs are too short.

    They are if it needed more terms than graphs of the model have.

    Args:
        model: which is evaluated.
        evaluate: does so.
        keep: whether the terms that it needed count for later series.
    """
    series = [part for part in model.modules() if isinstance(part, Interpolation)]
    before = [(part.recording, part.needed) for part in series]
    for part in series:
        part.recording = True
        part.needed = 0
    result = evaluate()
    is_short = any(part.needed > part.terms > 0 for part in series)
    for part, (recording, needed) in zip(series, before):
        part.recording = recording
        part.needed = max(needed, part.needed) if keep else needed
    return result, is_short


@contextmanager
def _without_zeros(model: EnergyModel) -> Iterator[None]:
    """Have random numbers in the place of weights that are 0 within this context.

    Afterwards they are as before.
    """
    generator = torch.Generator().manual_seed(
        0
    )  # apart from the random streams of the run
    before = {p: p.detach().clone() for p in model.parameters() if bool((p == 0).any())}
    filled: dict[nn.Parameter, Tensor] = {}
    for parameter, values in before.items():
        drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(
            values
        )
        # about as large as other weights of a layer with so many inputs
        inputs = (*values.shape[-2:], 1)[0]
        filled[parameter] = torch.where(values == 0, drawn * inputs**-0.5, values)
    _copy_to_keys(filled)
    try:
        yield
    finally:
        _copy_to_keys(before)


@torch.no_grad()
def _copy_to_keys(values: Mapping[nn.Parameter, Tensor]) -> None:
    # in place: graphs and optimizers hold these parameters
    for parameter, value in values.items():
        parameter.copy_(value)


def _rounding_of_sums(model: EnergyModel) -> float:
    """Return the largest difference from another order of the same sums, relative to the largest.

    The square root of eps is half of the digits.
    """
    eps = max(torch.finfo(parameter.dtype).eps for parameter in model.parameters())
    return max(math.sqrt(eps), MAX_ROUNDING * eps)


def _reduced_parts(model: EnergyModel) -> list[Any]:
    """Return the parts of a model that multiply in bfloat16 on a GPU, in its mode."""
    if model.training:
        return [
            part
            for part in model.modules()
            if getattr(getattr(part, "section", None), "use_amp", False)
        ]
    return [
        part for part in model.modules() if getattr(part, "infers_in_bfloat16", False)
    ]


def _has_reduced_products(model: EnergyModel) -> bool:
    """Whether products have factors in TF32 or bfloat16, in the mode of a model and this context.

    Never on a CPU, where neither has an effect.
    """
    has_tf32 = torch.get_float32_matmul_precision() != "highest"
    return model.out_bias.is_cuda and (has_tf32 or bool(_reduced_parts(model)))


@contextmanager
def _full_precision(model: EnergyModel) -> Iterator[None]:
    """Multiply in the precision of the parameters within this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    parts = {part: part.section for part in _reduced_parts(model)}
    inferring = [part for part in parts if getattr(part, "infers_in_bfloat16", False)]
    for part, section in parts.items():
        part.section = replace(section, use_amp=False)
    for part in inferring:
        part.infers_in_bfloat16 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for part, section in parts.items():
            part.section = section
        for part in inferring:
            part.infers_in_bfloat16 = True


def without_compiler(purpose: str) -> str:
    """Return the advice for machines without a C++ compiler."""
    from torch._inductor import config

    names = ", ".join(name for name in config.cpp.cxx if name)
    return (
        f"no C++ compiler was found ({names}), which {purpose}. Install g++, or name yours in the "
        "environment variable CXX"
    )
