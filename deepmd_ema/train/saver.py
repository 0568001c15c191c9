"""What goes into each model file, and when files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank
from deepmd_ema.checkpoint.series import BestFiles, CheckpointSeries, save_together
from deepmd_ema.dist.world import World
from deepmd_ema.report.tables import RowTable
from deepmd_ema.tensors import cpu_copy
from deepmd_ema.train.bias import OUT_BIAS, Biases
from deepmd_ema.train.parallel import whole_state
from deepmd_ema.weights import LIVE


@dataclass(frozen=True)
class StateBuilder:
    """Builds the content of model files; tensors are copies on the CPU, so a later step cannot change them.

    Attributes:
        models: the live models.
        bank: averages, or None.
        config: normalized config of the run, ``sel`` resolved.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it was not looked for; by task if there
            are several.
        run: identifies the trajectory of weights; a restart keeps that of the checkpoint.
        writes: whether this process writes the files; the others take part where weights are sharded, and keep nothing.
    """

    models: nn.Module
    bank: AverageBank | None
    config: Mapping[str, Any]
    min_nbor_dist: float | Mapping[str, float | None] | None
    run: str
    writes: bool = True

    def training(self, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``model.ckpt-<step>.pt``: raw weights and everything that a restart needs."""
        return self._content("training", LIVE, step, {"model": whole_state(self.models, keep=self.writes), **state})

    def weights(self, name: str, step: int, kind: str) -> dict[str, Any]:
        """Return the content of a file of the weights ``name``: ``live``, or an average."""
        if name == LIVE or self.bank is None:
            return self._content(kind, name, step, {"model": whole_state(self.models, keep=self.writes)})
        info, tensors = self.bank.info(name), self.bank.weights(name, copy=False, keep=self.writes)
        return self._content(kind, name, step, {"average": {"profile": name, **info}, "model": tensors})

    def snapshot(self, name: str, step: int) -> dict[str, Any]:
        """Return a copy of the average ``name`` for ``dp-ema posthoc``; trained parameters are narrowed to float32.

        Averaged buffers are not: they are few, and the energies of the elements may be large.
        """
        assert self.bank is not None
        content = self.weights(name, step, "snapshot")
        if not self.writes:
            return content
        averaged = self.bank[name].tensor_names
        buffers = {n for n, _ in self.models.named_buffers()}
        narrow = {n: content["model"][n].to(torch.float32) for n in averaged if n not in buffers}
        return {**content, "averaged": list(averaged), "model": {**content["model"], **narrow}}

    def _content(self, kind: str, weights: str, step: int, content: Mapping[str, Any]) -> dict[str, Any]:
        if not self.writes:
            return {"average": content.get("average")}
        head = checkpoint.payload_head(kind, weights, step, self.config, self.min_nbor_dist, run=self.run)
        return cpu_copy({**head, **content})


@dataclass(frozen=True)
class Snapshots:
    """Kept copies of one average, from which ``dp-ema posthoc`` makes averages of other lengths.

    Attributes:
        name: of the average.
        series: names of the files; all of them stay.
        every: steps between two.
    """

    name: str
    series: CheckpointSeries
    every: int


@dataclass
class Saver:
    """Writes the live file and the averaged files of one step as one transaction.

    Attributes:
        builder: makes the content of the files.
        live: names and rotation of ``model.ckpt-*.pt``.
        averages: the same for each average, by its name.
        bests: best files, which are pruned once a checkpoint knows of them.
        every: steps between two checkpoints; 0 or less writes only the last.
        snapshots: kept copies of averages, at a cadence of their own and after the last step, also of a stopped run.
        world: the processes of the run; rank 0 writes.
        tables: their rows are on the disk before a checkpoint, from which a restart goes on without writing them again.
    """

    builder: StateBuilder
    live: CheckpointSeries
    averages: Mapping[str, CheckpointSeries]
    bests: Sequence[BestFiles]
    every: int
    snapshots: Sequence[Snapshots]
    world: World
    tables: Sequence[RowTable] = ()

    @property
    def link(self) -> Path:
        """Link to the newest training checkpoint."""
        return self.live.link

    def is_due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is written after ``step``."""
        return last or (self.every > 0 and step % self.every == 0)

    def snapshots_due(self, step: int, last: bool) -> list[Snapshots]:
        """Return the averages of which a copy is kept after ``step``."""
        return [s for s in self.snapshots if last or step % s.every == 0]

    def keep_snapshots(self, due: Sequence[Snapshots], step: int) -> None:
        """Write the copies of ``step`` of averages that have begun; files of an earlier run go when it is overtaken."""
        for kept in due:
            content = self.builder.snapshot(kept.name, step)
            with self.world.all_ranks_ok():
                if self.world.is_main and content["average"]["updates"]:
                    checkpoint.save(kept.series.file(step), content)
                    kept.series.rotate(step)

    def save(self, step: int, state: Mapping[str, Any], biases: Biases | None = None) -> list[str]:
        """Write all files of ``step``, move the links, rotate; return the names that were written.

        Args:
            step: optimizer steps so far.
            state: everything a restart needs beside the weights.
            biases: by name of the weights the biases (1, T, 1) in eV that were fitted again after the last step, by
                their names in the models. Averaged files have them in the model; the training file has them beside raw
                weights, so that a restart stays exact.
        """
        extra = {"refitted_bias": {name: _plain_bias(found) for name, found in biases.items()}} if biases else {}
        files = [(self.live, self.builder.training(step, {**state, **extra}))]
        for name, series in self.averages.items():
            content = self.builder.weights(name, step, "average")
            if biases and self.world.is_main:
                content["model"].update((n, bias.clone()) for n, bias in biases[name].items())
            files.append((series, content))
        written: list[Path] = []
        with self.world.all_ranks_ok():
            if self.world.is_main:
                for table in self.tables:
                    table.sync()
                written = save_together(step, files, self.bests)
        return [str(path) for path in written]


def _plain_bias(biases: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the bias itself where there is one model."""
    return biases[OUT_BIAS] if set(biases) == {OUT_BIAS} else dict(biases)
