"""The training loop. It owns the step counter and the order in which the parts act."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank
from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config import to_dict
from deepmd_ema.config.outputs import Schedule
from deepmd_ema.config.schema.loggers import FAILED, FINISHED, INTERRUPTED
from deepmd_ema.config.schema.optim import LKFConfig
from deepmd_ema.distributed.launch import END_SIGNALS, handling
from deepmd_ema.distributed.tensors import (
    HostCopies,
    OwnRows,
    Take,
    WholeTensors,
    map_tensors,
)
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import Interrupted, UserError
from deepmd_ema.model.model_set import unnested
from deepmd_ema.report.log import RunTimes
from deepmd_ema.report.record import RunRecord
from deepmd_ema.text import command
from deepmd_ema.training.interpolation import InterpolationControl
from deepmd_ema.training.modes import (
    check_replicas,
    compile_models,
    contexts_of_products,
    launches_graphs,
    pads,
    parallelize,
    why_no_graphs,
)
from deepmd_ema.training.prepare import Hook, PreparedRun, refit_bias, tracked_averages
from deepmd_ema.training.reporter import COMPARED_ROWS, Reporter
from deepmd_ema.training.restart import (
    outside_outputs,
    read_shards,
    reads_shards,
    state_of_tasks,
)
from deepmd_ema.training.saver import Saver, StateBuilder
from deepmd_ema.training.step import GradientStep, GraphedSteps
from deepmd_ema.training.tasks import TaskMixture
from deepmd_ema.training.validate import FullValidation, ValidationAborted
from deepmd_ema.training.weights import Start

logger = logging.getLogger(__name__)

# steps, on a GPU, between two checks whether another rank received a signal
STOP_POLL_INTERVAL = 10
# sent through the same all-reduce as signal numbers, which they exceed
TIME_IS_OVER, WRITER_FAILED = 1 << 15, 1 << 16
# time of the validation of as many frames as a step has, over that of the step: 0.16 to 0.37 for
# se_e2_a on two cores
FORWARD_SHARE = 0.25
# torchrun and the terminal both send Ctrl-C, and the second is then no wish to end at once
SAME_CTRL_C_S = 1.0


class Trainer:
    """Takes optimizer steps until ``num_steps``, and does what is due after each.

    Args:
        prepared: config, data and models of the run.
        start: where it starts; one that continues a run is loaded.
        world: the processes of the run.
        should_update: by name of an average, whether it is updated with the weights of a (step,
            epoch).
        input_file: named in the command that tests the model.
        callback: watches the run.
        record: file of what is known of the run beside its weights and errors.
        deadline: by ``time.monotonic``; the run ends after the step in which it passes.

    Attributes:
        tasks: the models with their losses and data.
        take_step: changes the weights.
        bank: averages, maybe none.
        validator: full validation.
        saver: writes checkpoints.
        reporter: learning curves and progress.
        times: stopwatch of the run.
        schedule: of the whole run.
        num_steps: of the whole run; an early stop makes the current step the last one.
        interpolation: of the embedding nets.
        graphs: takes steps as CUDA graphs instead of ``take_step`` and ``bank``; or None.
        products: context of matrix products in a step.
        step: optimizer steps so far.
        stop: the signal that ends the run, if one was received.
        is_out_of_time: whether the run has ended because its time was over.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        start: Start,
        world: World,
        should_update: Mapping[str, Hook] | None = None,
        input_file: str = "input.json",
        callback: Callback | None = None,
        record: RunRecord | None = None,
        deadline: float = math.inf,
    ) -> None:
        # Move the models to the device before anything refers to their memory.
        config, models = prepared.config, prepared.models.to(world.device)
        training, run_id = config.training, start.run_id(config)
        self.prepared = prepared
        self.world = world
        self.input_file = input_file
        self.deadline = deadline
        self.callback = callback or Callback()
        self.record = record or RunRecord()

        # The order of the tasks, and the steps after which something is due: functions of seed and
        # step, so that a restart needs no state of them.
        shares = (length.share for length in prepared.length.tasks.values())
        self.tasks = TaskMixture(prepared.tasks.values(), shares, prepared.seed)
        self.num_steps = num_steps = prepared.length.num_steps
        self.schedule = schedule = Schedule(config, num_steps)

        # Take the first batch of each task from rank 0: all ranks choose series and compile for the
        # same frames, and so does a restart.
        first = world.broadcast_from_rank0(
            lambda: {task.name: task.train_loader.batch(0) for task in self.tasks}
        )
        batches = {name: batch.to(world.device) for name, batch in first.items()}

        # Choose the embedding nets that are interpolated, before compilation, because their number
        # of terms is a constant of the code. The state was called "splines" in 0.1.0.
        state = start.payload.get("interpolation", start.payload.get("splines", {}))
        with (
            checkpoint.reading(start.path, "interpolation") if state else nullcontext()
        ):
            self.interpolation = InterpolationControl(models, world, batches, state)

        # Compile before the models are sharded: one rank may then compile while others wait for its
        # code. Loaders pad the batches of what could be compiled.
        self.products, in_validation = contexts_of_products(
            config, models, world.device
        )
        contexts = (self.products, in_validation)
        config_as_run = compile_models(config, models, batches, world, contexts)
        for task in self.tasks:
            task.train_loader.pad, display_pad = pads(
                config, models.compiler, world, task.model.layout
            )
            if task.display_loader is not None:
                task.display_loader.pad = display_pad

        # Shard the models, or have gradients exchanged. Only now a rank can read its shards of a
        # checkpoint, if it does not have all weights yet.
        module = parallelize(models, world, training.zero_stage)
        if reads_shards(start, config):
            read_shards(start, models)

        # Start the averages, which need the weights, as they are distributed over the ranks.
        profiles = tracked_averages(
            config, prepared.length.steps_per, should_update, num_steps
        )
        self.bank = AverageBank(models.by_task, profiles, around=models)

        # The stopwatch, which also estimates the time left. Until the first validation has been
        # measured, its time is estimated as that of some steps.
        frames = sum(
            system.num_frames
            for task in prepared.tasks.values()
            for system in task.valid
        )
        validation_steps = (
            FORWARD_SHARE
            * len(config.fully_validated)
            * frames
            / prepared.length.frames_per_step
        )
        due = {"checkpoint": schedule.checkpoint}
        if schedule.validation is not None:
            due["validation"] = schedule.validation
        self.times = RunTimes(due, {"validation": validation_steps})

        # Learning curves and progress, full validation. Ranks that write shards have another
        # process group for their files: the thread of the writer may be in a collective while the
        # loop is in one.
        self.reporter = Reporter(
            prepared, self.tasks, self.bank, run_id, world, self.times, in_validation
        )
        writers = world.for_writer() if training.writes_shards else None
        self.validator = FullValidation(
            prepared, self.bank, writers, world, in_validation
        )

        # Checkpoints: rank 0 writes whole tensors, or each rank its rows. A checkpoint is written
        # after the rows of the tables up to its step, and best files are pruned after it.
        bests = [row.best for row in self.validator.rows if row.best is not None]
        logs = [row.log for row in self.validator.rows if row.log is not None]
        tables = [*filter(None, self.reporter.curves.values()), *logs]
        take_from: Callable[[HostCopies], Take] = partial(
            WholeTensors, keep=world.is_main
        )
        if training.writes_shards:
            take_from = partial(OwnRows, world.rank, world.size)
        distances = unnested(
            {name: model.min_nbor_dist for name, model in models.by_task.items()}
        )
        builder = StateBuilder(
            models,
            self.bank,
            to_dict(config_as_run),
            distances,
            run_id,
            num_steps,
            take_from,
        )
        self.saver = Saver(
            config, schedule, start.step, builder, bests, tables, writers, world
        )

        # The steps, with their optimizer, after sharding: moments have the shards of the weights.
        # A CUDA graph contains the averages, too, so it needs the bank.
        self.graphs: GraphedSteps | None = None
        if isinstance(config.optimizer, LKFConfig):
            from deepmd_ema.training.kalman import KalmanStep

            self.take_step: GradientStep | KalmanStep = KalmanStep(prepared, num_steps)
        else:
            self.take_step = gradient_step = GradientStep(
                prepared, module, num_steps, world
            )
            if launches_graphs(config, world):
                self.graphs = GraphedSteps(
                    gradient_step, self.bank, world.device, self.products
                )
        if training.cuda_graphs and self.graphs is None:
            logger.warning(
                "training.cuda_graphs has no effect: %s.", why_no_graphs(config, world)
            )

        # The state of the loop.
        self.step = 0
        self.stop = StopRequest()
        self.is_out_of_time = False
        self._validation_pending = (
            False  # one that was broken off is made again after a restart
        )
        self._saved = -1  # step of the last checkpoint
        self._windows = ""  # lengths of the averages, as last logged
        self._refitted: Mapping[
            str, Mapping[str, Tensor]
        ] = {}  # after the last step, by weights
        # whether loaded weights are validated before the first step; a restart has these errors
        self._validates_before = bool(start.sources)

        # Continue a checkpoint, last, because all parts load their own state.
        if start.payload:
            logger.info(
                "restart after step %d of %s: weights, optimizer, averages, order of frames, "
                "learning rate and logs are continued",
                start.step,
                start.path,
            )
            self.load_state_dict(start)
        models.train()

    def run(self) -> None:
        """Train from the current step to ``num_steps``, or until the time is over.

        Raises:
            Interrupted: after one of ``END_SIGNALS`` or Ctrl-C, with the current step saved.
            DivergedError: at the first non-finite loss or gradient; nothing bad was saved.
        """
        # A check for signals waits for other ranks. On GPUs, where the host runs ahead of the
        # device, it is made in some steps only.
        poll_every = (
            STOP_POLL_INTERVAL
            if self.world.size > 1 and self.world.device.type != "cpu"
            else 1
        )
        with handling((*END_SIGNALS, signal.SIGINT), self.stop.request):
            try:
                self.record.write(
                    first_step=self.step, step=self.step, num_steps=self.num_steps
                )
                self.reporter.start(self.step)
                self.callback.on_start(self)
                # ranks of other machines may differ: reported now, not at the first checkpoint
                check_replicas(self.validator.models, self.world, self.step)
                # the errors of loaded weights, with which those of the end are compared
                if (
                    self._validates_before
                    and self.schedule.validation is not None
                    and self.validator.rows
                ):
                    # a stop that is requested meanwhile ends the run as always, after the first
                    # step
                    with self.times.of("validation"), suppress(ValidationAborted):
                        self.reporter.show_before(
                            self.validator.errors(self._is_stopped)
                        )
                try:
                    if self._validation_pending:
                        self._validate()
                    # a run of 0 steps, or one that has all its steps, still writes its files
                    if self.step >= self.num_steps:
                        self._save()
                    while self.step < self.num_steps:
                        self.advance()
                        if (
                            self.step % poll_every == 0
                            and self._is_stopped()
                            and self.step < self.num_steps
                        ):
                            self._leave()
                            break
                    # errors on the test data, once, with the weights of the end and the best ones
                    if self.step >= self.num_steps and self.validator.tested:
                        self.saver.writer.finish()  # best weights are read from their files
                        with self.times.of("test"):
                            tested = self.validator.test(
                                self.step, self._refitted, self._is_stopped
                            )
                        self.record.part.test = self.reporter.show_test(tested)
                except (
                    ValidationAborted
                ):  # a stop was requested in a validation or in the test
                    self._leave()
                self.reporter.warn_if_nothing_is_learned(
                    self.step, self.take_step.remedy
                )
                self.saver.writer.finish()
            except BaseException as error:
                was_stopped = isinstance(error, Interrupted | KeyboardInterrupt)
                with suppress(
                    OSError, UserError
                ):  # the first error is the one to report
                    self._close(INTERRUPTED if was_stopped else FAILED)
                raise
            self._close(FINISHED)
        self.callback.on_end(self)

    def _close(self, status: str) -> None:
        """End the threads of the writer, the loggers and the loaders."""
        try:
            self.saver.writer.close()
            self.reporter.close(status)
        finally:
            self.tasks.close()

    def advance(self) -> None:
        """Take one step, and do what is due after it."""
        with self.callback.during(self, "step"):
            # task, rate and frames are functions of the step; the rate is that after step - 1
            # updates
            number = self.step + 1
            task, rate = self.tasks.draw(number), self.take_step.schedule(self.step)
            epoch = number / self.prepared.length.steps_per["epochs"]
            with self.times.of("data"):
                batches: Sequence[Batch | PackedBatch] = [
                    next(task.train_loader) for _ in range(task.accumulate)
                ]
            # A GPU's own thread of the backward pass counts the operations of second derivatives
            # apart. The order in which gradients are added would depend on the steps before, and a
            # restart would not be bitwise.
            with (
                self.times.of("step"),
                torch.autograd.set_multithreading_enabled(False),
            ):
                self.interpolation.before_step(number)
                if self.graphs is not None and isinstance(batches[0], PackedBatch):
                    updated, batch = self.graphs(task, batches[0], rate, number, epoch)
                    self.step, batches = number, [batch]
                else:
                    if (
                        len(batches) == 1
                    ):  # each of several is copied when it is its turn
                        batches = [batches[0].to(self.world.device)]
                    with self.products():
                        updated = self.take_step.update(task, batches, rate, number)
                    self.step = number
                    if self.take_step.checks_are_free:
                        self._raise_if_diverged()
                    # a step that was checked on the host is good; else the device decides, and
                    # nothing waits for it
                    self.bank.update(
                        None if self.take_step.checks_are_free else updated.ok, epoch
                    )

            # Everything that is due after the step. On a GPU the host now looks whether the steps
            # so far were finite, before it shows or saves anything.
            self.callback.after_update(self)
            self.reporter.record(number, task, rate, updated.values)
            if number in self.schedule.rows:
                self._raise_if_diverged()
                with self.callback.during(self, "display"):
                    self.reporter.show(number, task, batches, rate, updated.values)
            snapshots = [
                name for name, due in self.schedule.snapshots.items() if number in due
            ]
            if snapshots:  # before a validation, which a stop may break off
                self._raise_if_diverged()
                with self.times.of("snapshot"):
                    self.saver.keep_snapshots(snapshots, number)
            if (
                (due := self.schedule.validation) is not None
                and number in due
                and self.validator.rows
            ):
                self._raise_if_diverged()
                self._validate()
            # a validation may have made it the last
            if number in self.schedule.checkpoint or number == self.num_steps:
                self._raise_if_diverged()
                self._save()
            elif number in self.schedule.rows:
                self._note()
            # nothing more is due: copies are kept only as long as files need them
            self.saver.builder.forget()
        self.callback.after_step(self)

    def _is_stopped(self) -> bool:
        """Whether some rank received a signal or is out of time.

        All ranks then stop after this step. They also agree on which models are compiled. Must be
        called by every rank.

        Raises:
            UserError: if files could not be written since the last check.
        """
        # this rank's reason to stop, the larger the more urgent; the end of a run is not broken off
        is_late = self.step < self.num_steps and time.monotonic() >= self.deadline
        reason = self.stop.signal or TIME_IS_OVER * is_late
        reason = WRITER_FAILED if self.saver.writer.error is not None else reason
        compiler = self.validator.models.compiler
        is_refused = compiler is not None and compiler.refused[1] != ""
        # one exchange for both
        largest, is_refused_by_any = self.world.all_reduce_max([reason, is_refused])
        if compiler is not None and is_refused_by_any:
            compiler.agree(self.world)
        if largest == WRITER_FAILED:
            self.saver.writer.begin()  # raises the error of the writer, on all ranks
        self.is_out_of_time = largest == TIME_IS_OVER
        if 0 < largest < TIME_IS_OVER and self.stop.signal is None:
            self.stop.signal = signal.Signals(largest)
        return largest > 0

    def _validate(self) -> None:
        """Make the full validation of this step, which may end the run early."""
        # until it is complete: a restart from a checkpoint that is saved meanwhile makes it again
        self._validation_pending = True
        entered = partial(self.callback.in_validation, self)
        with self.callback.during(self, "validation"), self.times.of("validation"):
            results = self.validator.run(
                self.step, self.saver, self._is_stopped, entered
            )
        self._validation_pending = False
        best = [
            b.row.name for b in self.validator.best_weights() if b.step == self.step
        ]
        self.reporter.show_validation(self.step, results, best)
        self.reporter.warn_if_nothing_is_learned(
            self.step, self.take_step.remedy, COMPARED_ROWS
        )
        if (why := self.validator.stopped_early) and self.step < self.num_steps:
            logger.info(
                "early stop after step %d of %d: %s", self.step, self.num_steps, why
            )
            self.record.early_end = why
            self.num_steps = self.step
            self._keep_last_snapshots()

    def _keep_last_snapshots(self) -> None:
        """Write the snapshots that are due only because the run ends after this step."""
        names = [
            name
            for name, due in self.schedule.snapshots.items()
            if self.step not in due
        ]
        self.saver.keep_snapshots(names, self.step)

    def _save(self) -> None:
        """Write a checkpoint, with a fitted bias after the last step if it is requested."""
        with self.callback.during(self, "checkpoint"):
            if (
                self.prepared.config.training.change_bias_after_training
                and self.step >= self.num_steps
            ):
                if self._saved < self.step:
                    # the fit reads many frames: what ends it early costs no step of the run
                    self._write()
                self._refitted = refit_bias(self.prepared, self.bank)
            self._write()

    def _write(self) -> None:
        """Have the checkpoint of this step written, and log the lengths of averages that changed.

        Must be called by every rank.
        """
        # weights that differ between ranks are reported in place of being saved
        check_replicas(self.validator.models, self.world, self.step)
        averages = {
            name: self.bank.info(name) for name in self.bank.names
        }  # waits for the device
        windows = "; ".join(
            f"{name}: decay {info['effective_decay']:.6g}, looks back {info['mean_age']:,.1f} "
            "steps on average"
            if info["updates"]
            else f"{name}: no update yet"
            for name, info in averages.items()
        )
        # the windows of most averages stay the same once their warm-up is over
        is_new = windows not in ("", self._windows)
        remark = f"averages of step {self.step:,}: {windows}" if is_new else ""
        self._windows = windows
        with self.times.of("checkpoint"):
            self.saver.save(self.step, self.state_dict, self._refitted or None, remark)
        self._saved = self.step
        self._note(averages)

    def _note(self, averages: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Update the record of the run.

        Args:
            averages: numbers of the averages at a checkpoint, with which the file is written at
                once.
        """
        seconds = {**self.times.seconds, **self.take_step.laps}
        self.record.note(
            self.step, seconds, self.times.left(self.step, self.num_steps), averages
        )

    def _leave(self) -> None:
        """Save the current step; raise Interrupted unless only the time is over."""
        self._raise_if_diverged()
        self._keep_last_snapshots()
        # again, if a validation was broken off after the step was saved: the restart repeats it
        if self._saved != self.step or self._validation_pending:
            self._save()
        self.saver.writer.finish()
        if self.is_out_of_time:
            return
        assert self.stop.signal is not None
        raise Interrupted(
            f"stopped by {self.stop.signal.name} after step {self.step:,} of {self.num_steps:,}; "
            f"everything is saved. Continue with: {restart_command(self)}",
            self.stop.signal,
        )

    def _raise_if_diverged(self) -> None:
        self.take_step.raise_if_diverged(self.tasks, self.step, self.world)

    def state_dict(self, take: Take) -> dict[str, Any]:
        """Return everything a restart needs beside weights and averages.

        Args:
            take: what is saved of each tensor.
        """
        return {
            "optimizer": self.take_step.state_dict(take),
            "streams": self.tasks.state_dict(),
            "display": map_tensors(take, self.reporter.state_dict()),
            "validation_pending": self._validation_pending,
            "interpolation": self.interpolation.state_dict(),
            **self.validator.state_dict(),
        }

    def load_state_dict(self, start: Start) -> None:
        """Continue after the step of a checkpoint, with the next step of an uninterrupted run."""
        # each part in a context that reports damage of the file with its name
        path, step = start.path, start.step
        with checkpoint.reading(path):
            state = state_of_tasks(
                start, self.validator.models, self.tasks.state_dict()
            )
        self.step = self._saved = step
        training = self.prepared.config.training
        in_epochs = ("numb_epoch", "num_epoch_dict")
        chosen = (o for o in in_epochs if getattr(training, o, None))
        option = next(chosen, "numb_steps")
        before = start.payload.get("num_steps", self.num_steps)
        if option in in_epochs and before != self.num_steps:
            logger.warning(
                "the epochs of the input are %d steps now and were %d: a decaying learning rate "
                "continues along its new curve. Steps before the restart count as steps of today, "
                "so that the run has another number of epochs in all.",
                self.num_steps,
                before,
            )
        if step >= self.num_steps:
            logger.warning(
                "step %d is the last of %d already: nothing is left to train. Raise training.%s "
                "to continue.",
                step,
                self.num_steps,
                option,
            )
        if self.bank.names or not state.get("averages"):
            with checkpoint.reading(path, "averages"):
                self.bank.load_state_dict(state.get("averages"), step)
        else:
            logger.info(
                "averaging is off in this run (training.averaging): the raw weights are trained "
                "on, and the averages of the checkpoint (%s) are left behind",
                ", ".join(state["averages"]["profiles"]),
            )
        with checkpoint.reading(path, "optimizer"):
            self.take_step.load_state_dict(state["optimizer"])
        with checkpoint.reading(path, "streams"):
            self.tasks.load_state_dict(state["streams"])
        with checkpoint.reading(path, "display"):
            self.reporter.load_state_dict(state["display"], step)
        self._validation_pending = bool(
            state["validation_pending"] and self.validator.rows
        )
        # a validation that was broken off is made again: its rows are cut, with those after it
        with checkpoint.reading(path, "best or early_stop"):
            self.validator.load_state_dict(state, step - self._validation_pending)
        if (why := self.validator.stopped_early) and step < self.num_steps:
            self.record.early_end = why
            self.num_steps = step
            logger.warning(
                "step %d ended the run early: %s. Nothing is left to train. Raise "
                "validating.early_stop.patience, or remove early_stop, to continue.",
                step,
                why,
            )


def restart_command(trainer: Trainer) -> str:
    """Return the command that continues a run from its newest checkpoint."""
    launched = ", launched as before" if trainer.world.size > 1 else ""
    arguments = ["dp-ema", "train", "--restart", trainer.saver.live.link]
    # a checkpoint alone, perhaps of somebody else, may not choose places outside of the folder
    if outside_outputs(trainer.prepared.config):
        arguments.append(trainer.input_file)
    return command(*arguments) + launched


class StopRequest:
    """The first of ``END_SIGNALS`` or Ctrl-C, which the loop checks after a step.

    A second Ctrl-C ends the run at once.
    """

    signal: signal.Signals | None = None
    _since = 0.0

    def request(self, number: int, _frame: FrameType | None = None) -> None:
        """Ask the run to stop, as the signal ``number`` does."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._since = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_CTRL_C_S:
            raise KeyboardInterrupt


class Callback:
    """Watches a run; the trainer calls these methods, which do nothing here.

    It must not change what it is shown.

    Everything of the trainer that has no underscore may be read; ``trainer.stop.request`` ends a
    run as a signal does.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step, after a restart has loaded everything."""

    def during(self, trainer: Trainer, phase: str) -> AbstractContextManager[Any]:
        """Return the context of a ``step`` with all that is due after it, or in it of one of these.

        They are a ``display``, a ``validation`` and a ``checkpoint``.
        """
        return nullcontext()

    def after_update(self, trainer: Trainer) -> None:
        """Called when weights and averages are updated, before anything is shown or saved."""

    def in_validation(self, trainer: Trainer, weights: str) -> None:
        """Called before weights are evaluated, ``live`` or an average, which are in the models."""

    def after_step(self, trainer: Trainer) -> None:
        """Called when everything that was due after a step is done."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step, when all is saved and closed."""
