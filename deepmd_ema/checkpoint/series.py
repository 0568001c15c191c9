"""Series of numbered checkpoints: links, rotation, and live and averaged files as one transaction."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmd_ema.checkpoint.best import BestFiles
from deepmd_ema.checkpoint.files import save
from deepmd_ema.checkpoint.names import link_name, numbered, numbered_name, numbered_pattern
from deepmd_ema.config.outputs import POINTER, suffixed
from deepmd_ema.errors import CheckpointError
from deepmd_ema.files import atomic_write, sweep

logger = logging.getLogger(__name__)


class CheckpointSeries:
    """The numbered files of one set of weights: ``<prefix><suffix>-<step>.pt``, and the link to the newest.

    The suffix stands before the last dot of the prefix: ``model.ckpt`` and ``_ema`` give ``model_ema.ckpt-100.pt``.
    Rotation goes by the step in the name and counts only files up to the current step. Files with higher steps are of
    an earlier run that went further, or of a branch that a restart has left: they are not touched until this run
    overtakes their step, and then removed, so that they never push out a file of this run.

    Args:
        prefix: ``training.save_ckpt``; may contain folders.
        suffix: empty for the live weights, ``_<name>`` for an average.
        save_dir: folder of the numbered files; that of ``prefix`` when None. The link stays beside ``prefix``.
        keep: how many files are kept; less than 1 keeps all.
        start: the step that this run starts from (0 anew, n at a restart from n); None leaves files of other runs
            with lower steps than the first save alone.
        pointer: text file that names the newest file, or None.
    """

    def __init__(
        self,
        prefix: str | Path,
        suffix: str = "",
        save_dir: str | Path | None = None,
        keep: int = 5,
        start: int | None = None,
        pointer: str | Path | None = None,
    ) -> None:
        prefix = Path(prefix)
        self.name = suffixed(prefix, suffix).name
        self.folder = Path(save_dir) if save_dir is not None else prefix.parent
        self.link = prefix.parent / link_name(self.name)
        self.keep = keep
        self._pointer = Path(pointer) if pointer is not None else (None if suffix else Path(POINTER))
        self._last = start
        self._noted = False

    def file(self, step: int) -> Path:
        """Return the path of the file of ``step``."""
        return self.folder / numbered_name(self.name, step)

    def steps(self) -> list[int]:
        """Return the steps of all files that are there, ascending."""
        return sorted(numbered(self.folder, self.name))

    def update_links(self, step: int) -> None:
        """Move the link, then the pointer, to the file of ``step``."""
        _replace_link(self.link, self.file(step))
        if self._pointer is not None:
            with atomic_write(self._pointer) as part:
                part.write_text(str(self.file(step)))

    def rotate(self, step: int) -> None:
        """Remove what is not kept after ``step`` was written: overtaken files, and the oldest beyond ``keep``."""
        steps = self.steps()
        last = step if self._last is None else self._last
        overtaken = [s for s in steps if last < s < step]
        own = [s for s in steps if s <= step and s not in overtaken]
        old = own[: -self.keep] if self.keep >= 1 else []
        for s in [*overtaken, *old]:
            self.file(s).unlink(missing_ok=True)
        self._last = step
        newer = [s for s in steps if s > step]
        if newer and not self._noted:
            self._noted = True
            logger.info(
                "of an earlier run that went beyond step %d: %s; each goes when this run passes its step",
                step,
                ", ".join(self.file(s).name for s in newer),
            )

    def sweep(self) -> None:
        """Remove half-written files that a killed process has left."""
        sweep(self.folder, numbered_pattern(self.name))
        sweep(self.link.parent, re.escape(self.link.name))
        if self._pointer is not None:
            sweep(self._pointer.parent, re.escape(self._pointer.name))


def save_together(
    step: int, files: Sequence[tuple[CheckpointSeries, Mapping[str, Any]]], bests: Sequence[BestFiles] = ()
) -> list[Path]:
    """Write the files of one step as one transaction and return their paths.

    The first series is the live one. All files are written before any link moves, and the pointer moves last: a crash
    at any moment leaves links to a step all of whose files are whole. A file without those of the
    other series is never linked; the restarted run writes it again.

    Args:
        step: optimizer steps after which the weights were saved.
        files: series and what their file holds, the live one first.
        bests: best files whose records are in the payload; files that are no longer among them are removed now.

    Raises:
        CheckpointError: if a file cannot be written; links and older files are as before.
    """
    live = files[0][0]
    before = [s for s in live.steps() if s < step]
    fallback = live.file(before[-1]) if before else None
    for series, payload in files:
        series.sweep()
        save(series.file(step), payload, fallback)
    try:
        for series, _ in reversed(files):
            series.update_links(step)
    except OSError as error:
        raise CheckpointError(
            f"{live.link}: the link to the newest checkpoint could not be moved ({error.strerror}). "
            f"{live.file(step)} is whole and usable."
        ) from error
    for series, _ in files:
        series.rotate(step)
    for best in bests:
        best.prune()
    return [series.file(step) for series, _ in files]


def keep_count(max_keep: int, ratio: float | None, num_steps: int, save_freq: int) -> int:
    """Return how many checkpoints stay: ``max_keep``, or the share ``ratio`` of all that the run will write."""
    if ratio is None:
        return max_keep
    written = math.ceil(num_steps / save_freq) if save_freq > 0 else 1
    return max(1, math.ceil(ratio * written))


def _replace_link(link: Path, target: Path) -> None:
    part = link.with_name(f"{link.name}.{os.getpid()}.part")
    link.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    part.symlink_to(os.path.relpath(target, link.parent))
    os.replace(part, link)
