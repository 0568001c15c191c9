"""Training steps as functions of static buffers, which a CUDA graph launches as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.training.step import GradientStep, Updated
from deepmd_ema.training.tasks import Task

CAPTURED_AT_USE = 3  # of a shape: cuBLAS and the caching allocator have what they need by then
MAX_GRAPHS = 64  # each takes some MB of its nodes; further shapes stay eager


Launch = Callable[[], Updated]
"""Takes a step with what its static buffers hold."""


class Capture:
    """Records the kernels of steps, in memory that all graphs share, of which one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Launch) -> Launch:
        """Return a function that launches all kernels of ``step`` at once; recording does not take the step.

        Args:
            step: makes no tensor of host numbers and does not wait for the device.
        """
        graph = torch.cuda.CUDAGraph()
        # other threads, those of the loader and the writer, may allocate and wait meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            updated = step()
        self._pool = graph.pool()

        def launch() -> Updated:
            graph.replay()
            return updated  # held here, so that no other graph gets its memory

        return launch


@dataclass(frozen=True)
class _Graphed:
    """A step for batches of one layout: the buffer that holds the batch, and what launches the step."""

    data: Tensor
    launch: Launch


class GraphedSteps:
    """Takes steps, each with the averages after it, by one launch from the third use of a shape on.

    Everything that differs from step to step is in buffers that stay in their place: the bytes of the batch, the
    learning rate and the number of the step. A step is captured once for each task, layout of a batch and set of
    averages that are due. Other steps run eagerly by the same function, so that the bits do not depend on which steps
    are captured. Averages that are kept on the host are updated after the launch.

    Args:
        take_step: changes the weights.
        bank: averages, maybe none.
        device: a CUDA device.
        products: context of matrix products in a step.
    """

    def __init__(
        self,
        take_step: GradientStep,
        bank: AverageBank,
        device: torch.device,
        products: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._take_step, self._bank, self._products, self._capture = take_step, bank, products, Capture()
        self._numbers = torch.zeros(2, dtype=torch.float64, device=device)  # learning rate and step
        self._uses: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graphed] = {}
        self._num_bindings = 0

    @property
    def num_graphs(self) -> int:
        """Number of steps that were captured."""
        return len(self._graphs)

    def __call__(self, task: Task, packed: PackedBatch, rate: float, step: int, epoch: float) -> tuple[Updated, Batch]:
        """Update weights and averages with one batch; return the result and the batch on the device.

        Args:
            task: whose batch it is.
            packed: the batch in page-locked memory.
            rate: learning rate.
            step: from 1.
            epoch: for averages whose updates depend on it.
        """
        # a new tensor each time: the copy of the step before may not have been made yet
        self._numbers.copy_(torch.tensor([rate, step], dtype=torch.float64).pin_memory(), non_blocking=True)
        due = self._bank.begin(epoch)
        far = [name for name in due if self._bank[name].staging is not None]
        due = tuple(name for name in due if name not in far)
        graphed = self._graphed((task.name, packed.layout, due), task, packed, due)
        if graphed is None:
            batch = packed.to(self._numbers.device)
            updated = self._step(task, batch, due)
        else:
            graphed.data.copy_(packed.data, non_blocking=True)
            batch, updated = packed.view(graphed.data), graphed.launch()
        self._bank.apply(far, updated.ok)
        return updated, batch

    def _step(self, task: Task, batch: Batch, due: tuple[str, ...]) -> Updated:
        rate, step = self._numbers[0], self._numbers[1].long()
        with self._products():
            updated = self._take_step.update(task, [batch], rate, step)
        self._bank.apply(due, updated.ok, step)
        return updated

    def _graphed(self, key: Hashable, task: Task, packed: PackedBatch, due: tuple[str, ...]) -> _Graphed | None:
        """Return the captured step for ``key``, captured now if it is its third use; None: take it eagerly."""
        if self._bank.num_bindings != self._num_bindings:
            self._graphs.clear()  # the averages are in other memory than when these were captured
            self._num_bindings = self._bank.num_bindings
        if key in self._graphs:
            return self._graphs[key]
        self._uses[key] += 1
        if self._uses[key] < CAPTURED_AT_USE or len(self._graphs) == MAX_GRAPHS:
            return None
        data = torch.empty_like(packed.data, device=self._numbers.device)
        batch = packed.view(data)
        launch = self._capture(lambda: self._step(task, batch, due))
        return self._graphs.setdefault(key, _Graphed(data, launch))
