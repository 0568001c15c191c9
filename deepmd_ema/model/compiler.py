"""Models evaluated by code that ``torch.compile`` makes: one graph for all models of one structure and all sizes.

``torch._dynamo`` is imported where it is used: it takes half a second, and most runs do not compile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.schema.training import MODES_OF_CUDA_GRAPHS, CompileConfig
from deepmd_ema.distributed.files import writing
from deepmd_ema.errors import UserError, counted
from deepmd_ema.model.dummy_atoms import Filled, Round, at_least_two, fill, pad, to_half_octave, to_prime
from deepmd_ema.model.energy import EnergyModel, run

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # of a process; then torch continues eagerly and warns


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

    Every parameter and buffer is an input of a graph, and torch guards everything else that a graph depends on, so that
    models of one structure share one graph and no model runs with the constants of another. Batches are filled up so
    that their sizes are of one kind (:mod:`~deepmd_ema.model.dummy_atoms`); gradients and values stay the same. Loaders
    fill them up ahead (:func:`pad_for`), and then predictions have the dummy frames and atoms too; a batch that is not
    filled up is so here, and its predictions are its own.

    Attributes:
        options: of torch.
        in_training: whether models in training mode are compiled.
        in_validation: whether models in evaluation mode are.
        graphs: made so far.
    """

    options: CompileConfig
    in_training: bool = True
    in_validation: bool = True
    graphs: list[Graph] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.options.cache_dir is not None:
            place = "training.compile_options.cache_dir"
            with writing(f"{place}: {self.options.cache_dir}", "Name another folder, or leave the option out."):
                os.makedirs(self.options.cache_dir, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(self.options.cache_dir)
        mode = self.options.mode if self.options.backend == "inductor" else None
        self._run = torch.compile(run, backend=self.options.backend, dynamic=self.options.dynamic, mode=mode)

    def serves(self, model: EnergyModel) -> bool:
        """Whether a model is compiled in the mode in which it is."""
        return self.in_training if model.training else self.validates(model)

    def validates(self, model: EnergyModel) -> bool:
        """Whether a model is compiled in evaluation mode; tables are faster than compiled code."""
        return self.in_validation and not model.has_tables

    def __call__(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        """Return the predictions of ``model`` for ``batch``, with gradients by parameters in training mode."""
        if batch.num_dummies[0]:
            prediction = self._evaluate(model, _without_labels(batch))
        else:
            filled = _fill(batch, model.layout, _rounding(self.options))
            prediction = filled.take(self._evaluate(model, filled.batch))
        # a graph has series of one length, on a CPU, and gives nan where a batch needs longer ones
        if prediction[ENERGY].device.type == "cpu" and not bool(torch.isfinite(prediction[ENERGY]).all()):
            return run(model, batch)
        return prediction

    def trace(self, model: EnergyModel, batch: Batch) -> None:
        """Make the graph of a model before it is used, on a batch all of whose sizes differ, and differ from widths.

        torch would take sizes that are equal in the first batch for equal in all, and make another graph later. And the
        code depends a little on the sizes it was made for: a restart makes it for the same batch as the first start.
        """
        widths = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
        up = to_prime(widths) if self.options.dynamic else _rounding(self.options)
        self._evaluate(model, _fill(batch, model.layout, up).batch)

    def _evaluate(self, model: EnergyModel, batch: Batch) -> dict[str, Tensor]:
        import torch._dynamo
        import torch.fx.experimental._config

        (graphs, hits), began = _counts(), time.perf_counter()
        if self.options.mode in MODES_OF_CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        with (
            # DDP would have the graph cut at its buckets; it needs no more than gradients
            torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, optimize_ddp=False),
            # two sizes that are equal in one batch are two sizes
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            prediction: dict[str, Tensor] = self._run(model, batch)  # with virials: tasks without them share the graph
        graphs_now, hits_now = _counts()
        if graphs_now > graphs:
            from torch._dynamo.utils import get_compilation_metrics

            # why those before it do not fit, as far as torch says it
            metrics = get_compilation_metrics() if self.graphs else []
            reason = str(getattr(metrics[-1], "recompile_reason", None) or "") if metrics else ""
            reason = " ".join(reason.split("  # ")[0].split())[:200]
            purpose, seconds = "training" if model.training else "validation", time.perf_counter() - began
            graph = Graph(purpose, seconds, hits_now > hits, reason)
            self.graphs.append(graph)
            logger.info(
                "compiled graph %d for %s in %.1f s%s%s", len(self.graphs), graph.purpose, graph.seconds,
                " (code from the cache)" if graph.cached else "", f": {graph.reason}" if graph.reason else "",
            )  # fmt: skip
        return prediction

    def describe(self) -> str:
        """Return the number of graphs and the time that they took."""
        cached = sum(graph.cached for graph in self.graphs)
        return f"{counted(len(self.graphs), 'graph')} in {self.seconds:.1f} s, code of {cached} from the cache"

    @property
    def seconds(self) -> float:
        """Seconds that all graphs took."""
        return sum(graph.seconds for graph in self.graphs)


def pad_for(options: CompileConfig, layout: NeighborLayout) -> Callable[[Batch], Batch]:
    """Return the function that fills up batches of a layout for compiled code; a loader calls it in its thread."""
    return partial(pad, layout=layout, up=_rounding(options))


def _rounding(options: CompileConfig) -> Round:
    """Return to which sizes batches are filled up: one graph serves all, or each size has its graph."""
    return at_least_two if options.dynamic else to_half_octave


def _fill(batch: Batch, layout: NeighborLayout, up: Round) -> Filled:
    """Return ``batch`` filled up as a loader does it.

    For a GPU its tensors are views of one buffer, which graphs made for tensors of their own do not take.
    """
    filled = fill(_without_labels(batch), layout, up)
    device = batch.vector.device
    return replace(filled, batch=filled.batch.pack().to(device)) if device.type == "cuda" else filled


def _without_labels(batch: Batch) -> Batch:
    """Return the batch without what a model does not see, and a graph must not depend on."""
    return replace(batch, labels={}, has_label={}, frames=(), padding=False, num_dummies=(0, 0))


def _counts() -> tuple[int, int]:
    """Return the number of graphs that were made, and of those whose code was found in a cache."""
    try:  # private to torch, and used for log lines only: without it there are none
        from torch._dynamo.utils import counters, get_compilation_metrics  # noqa: F401
    except ImportError:
        return 0, 0
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return counters["stats"]["unique_graphs"], hits


@contextmanager
def explained(place: str, otherwise: str) -> Iterator[None]:
    """Turn errors of torch about compiling into a message.

    Args:
        place: the option for compiled code.
        otherwise: how to continue without it.

    Raises:
        UserError: with the missing program, and how to continue without it.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        from torch._inductor.exc import InvalidCxxCompiler

        if any(isinstance(one, InvalidCxxCompiler) for one in chain) or "InvalidCxxCompiler" in str(error):
            why = f"{without_compiler('compiled code is made with')}."
        else:
            first = str(error).strip().splitlines()
            why = (
                f"torch {torch.__version__} could not compile the model ({type(chain[-1]).__name__}: "
                f"{first[0][:300] if first else 'no message'}). --debug shows all of it."
            )
        raise UserError(f"{place}: {why} {otherwise}.") from error


def without_compiler(purpose: str) -> str:
    """Return the advice for machines without a C++ compiler."""
    from torch._inductor import config

    names = ", ".join(name for name in config.cpp.cxx if name)
    return (
        f"no C++ compiler was found ({names}), which {purpose}. Install g++, or name yours in the environment variable "
        "CXX"
    )
