"""What goes into each model file, and when files are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepmd_ema import __version__, checkpoint
from deepmd_ema.train.validate import LIVE

if TYPE_CHECKING:
    from torch import nn

    from deepmd_ema.averaging import AverageBank


@dataclass(frozen=True)
class Payloads:
    """Builds the content of model files; tensors are copies on the CPU, so a later step cannot change them.

    Attributes:
        model: the live model.
        bank: averages, or None.
        config: normalized config of the run, ``sel`` resolved.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it was not looked for.
    """

    model: nn.Module
    bank: AverageBank | None
    config: Mapping[str, Any]
    min_nbor_dist: float | None

    def training(self, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of ``model.ckpt-<step>.pt``: raw weights and everything that a restart needs."""
        head = self._head("training", LIVE, step)
        return checkpoint.snapshot({**head, "model": dict(self.model.state_dict()), **state})

    def weights(self, name: str, step: int, kind: str) -> dict[str, Any]:
        """Return the content of a file of the weights ``name``: ``live``, or an average."""
        head = self._head(kind, name, step)
        if name == LIVE or self.bank is None:
            return checkpoint.snapshot({**head, "model": dict(self.model.state_dict())})
        info = {"profile": name, **self.bank.info(name)}
        return checkpoint.snapshot({**head, "average": info, "model": dict(self.bank.weights(name))})

    def _head(self, kind: str, weights: str, step: int) -> dict[str, Any]:
        return {
            "format": checkpoint.FORMAT,
            "version": __version__,
            "kind": kind,
            "weights": weights,
            "step": step,
            "config": dict(self.config),
            "min_nbor_dist": self.min_nbor_dist,
        }


@dataclass
class Saver:
    """Writes the live file and the averaged files of one step as one transaction.

    Attributes:
        payloads: content of the files.
        live: names and rotation of ``model.ckpt-*.pt``.
        averages: the same for each average, by its name.
        bests: best files, whose ranks settle once a checkpoint knows of them.
        every: steps between two checkpoints; 0 or less writes only the last.
    """

    payloads: Payloads
    live: checkpoint.Family
    averages: Mapping[str, checkpoint.Family]
    bests: Sequence[checkpoint.BestFiles]
    every: int

    def is_due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is written after ``step``."""
        return last or (self.every > 0 and step % self.every == 0)

    def save(self, step: int, state: Mapping[str, Any]) -> list[str]:
        """Write all files of ``step``, move the links, rotate; return the names that were written."""
        files = [(self.live, self.payloads.training(step, state))]
        files += [(family, self.payloads.weights(name, step, "average")) for name, family in self.averages.items()]
        return [str(path) for path in checkpoint.save_together(step, files, self.bests)]
