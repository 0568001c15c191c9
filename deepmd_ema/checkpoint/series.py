"""Files that a run keeps: numbered series with links, best files, and their transaction."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepmd_ema.checkpoint.file import RANKED, SUFFIXES, files_by_step, numbered, save
from deepmd_ema.config.outputs import (
    GATHERED_SUFFIX,
    POINTER,
    SHARDED_SUFFIX,
    best_link,
    suffixed,
)
from deepmd_ema.distributed.links import link
from deepmd_ema.distributed.world import World
from deepmd_ema.files import atomic_write, move, remove, spare_of, writing

logger = logging.getLogger(__name__)


class CheckpointSeries:
    """The numbered files of one set of weights, ``<prefix><suffix>-<step>.pt``, and their link.

    The link leads to the newest. Sharded ones are folders that end in ``.dcp``; a run may have
    both, if a restart has changed the format.

    The suffix comes before the last dot of the prefix: ``model.ckpt`` and ``_ema`` give
    ``model_ema.ckpt-100.pt``. Rotation uses the step in the name and counts only files up to the
    current step. Files with higher steps are of an earlier run that went further, or of a branch
    before a restart: they are kept until this run passes their step, and are then removed, so that
    they never displace a file of this run.

    Args:
        prefix: ``training.save_ckpt``; may contain folders.
        suffix: empty for the live weights, ``_<name>`` for an average.
        save_dir: folder of the numbered files; that of ``prefix`` when None. The link stays beside
            ``prefix``.
        keep: how many files are kept; less than 1 keeps all.
        start: the step that this run starts from (0 anew, n at a restart from n); None leaves files
            of other runs with lower steps than the first save alone.
        writers: the processes that write sharded files together, from :meth:`World.for_writer`,
            each in one thread and in one order; None: files are gathered, and one rank writes them.
    """

    def __init__(
        self,
        prefix: str | Path,
        suffix: str = "",
        save_dir: str | Path | None = None,
        keep: int = 5,
        start: int | None = None,
        writers: World | None = None,
    ) -> None:
        prefix, self.writers = Path(prefix), writers
        self.suffix = GATHERED_SUFFIX if writers is None else SHARDED_SUFFIX
        self.name = suffixed(prefix, suffix).name
        self.folder = Path(save_dir) if save_dir is not None else prefix.parent
        self.link = prefix.parent / f"{self.name}{self.suffix}"
        self.keep = keep
        self._last = start  # step of the last save, or of the start of the run
        self._noted = False  # whether newer files of an earlier run were reported

    def file(self, step: int) -> Path:
        """Return the path of the file of ``step``."""
        return self.folder / f"{self.name}-{step}{self.suffix}"

    def save(
        self, step: int, payload: Mapping[str, Any], fallback: Path | None = None
    ) -> None:
        """Write the file of ``step``; ``fallback`` is an older one for the message when that fails.

        Raises:
            WriteError: if it cannot be written.
        """
        _write(self.file(step), payload, self.writers, fallback)

    def steps(self) -> list[int]:
        """Return the steps of all files that are there, ascending."""
        return sorted(numbered(self.folder, self.name))

    def rotate(self, step: int) -> None:
        """Remove files of earlier runs up to ``step``, and the oldest ones beyond ``keep``.

        Call it after the file of ``step`` was written.
        """
        steps = self.steps()
        last = step if self._last is None else self._last
        # files of an earlier run or another branch: between its last save and now this run has
        # written none
        passed = [s for s in steps if last < s < step]
        current = [s for s in steps if s <= step and s not in passed]
        old = current[: -self.keep] if self.keep >= 1 else []
        for s in [*passed, *old]:
            for suffix in SUFFIXES:
                file = self.folder / f"{self.name}-{s}{suffix}"
                remove(file)
                remove(spare_of(file))
        self._last = step
        newer = [s for s in steps if s > step]
        if newer and not self._noted:
            self._noted = True
            logger.info(
                "of an earlier run that went beyond step %d: %s; each goes when this run passes "
                "its step",
                step,
                ", ".join(self.file(s).name for s in newer),
            )


class BestFiles:
    """Keeps the ``keep`` best files as ``<prefix>.ckpt-<step>.t-<rank>.pt``.

    Lower values are better.

    ``<prefix>.ckpt.pt`` is a link to the best of them.

    A file that is no longer among the best keeps a rank beyond ``keep`` until :meth:`prune` is
    called, after a training checkpoint with the new records was written: a restart finds the files
    of its records. :meth:`prune` also removes best files of an earlier run, once this run has one
    of its own. Rotation of checkpoints never touches best files.

    Args:
        prefix: ``best``, or ``best_<name>`` for an average.
        folder: of the files.
        keep: how many are kept.
        metric: what the values are, such as ``E:MAE``; records of another metric are not continued.
        writes: whether this process names and removes the files; others keep the records, no more.
        writers: as for :class:`CheckpointSeries`.
    """

    def __init__(
        self,
        prefix: str,
        folder: str | Path,
        keep: int,
        metric: str,
        writes: bool = True,
        writers: World | None = None,
    ) -> None:
        self.writes = writes
        self.writers = writers
        self.suffix = GATHERED_SUFFIX if writers is None else SHARDED_SUFFIX
        self.prefix = prefix
        self.folder = Path(folder)
        self.keep = keep
        self.metric = metric
        self.records: list[tuple[float, int]] = []  # (value, step), best first
        self._pushed_out: list[
            tuple[float, int]
        ] = []  # records that the last one has displaced

    def offer(self, value: float, step: int) -> bool:
        """Enter ``value`` if it is among the best; return whether :meth:`write` must be called.

        Of equal errors the earlier one ranks higher. A value that is not finite is never kept.
        """
        # a step that is validated again, as after a restart, has one record
        records = [r for r in self.records if r[1] != step]
        rank = sum(v <= value for v, _ in records)
        if not math.isfinite(value) or rank >= self.keep:
            return False
        records.insert(rank, (value, step))
        self.records = records[: self.keep]
        self._pushed_out = records[self.keep :]
        return True

    def write(self, step: int, payload: Mapping[str, Any]) -> Path:
        """Write the file of ``step``, give the others their ranks, and return its path.

        The step must be among the best, and the records those that :meth:`offer` has left.
        """
        path = self.path(step)
        _write(path, payload, self.writers)
        # the file that was pushed out has a rank beyond `keep` now, until prune() removes it
        on_rank0(
            self.writers, lambda: self._arrange([*self.records, *self._pushed_out])
        )
        return path

    def path(self, step: int) -> Path:
        """Return the file of ``step``, which must be among the best."""
        return self._file(step, 1 + [s for _, s in self.records].index(step))

    def prune(self) -> None:
        """Remove every other file of this prefix, once there is a record.

        Call it after a checkpoint was written.
        """
        if not self.records or not self.writes:
            return
        mine = {self.path(step).name for _, step in self.records}
        for files in self._on_disk().values():
            for file in files:
                if file.name not in mine:
                    remove(file)

    def state_dict(self) -> dict[str, Any]:
        """Return the metric and the records, best first."""
        return {
            "metric": str(self.metric),
            "records": [list(record) for record in self.records],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[tuple[float, int]]:
        """Continue with the records of ``state`` whose files exist, and return them.

        Corrects the ranks in the names of files. Called where the files are written; other
        processes take the records that are returned.
        """
        if state["metric"] != self.metric:
            logger.warning(
                "best files are chosen by %s now, by %s before: starts without records",
                self.metric,
                state["metric"],
            )
            return []
        files = self._on_disk()
        records = [
            (float(value), int(step))
            for value, step in state["records"]
            if step in files
        ]
        gone = [
            f"{step} ({self.metric} {value:.5g})"
            for value, step in state["records"]
            if step not in files
        ]
        if gone:
            logger.warning(
                "%s of step %s is gone and no longer counts as best",
                self.prefix,
                ", ".join(gone),
            )
        # If the input has a smaller number of best files now, the others get ranks beyond it, and
        # prune() removes them.
        self.records = records[: self.keep]
        self._arrange(records)
        return self.records

    def _arrange(self, records: list[tuple[float, int]]) -> None:
        """Give the files of ``records`` their ranks and set the link to the best."""
        files_of_step = self._on_disk()
        # names have the step, so that no move hits the file of another record
        for rank, (_, step) in enumerate(records, 1):
            wanted = self._file(step, rank)
            files = files_of_step.get(step, [])
            if wanted not in files and files:
                move(files[0], wanted)
            # several files of one step: a killed run has left one with another rank, or a restart
            # has changed the format
            for file in files:
                if wanted in files and file != wanted:
                    remove(file)
            # before the file that was the best gets another name, so that the link always leads to
            # a file
            if rank == 1 and files:
                _link_only(self.folder / best_link(self.prefix, wanted.suffix), wanted)

    def _file(self, step: int, rank: int) -> Path:
        """Return the path of a best file in the format that it has or will be written in."""
        suffixes = {path.suffix for path in self._on_disk().get(step, ())} or {
            self.suffix
        }
        suffix = self.suffix if self.suffix in suffixes else suffixes.pop()
        return self.folder / f"{self.prefix}.ckpt-{step}.t-{rank}{suffix}"

    def _on_disk(self) -> dict[int, list[Path]]:
        return files_by_step(self.folder, self.prefix, RANKED)


def _link_only(path: Path, target: Path) -> None:
    """Let ``path`` be a link to ``target``, and remove the link of the other format.

    That one would lead to an older file.
    """
    link(path, target)
    for suffix in SUFFIXES:
        other = path.with_suffix(suffix)
        if other != path and other.is_symlink():
            other.unlink()


def on_rank0(writers: World | None, change: Callable[[], None]) -> None:
    """Have one rank change names of files, and end all that write together if it fails."""
    (writers or World()).broadcast_from_rank0(change)


def save_together(
    step: int,
    files: Sequence[tuple[CheckpointSeries, Mapping[str, Any]]],
    bests: Sequence[BestFiles] = (),
) -> list[Path]:
    """Write the files of one step as one transaction and return their paths.

    A collective if they are sharded. The first series is the live one. All files are written before
    any link moves, and the pointer moves last: a crash at any moment leaves links to a step all of
    whose files are whole. A file without those of the other series is never linked; the restarted
    run writes it again.

    Args:
        step: optimizer steps after which the weights were saved.
        files: series and what their file holds, the live one first.
        bests: best files whose records are in the payload; files that are no longer among them are
            removed now.

    Raises:
        WriteError: if a file cannot be written; links and older files are as before.
    """
    live = files[0][0]
    # the file to restart from if the disk is full now, for the message
    before = [s for s in live.steps() if s < step]
    fallback = live.file(before[-1]) if before else None
    for series, payload in files:
        series.save(step, payload, fallback)

    def move_on() -> None:
        with writing(live.link, f"{live.file(step)} is whole and usable."):
            # the live link and the pointer last: a restart follows them
            for series, _ in reversed(files):
                _link_only(series.link, series.file(step))
            # atomic_write() follows links, and would replace a file somewhere else
            if Path(POINTER).is_symlink():
                Path(POINTER).unlink()
            with atomic_write(POINTER) as part:
                part.write_text(
                    str(live.file(step)), encoding="utf-8", errors="surrogateescape"
                )
        # only now: until the links moved, a restart would have taken the older files
        for series, _ in files:
            series.rotate(step)
        for best in bests:
            best.prune()

    on_rank0(live.writers, move_on)
    return [series.file(step) for series, _ in files]


def _write(
    path: Path,
    payload: Mapping[str, Any],
    writers: World | None,
    fallback: Path | None = None,
) -> None:
    """Write one file or folder with :func:`deepmd_ema.checkpoint.file.save`."""
    if writers is None and path.is_symlink():
        path.unlink()  # save() follows links, and would replace the file somewhere else
    save(path, payload, fallback, world=writers)
