"""Content of model files, and the steps at which they are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank
from deepmd_ema.checkpoint.series import (
    BestFiles,
    CheckpointSeries,
    on_rank0,
    save_together,
)
from deepmd_ema.checkpoint.writer import Writer
from deepmd_ema.config import RunConfig
from deepmd_ema.config.outputs import Outputs, Schedule, suffix_of
from deepmd_ema.distributed.tensors import HostCopies, Take, WholeTensors
from deepmd_ema.distributed.world import World
from deepmd_ema.report.curves import RowTable
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)

MakeState: TypeAlias = Callable[[Take], Mapping[str, Any]]
"""Returns the state of a run beside weights and averages; the argument saves each tensor of it."""


@dataclass
class StateBuilder:
    """Builds the content of model files.

    Tensors are copies on the CPU, so that a later step cannot change them. All files of a step
    share one copy of each tensor, which is dropped at :meth:`forget` or when another step is
    requested: between, neither weights nor averages may change, and no average be swapped in.

    Attributes:
        models: the live models.
        bank: averages, maybe none.
        config: normalized config of the run, ``sel`` resolved.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it was not looked
            for; by task if there are several.
        run: identifies the trajectory of weights; a restart keeps that of the checkpoint.
        num_steps: of the whole run, as planned.
        take_from: what this process saves of a tensor, made from the copies of a step.
        copies: copies of the tensors of a step. From a GPU they arrive later: see
            :meth:`HostCopies.arrival`.
        take: what this process saves of a tensor of that step, if it is to ``keep`` anything.
    """

    models: nn.Module
    bank: AverageBank
    config: Mapping[str, Any]
    min_nbor_dist: float | Mapping[str, float | None] | None
    run: str
    num_steps: int
    take_from: Callable[[HostCopies], Take] = WholeTensors
    copies: HostCopies = field(init=False)
    take: Take = field(init=False)
    # the step of the copies, and by weights the model as it is saved at this step
    _step: int | None = field(default=None, init=False)
    _models: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def training(self, step: int, state: MakeState) -> dict[str, Any]:
        """Return the content of ``model.ckpt-<step>.pt``, with everything that a restart needs."""
        # The weights first: a new step makes a new `take`, with which the state is then copied.
        content = {"model": self._weights(LIVE, step), **state(self.take)}
        if self.bank.names:
            # the copies for the files of averages serve here, too
            averaged = {name: self._weights(name, step) for name in self.bank.names}
            content["averages"] = self.bank.state_dict(averaged)
        return self._content("training", LIVE, step, content)

    def weights(self, name: str, step: int, kind: str) -> dict[str, Any]:
        """Return the content of a file of the weights ``name``: ``live``, or an average."""
        content: dict[str, Any] = {"model": dict(self._weights(name, step))}
        if name != LIVE:
            content["average"] = {"profile": name, **self.bank.info(name)}
        return self._content(kind, name, step, content)

    def snapshot(self, name: str, step: int) -> dict[str, Any]:
        """Return the content of a copy of the average ``name``, to be :func:`narrowed`.

        It is for ``dp-ema posthoc``.
        """
        content = self.weights(name, step, "snapshot")
        if not self.take.keep:
            return content
        return {**content, "averaged": list(self.bank[name].tensor_names)}

    def forget(self) -> None:
        """Keep no copies any longer than files need them."""
        self._step = None
        self._models = {}
        self.copies = HostCopies()
        self.take = self.take_from(self.copies)

    def _weights(self, name: str, step: int) -> dict[str, Any]:
        """Return the model with some weights, as this process saves it.

        Must be called by every rank when weights are sharded.
        """
        if step != self._step:
            self.forget()
            self._step = step
        if name not in self._models:
            if name == LIVE:
                # None: this process saves nothing of a tensor, and has only helped to gather it
                copies = {
                    n: self.take(tensor)
                    for n, tensor in self.models.state_dict().items()
                }
                self._models[name] = {
                    n: copy for n, copy in copies.items() if copy is not None
                }
            else:
                self._models[name] = self.bank.weights(name, take=self.take)
        return self._models[name]

    def _content(
        self, kind: str, weights: str, step: int, content: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the content of a file with its head.

        A process that writes nothing gets the numbers of the average only, by which it decides as
        the others do whether there is a snapshot.
        """
        if not self.take.keep:
            return {"average": content.get("average")}
        about = {"run": self.run, "num_steps": self.num_steps}
        head = checkpoint.payload_head(
            kind, weights, step, self.config, self.min_nbor_dist, **about
        )
        return {**head, **content}


def narrowed(snapshot: Mapping[str, Any], buffers: Iterable[str]) -> dict[str, Any]:
    """Return the content of a snapshot with its trained parameters in float32.

    Averaged buffers stay as they are: they are few, and the energies of the elements may be large.

    Args:
        snapshot: from :meth:`StateBuilder.snapshot`, its copies complete.
        buffers: names of the buffers of the models.
    """
    parameters = set(snapshot["averaged"]).difference(buffers)
    model = {
        n: t.to(torch.float32) if n in parameters else t
        for n, t in snapshot["model"].items()
    }
    return {**snapshot, "model": model}


class Saver:
    """Has the files of a step written beside training.

    Live and averaged files of one step are one transaction.

    Args:
        config: of the run.
        schedule: of the run.
        start: steps done before it, at a restart.
        builder: makes the content of the files.
        bests: best files, which are pruned once a checkpoint knows of them.
        tables: their rows are on the disk before a checkpoint, so that a restart does not write
            them again.
        writers: the processes that write sharded files together, or None.
        world: the processes of the run.

    Attributes:
        builder: makes the content of the files.
        writer: writes them, in the order in which they are given.
        live: names and rotation of ``model.ckpt-*.pt``.
        averages: the same for each average, by its name.
    """

    def __init__(
        self,
        config: RunConfig,
        schedule: Schedule,
        start: int,
        builder: StateBuilder,
        bests: Sequence[BestFiles],
        tables: Sequence[RowTable],
        writers: World | None,
        world: World,
    ) -> None:
        training, folder = config.training, Outputs(config).snapshot_folder
        # with `start` rotation knows the files of an earlier run, which it removes
        series = partial(
            CheckpointSeries, training.save_ckpt, start=start, writers=writers
        )
        self.builder = builder
        self._bests = bests
        self._tables = tables
        self.writer = Writer(world, everywhere=training.writes_shards)
        self.live = series(suffix_of(LIVE), training.save_dir, schedule.num_kept())
        self.averages = {
            a.name: series(
                suffix_of(a.name), training.save_dir, schedule.num_kept(a.ckpt_keep)
            )
            for a in training.averaging
        }
        # copies of averages for `dp-ema posthoc`: all of them stay (0), in a folder of their own
        self._snapshots = {
            name: series(suffix_of(name), folder, 0) for name in schedule.snapshots
        }

    def keep_snapshots(self, names: Sequence[str], step: int) -> None:
        """Write the snapshots of ``step`` of averages that have begun.

        Those of earlier runs up to this step are removed.
        """
        # Files of an earlier step are written first: host memory holds the state of one step.
        self.writer.begin(step)
        buffers = [name for name, _ in self.builder.models.named_buffers()]
        for name in names:
            content = self.builder.snapshot(name, step)
            # an average without an update is the live weights, and says nothing of its kind
            if content["average"]["updates"]:
                # Jobs in their order: first wait for the copies from a GPU, then write. The thread
                # of the writer waits for both, so that training continues at once.
                write = partial(
                    _write_snapshot, self._snapshots[name], step, content, buffers
                )
                self.writer.submit(self.builder.copies.arrival(), write)

    def keep_best(
        self, best: BestFiles, weights: str, step: int, done: Callable[[Path], None]
    ) -> None:
        """Write the best file of ``step``, which ``best`` has entered.

        Args:
            best: whose file.
            weights: ``live``, or the name of an average.
            step: optimizer steps so far.
            done: called with the path when it is written, in the thread of the writer.
        """
        self.writer.begin(step)
        content = self.builder.weights(weights, step, "best")
        self.writer.submit(
            self.builder.copies.arrival(), lambda: done(best.write(step, content))
        )

    def save(
        self,
        step: int,
        state: MakeState,
        refitted: Mapping[str, Mapping[str, Tensor]] | None = None,
        remark: str = "",
    ) -> None:
        """Write all files of ``step``, then move the links and rotate.

        Args:
            step: optimizer steps so far.
            state: everything a restart needs beside weights and averages.
            refitted: tensors that were fitted after the last step, by weights. Averaged files have
                them in the model; the training file has them beside raw weights, so that a restart
                stays exact.
            remark: line of the log when all is written, beside the names of the files.
        """
        # every rank copies its part of the state; the thread of the writer does the rest
        self.writer.begin(step)
        training = self.builder.training(step, state)
        if refitted is not None:
            training["refitted"] = {
                name: dict(tensors) for name, tensors in refitted.items()
            }
        files = [(self.live, training)]
        for name, series in self.averages.items():
            content = self.builder.weights(name, step, "average")
            if refitted is not None and self.builder.take.keep:
                # the model of the file is a dictionary of its own, which the training file, with
                # the averages as they were updated, does not share
                content["model"].update(
                    (n, tensor.clone()) for n, tensor in refitted.get(name, {}).items()
                )
            files.append((series, content))
        self.writer.submit(
            self.builder.copies.arrival(), partial(self._write, step, files, remark)
        )

    def _write(
        self,
        step: int,
        files: Sequence[tuple[CheckpointSeries, Mapping[str, Any]]],
        remark: str,
    ) -> None:
        """Write the files of a step, in the thread of the writer."""
        # Rows first: a checkpoint on the disk whose rows are lost would leave a gap in the tables.
        for table in self._tables:
            table.sync()
        logger.debug(
            "saved %s", ", ".join(map(str, save_together(step, files, self._bests)))
        )
        if remark:
            logger.debug("%s", remark)


def _write_snapshot(
    series: CheckpointSeries,
    step: int,
    content: Mapping[str, Any],
    buffers: Iterable[str],
) -> None:
    """Write a snapshot in the thread of the writer, where narrowing costs no time of a step."""
    series.save(step, narrowed(content, buffers))
    on_rank0(series.writers, lambda: series.rotate(step))
