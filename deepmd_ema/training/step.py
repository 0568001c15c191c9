"""Training steps that follow the gradient of the loss, as CUDA graphs too, and their guard."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.distributed.tensors import Take
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import DivergedError
from deepmd_ema.optim.build import (
    build_optimizer,
    clip_gradients,
    guarded_step,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
)
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.text import first_few
from deepmd_ema.training.loss import LossOverBatches, root_of
from deepmd_ema.training.modes import LAST_REPLICATED_STAGE, Products
from deepmd_ema.training.prepare import PreparedRun
from deepmd_ema.training.tasks import Task, TaskMixture

logger = logging.getLogger(__name__)


class Updated(NamedTuple):
    """Result of a step, on the device.

    Attributes:
        values: name to detached scalar for the learning curve (``rmse``, ``rmse_e``, ...).
        ok: scalar, 1 when loss and gradients were finite and the update was made, else 0.
    """

    values: Mapping[str, Tensor]
    ok: Tensor


class Step:
    """Base of what takes the steps of a run; a subclass says how batches change the weights.

    After the first step that was not finite no later one changes the weights, on the device and
    without waiting for it; :meth:`raise_if_diverged` then names the step.

    Args:
        module: owner of the parameters, by the names that checkpoints use.
        schedule: learning rate after so many steps.

    Attributes:
        schedule: as given.
        laps: seconds of the parts of the steps so far, on a device that the host waits for.
        checks_are_free: whether reading a number from the device costs no wait, so that each step
            may be checked.
    """

    skipped = "by that step"  # updates of the weights that are left out
    remedy = "lower learning_rate.start_lr, or set training.gradient_max_norm"

    def __init__(self, module: nn.Module, schedule: Callable[[int], float]) -> None:
        self.schedule = schedule
        # Looked up once: a module that FSDP has left gathered after a forward pass has other
        # objects under the same names.
        self._named = dict(module.named_parameters())
        self._trained = [p for p in self._named.values() if p.requires_grad]
        # Number of the first step that was not finite, 0 if there is none. It is on the device,
        # where each step compares and changes it in place, so that a CUDA graph can do so.
        self._first_bad = torch.zeros(
            (), dtype=torch.int64, device=self._trained[0].device
        )
        self.checks_are_free = self._first_bad.device.type == "cpu"
        self.laps = dict[str, float]()
        self._lap_began = 0.0
        # whether the loss of this rank's frames was not finite in that step
        self._own_fault = torch.zeros(
            (), dtype=torch.bool, device=self._trained[0].device
        )

    def _lap(self, part: str = "") -> None:
        """Count the time since the last call under ``part``; without a name it only begins."""
        if self.checks_are_free:  # the host does not wait for a GPU
            now = time.perf_counter()
            if part:
                self.laps[part] = self.laps.get(part, 0.0) + now - self._lap_began
            self._lap_began = now

    def raise_if_diverged(
        self, tasks: TaskMixture, last_step: int, world: World
    ) -> None:
        """Check that every step so far was finite.

        Waits for the device. Must be called by every rank.

        Raises:
            DivergedError: with step, task and frames of the first that was not.
            RankLostError: where the loss of frames of other ranks alone was not finite.
        """
        bad = int(self._first_bad)  # the same on all ranks
        if not bad:
            return
        # the step may be some steps back: count the steps of its task since then
        task = tasks.draw(bad)
        steps_since = sum(
            tasks.draw(step) is task for step in range(bad, last_step + 1)
        )
        frames = task.frames_of_step(steps_since)
        shown = first_few([f"{system} frame {index}" for system, index in frames], 8)
        named = f" (task {task.name})" if task.name else ""
        error = DivergedError(
            f"step {bad}{named}: the loss or a gradient is not finite. Frames of the batch: "
            f"{shown}. The weights were not updated {self.skipped}, and no checkpoint contains "
            f"non-finite values. Look at these frames with `dp-ema check`, {self.remedy}."
        )
        # The ranks whose frames have caused it name them, and the others end without a message of
        # their own. Where no rank has (the gradient alone is not finite), all of them do.
        with world.all_ranks_ok():
            if self._own_fault:
                raise error
        raise error

    def _note(
        self, finite: Tensor, step: int | Tensor, finite_here: Tensor | None = None
    ) -> Tensor:
        """Return 1, or 0 if ``step`` or one before it was not finite; note the first such step.

        Args:
            finite: scalar, the same on all ranks, so that all of them decide alike.
            step: from 1; a scalar on the device if the host shall give no number.
            finite_here: whether what this rank alone has computed is finite; ``finite`` if None.
        """
        before = self._first_bad == 0
        good = finite & before
        # up to the first bad step it is that of the current step, and then it stays
        fault = ~(finite if finite_here is None else finite_here)
        torch.where(before, fault, self._own_fault, out=self._own_fault)
        # good ^ before is true in the first bad step only: the sum is its number
        self._first_bad.add_((good ^ before) * step)
        return good.to(torch.float32)


class GradientStep(Step):
    """Follows the gradient of the loss with an optimizer.

    Args:
        prepared: models and config of the run.
        parallel_module: what is called: the models, or what exchanges gradients between ranks.
        num_steps: length of the run.
        world: the processes of the run.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        parallel_module: nn.Module,
        num_steps: int,
        world: World,
    ) -> None:
        config, stage = prepared.config, prepared.config.training.zero_stage
        assert not isinstance(config.optimizer, LKFConfig)  # LKF has KalmanStep
        lr = config.learning_rate
        super().__init__(prepared.models, build_schedule(lr, num_steps))
        self._parallel_module = parallel_module
        self._optimizer = build_optimizer(
            config.optimizer,
            self._named,
            shared=stage == 1,
            names=prepared.models.first_names(),
            warmup=(lr.num_warmup_steps(num_steps), lr.warmup_start_factor),
        )
        self._cpu_group = world.cpu_group
        # DistributedDataParallel has `no_sync`. FSDP adds each gradient to its shards at once: no
        # rank has memory for whole ones.
        self._without_exchange = getattr(parallel_module, "no_sync", nullcontext)
        self._max_norm = config.training.gradient_max_norm or None  # 0: no clipping
        # for the norm of all gradients, where each rank holds a part of every gradient
        self._all_reduce_sum = (
            world.all_reduce_sum if stage > LAST_REPLICATED_STAGE else None
        )

    def update(
        self,
        task: Task,
        batches: Sequence[Batch | PackedBatch],
        rate: float | Tensor,
        step: int | Tensor,
    ) -> Updated:
        """Update the weights once with the frames of all batches.

        Args:
            task: whose batches they are.
            batches: one on the device, or several in host memory, whose gradients are added up.
            rate: learning rate, or a scalar in float64 on the device.
            step: from 1, or an int64 scalar on the device. With both on a CUDA device, no number of
                the host is used, and all memory that is kept from one step to the next is changed
                in place.
        """
        set_learning_rate(self._optimizer, rate)
        # None, not zero: with several tasks the optimizer skips parameters without a gradient
        self._optimizer.zero_grad(set_to_none=True)
        self._lap()
        if len(batches) == 1:
            batch = batches[0].to(self._first_bad.device)
            total, values = task.loss(
                self._parallel_module(task.name, batch, **task.loss.needs(batch)),
                batch,
                rate,
            )
            self._lap("forward")
            total.backward()
            self._lap("backward")
        else:
            total, values = self._add_gradients(task, batches, rate)
        norm = clip_gradients(self._trained, self._max_norm, self._all_reduce_sum)
        # Gradients and the displayed loss are the same on all ranks, so that all of them skip the
        # same steps. Nothing waits for the device: the fused update reads the flag there.
        finite = torch.isfinite(norm) & torch.isfinite(root_of(values))
        ok = self._note(finite, step, finite_here=torch.isfinite(total.detach()))
        guarded_step(self._optimizer, 1 - ok, step)
        self._lap("optimizer")
        return Updated(values, ok)

    def _add_gradients(
        self, task: Task, batches: Sequence[Batch | PackedBatch], rate: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take the gradient of the loss of several batches, one at a time on the device.

        Returns:
            The share of this rank in the loss, detached, and the values to display.
        """
        loss, totals = LossOverBatches(task.loss, batches, rate), []
        for number, host_batch in enumerate(batches, 1):
            batch = host_batch.to(self._first_bad.device)
            # in the last backward pass ranks exchange the sums of all batches, once
            with nullcontext() if number == len(batches) else self._without_exchange():
                total = loss.add(
                    self._parallel_module(task.name, batch, **task.loss.needs(batch)),
                    batch,
                )
                self._lap("forward")
                total.backward()
                self._lap("backward")
            totals.append(total.detach())
        return torch.stack(totals).sum(), loss.displayed()

    def state_dict(self, take: Take) -> dict[str, Any]:
        """Return moments and counters by parameter name. Must be called by every rank."""
        return optimizer_state(self._optimizer, self._named, take, self._cpu_group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the moments and counters of ``state``."""
        load_optimizer_state(self._optimizer, self._named, state)


# The use of a shape at which it is captured: cuBLAS and the caching allocator then have what they
# need, and shapes that come once cost no graph.
CAPTURED_AT_USE = 3
MAX_GRAPHS = 64  # each takes some MB of its nodes; further shapes stay eager


class GraphedSteps:
    """Takes steps, each with the averages after it, by one launch from the third use of a shape on.

    Everything that differs from step to step is in buffers that stay in their place: the bytes of
    the batch, the learning rate and the number of the step. A step is captured once for each task,
    layout of a batch and set of averages that are due. Other steps run eagerly by the same
    function, so that the bits do not depend on which steps are captured. Averages that are kept on
    the host are updated after the launch.

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
        products: Products,
    ) -> None:
        self._take_step = take_step
        self._bank = bank
        self._products = products
        self._pool: Any = (
            None  # memory that all graphs share, of which one runs at a time
        )
        self._numbers = torch.zeros(
            2, dtype=torch.float64, device=device
        )  # learning rate and step
        self._uses: Counter[Hashable] = Counter()
        # by task, layout and averages: the buffer of a batch, and the step
        self._graphs: dict[Hashable, tuple[Tensor, Callable[[], Updated]]] = {}
        self._num_bindings = 0
        self._max_graphs = MAX_GRAPHS

    def capture(self, step: Callable[[], Updated]) -> Callable[[], Updated]:
        """Return a function that launches all kernels of ``step`` at once.

        Recording does not take the step.

        Args:
            step: makes no tensor of host numbers and does not wait for the device.
        """
        graph = torch.cuda.CUDAGraph()
        # other threads, those of the loader and the writer, may allocate and wait meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, capture_error_mode="thread_local"
        ):
            updated = step()
        self._pool = graph.pool()

        def launch() -> Updated:
            graph.replay()
            return updated  # held here, so that no other graph gets its memory

        return launch

    def __call__(
        self, task: Task, packed: PackedBatch, rate: float, step: int, epoch: float
    ) -> tuple[Updated, Batch]:
        """Update weights and averages with one batch; return the result, and the batch on the GPU.

        Args:
            task: whose batch it is.
            packed: the batch in page-locked memory.
            rate: learning rate.
            step: from 1.
            epoch: for averages whose updates depend on it.
        """
        # a new tensor each time: the copy of the step before may not have been made yet
        self._numbers.copy_(
            torch.tensor([rate, step], dtype=torch.float64).pin_memory(),
            non_blocking=True,
        )
        # averages in host memory cannot be part of a graph: they are updated after the launch
        due = self._bank.begin(epoch)
        far = [name for name in due if self._bank[name].staging is not None]
        due = tuple(name for name in due if name not in far)
        if self._bank.num_bindings != self._num_bindings:
            self._graphs.clear()  # the averages are in other memory than when these were captured
            # The first update after a binding copies the counts of the averages from the host, and
            # the optimizer makes the moments of parameters that are trained from now on. A graph
            # would repeat both at every launch, so steps are eager again as at the start of a run.
            self._uses.clear()
            self._num_bindings = self._bank.num_bindings
        # everything that decides which kernels a step launches, with which sizes
        key = (task.name, packed.layout, due)
        self._uses[key] += key not in self._graphs
        if (
            key not in self._graphs
            and self._uses[key] >= CAPTURED_AT_USE
            and len(self._graphs) < self._max_graphs
        ):
            buffer = torch.empty_like(packed.data, device=self._numbers.device)
            static_batch = packed.view(buffer)
            try:
                graph = self.capture(lambda: self._step(task, static_batch, due))
                self._graphs[key] = buffer, graph
            except RuntimeError as error:
                self._max_graphs = len(self._graphs)  # no further capture is tried
                reason = str(error).splitlines()[0]
                logger.warning(
                    "step %d: torch could not capture a CUDA graph (%s); steps stay eager",
                    step,
                    reason,
                )
        if key in self._graphs:
            buffer, launch = self._graphs[key]
            buffer.copy_(packed.data, non_blocking=True)
            batch, updated = packed.view(buffer), launch()
        else:
            batch = packed.to(self._numbers.device)
            updated = self._step(task, batch, due)
        self._bank.apply(far, updated.ok)
        return updated, batch

    def _step(self, task: Task, batch: Batch, due: tuple[str, ...]) -> Updated:
        rate, step = self._numbers[0], self._numbers[1].long()
        with self._products():
            updated = self._take_step.update(task, [batch], rate, step)
        self._bank.apply(due, updated.ok, step)
        return updated
