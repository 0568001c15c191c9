"""Files that a run reads, every file and folder that it writes, and the steps after which it
does.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema.utils import LIVE

if TYPE_CHECKING:
    from deepmd_ema.config.schema.run import RunConfig

POINTER = "checkpoint"  # text file that names the newest training checkpoint
LOCK = ".dp-ema.lock"  # held by a run in its folder
RECORD = "run_record.json"  # programs, machine, times and warnings of a run
# folder of the copies that `dp-ema posthoc` combines, beside the numbered checkpoints
SNAPSHOTS = "snapshots"
CHECKED = ".checked"  # end of the name of a folder that remembers what was found in the data
LOGGED = ".dp-ema.logged"  # what a restart needs to continue the runs of loggers
BEST = "best"  # best files are called best.ckpt-<step>.t-<rank>.pt

_READ = ("systems", "stat_file", "tab_file", "use_srtab")  # options that name files to read

GATHERED_SUFFIX = ".pt"  # of a checkpoint that is one file
SHARDED_SUFFIX = (
    ".dcp"  # of one that is a folder, to which every rank writes: torch.distributed.checkpoint
)
_MAX_PATH_BYTES = 4096  # on any system
HEAD = (
    "head.pt"  # in it: what a gathered checkpoint holds, without the tensors that are in the shards
)


def with_absolute_paths(values: Any, folder: str | Path, option: str = "") -> Any:
    """Return normalized values of an input with absolute paths of the files that are read.

    Args:
        values: the values.
        folder: that relative paths begin in.
        option: whose values they are; empty for those of a whole input.
    """
    if isinstance(values, Mapping):
        return {name: with_absolute_paths(value, folder, name) for name, value in values.items()}
    if isinstance(values, list):
        return [with_absolute_paths(value, folder, option) for value in values]
    return (
        os.path.abspath(os.path.join(folder, values))
        if option in _READ and isinstance(values, str)
        else values
    )


def outside_paths(values: Any, folder: Path, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield option and path of what normalized values of an input have written outside of
    ``folder``.

    Every text counts but those of files to read: options of loggers of other distributions are not
    known here.

    Args:
        values: of the sections ``training`` and ``validating``, or a part of them.
        folder: the working folder.
        place: of the values, as a dotted path.
    """
    if isinstance(values, str):
        path = values.removeprefix("file://")
        # without links as they are written, and with them: the folder itself may be given through
        # one
        forms = (Path(os.path.abspath(folder / path)), (folder / path).resolve())
        if not any(
            form.is_relative_to(root) for form in forms for root in (folder, folder.resolve())
        ):
            yield place, values
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from outside_paths(value, folder, f"{place}[{number}]")
    elif isinstance(values, Mapping):
        for name, value in values.items():
            is_written = name == "stat_file" and values.get("stat_file_mode") != "read"
            if is_written or name not in (*_READ, "rglob_patterns"):
                yield from outside_paths(value, folder, f"{place}.{name}" if place else name)


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is the folder of a sharded checkpoint, whole or not."""
    return path.is_dir() and (path.resolve().suffix == SHARDED_SUFFIX or (path / HEAD).is_file())


def read_pointer(pointer: Path) -> Path:
    """Return the path of the checkpoint, which may be missing, that a file :data:`POINTER` names.

    Raises:
        OSError, ValueError: if it does not hold such a path.
    """
    with pointer.open("rb") as file:
        name = file.read(_MAX_PATH_BYTES).decode().strip()
    if not name.isprintable():
        raise ValueError("it is no text")
    if Path(name).name == POINTER:
        raise ValueError("it names such a file again")
    if name and not name.endswith((GATHERED_SUFFIX, SHARDED_SUFFIX)):
        raise ValueError(
            f"it names {name[:80]}, which does not end in {GATHERED_SUFFIX} or {SHARDED_SUFFIX}"
        )
    return pointer.parent / name


def suffixed(file: str | Path, suffix: str) -> Path:
    """Return ``file`` with ``suffix`` before its last dot: ``val.log`` and ``_ema`` give
    ``val_ema.log``.
    """
    file = Path(file)
    stem, dot, ending = file.name.rpartition(".")
    return file.parent / (f"{stem}{suffix}{dot}{ending}" if stem else f"{file.name}{suffix}")


def suffix_of(weights: str, task: str = "") -> str:
    """Return the suffix of the files of these weights, and of a task that has a name; empty for the
    live weights.
    """
    return (f"_{task}" if task else "") + (f"_{weights}" if weights != LIVE else "")


def best_link(prefix: str, suffix: str) -> str:
    """Return the name of the link to the best of the best files of a prefix."""
    return f"{prefix}.ckpt{suffix}"


def weights_of_rows(file: Path, values: Mapping[str, Any]) -> str:
    """Return whose rows a file holds by its name: the inverse of :meth:`Outputs.lcurve` and
    ``validation_log``.

    Args:
        file: a learning curve or log of full validation.
        values: the normalized input of the run; empty where it is not known.

    Returns:
        ``live``, the name of an average, or the stem of a file that the run does not write.
    """
    names = (
        values.get("training", {}).get("disp_file"),
        values.get("validating", {}).get("full_val_file"),
    )
    stems = {"lcurve", "val", *(Path(name).stem for name in names if name)}
    if file.stem in stems:
        return LIVE
    # the longest: of run.out and run_ice.out, run_ice_ema.out belongs to the second
    start = max((stem for stem in stems if file.stem.startswith(f"{stem}_")), key=len, default=None)
    return file.stem if start is None else file.stem.removeprefix(f"{start}_")


@dataclass(frozen=True)
class Output:
    """One file or folder of a run.

    Attributes:
        option: dotted path of the option that names it.
        content: what it holds, for messages.
        path: where it is.
        is_folder: whether it is a folder.
        has_rows: whether rows are added to it during the run, so that it can belong to one writer
            only.
        is_link: whether it is a link to the newest or the best weights.
    """

    option: str
    content: str
    path: Path
    is_folder: bool = False
    has_rows: bool = False
    is_link: bool = False


class Outputs:
    """Output paths of a run, by weights (``live`` or the name of an average) and task.

    Learning curves and checkpoints hold all tasks of a run; logs of full validation, best files and
    cached statistics are one per task.

    Attributes:
        suffix: end of the names of checkpoints, averages, snapshots and best weights.
        checkpoint_folder: of the numbered checkpoints.
        snapshot_folder: of the kept copies of averages.
        best_folder: of the best files.
        has_best: whether the run keeps best files.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        training = config.training
        validating = config.validating
        self.suffix = SHARDED_SUFFIX if training.writes_shards else GATHERED_SUFFIX
        of_prefix = Path(training.save_ckpt).parent
        self.checkpoint_folder = of_prefix if training.save_dir is None else Path(training.save_dir)
        self.snapshot_folder = self.checkpoint_folder / SNAPSHOTS
        self.best_folder = Path(validating.save_best_dir or of_prefix)
        self.has_best = bool(config.fully_validated and validating.save_best)

    def lcurve(self, weights: str) -> Path:
        """Return the learning curve of some weights."""
        return suffixed(self._config.training.disp_file, suffix_of(weights))

    def validation_log(self, weights: str, task: str) -> Path:
        """Return the log of full validation of some weights on the data of a task."""
        return suffixed(self._config.validating.full_val_file, suffix_of(weights, task))

    def checkpoint_link(self, weights: str) -> Path:
        """Return the link to the newest checkpoint of some weights."""
        prefix = suffixed(self._config.training.save_ckpt, suffix_of(weights))
        return prefix.with_name(f"{prefix.name}{self.suffix}")

    def best_prefix(self, weights: str, task: str) -> str:
        """Return the prefix of the names of the best files of some weights."""
        return f"{BEST}{suffix_of(weights, task)}"

    def checked_data(self, task: str) -> Path:
        """Return the folder of what was found in the data of a task: beside the cached statistics
        if there are any.
        """
        data = self._config.tasks[task].data
        if data.stat_file is not None and data.stat_file_mode != "read":
            return Path(f"{data.stat_file}{CHECKED}")
        return Path(f".dp-ema{suffix_of(LIVE, task)}{CHECKED}")

    def __iter__(self) -> Iterator[Output]:
        training, names = (
            self._config.training,
            (LIVE, *(a.name for a in self._config.training.averaging)),
        )
        yield Output("name of the newest file", "the newest checkpoint", Path(POINTER))
        if training.disp_training:
            for name in (LIVE, *(a.name for a in training.averaging if a.lcurve)):
                yield Output(
                    "training.disp_file",
                    f"the learning curve of {name}",
                    self.lcurve(name),
                    has_rows=True,
                )
        for name in names:
            link = self.checkpoint_link(name)
            yield Output(
                "training.save_ckpt",
                f"the link to the newest weights of {name}",
                link,
                is_link=True,
            )
        for name in self._config.fully_validated:
            for task in (task for task, of in self._config.tasks.items() if of.is_validated):
                content = f"validation of {name}" + (f" in task {task}" if task else "")
                yield Output(
                    "validating.full_val_file",
                    content,
                    self.validation_log(name, task),
                    has_rows=True,
                )
                if self.has_best:
                    content = f"the link to the best weights of {name}"
                    link = self.best_folder / best_link(self.best_prefix(name, task), self.suffix)
                    yield Output("validating.save_best_dir", content, link, is_link=True)
        folders = [("training.save_dir", "checkpoints", self.checkpoint_folder)]
        if self.has_best:
            folders.append(("validating.save_best_dir", "best files", self.best_folder))
        for of_task in self._config.tasks.values():
            if of_task.data.stat_file is not None and of_task.data.stat_file_mode != "read":
                option, folder = (
                    f"{of_task.place('training')}.stat_file",
                    Path(of_task.data.stat_file).parent,
                )
                folders.append((option, "statistics", folder))
        if training.tensorboard:
            folder = Path(training.tensorboard_log_dir)
            folders.append(("training.tensorboard_log_dir", "files of TensorBoard", folder))
        if any(average.snapshots for average in training.averaging):
            folders.append(("training.averaging", "snapshots", self.snapshot_folder))
        yield from (Output(*folder, is_folder=True) for folder in folders)


@dataclass(frozen=True)
class Due:
    """Steps after which something is done: those of a range, and one more.

    Attributes:
        steps: the range.
        also: the step beside it: the last one of the run, or its first.
    """

    steps: range
    also: int

    def __contains__(self, step: object) -> bool:
        return step == self.also or step in self.steps

    def count(self, after: int = 0) -> int:
        """Return the number of these steps after step ``after``."""
        in_range = len(self.steps) - bisect_right(self.steps, after)
        return in_range + (self.also > after and self.also not in self.steps)


class Schedule:
    """The steps at which a run does more than train.

    Args:
        config: of the run.
        num_steps: of the whole run. What is done at the end is due after this step; an early stop
            ends a run before it.

    Attributes:
        rows: of the learning curve.
        checkpoint: with the files of all weights.
        validation: full validation; None: never.
        snapshots: kept copies of averages for ``dp-ema posthoc``, by name of those that have some.
    """

    def __init__(self, config: RunConfig, num_steps: int) -> None:
        training, validating = config.training, config.validating
        end = num_steps + 1
        self.num_steps, self._training = num_steps, training
        self.rows = Due(range(training.disp_freq, end, training.disp_freq), 1)
        saved = (
            range(training.save_freq, end, training.save_freq)
            if training.save_freq > 0
            else range(0)
        )
        self.checkpoint = Due(saved, num_steps)
        start = (
            validating.full_val_start
        )  # below 1 a fraction of the run, never at 1, a step above it
        self.validation: Due | None = None
        if start != 1 and config.fully_validated and config.has_validation_data:
            first = int(start * num_steps) if start < 1 else int(start)
            self.validation = Due(range(first, end, validating.validation_freq), num_steps)
        self.snapshots: dict[str, Due] = {}
        for average in training.averaging:
            every = training.save_freq if average.snapshot_freq is None else average.snapshot_freq
            if average.snapshots and every > 0:
                self.snapshots[average.name] = Due(range(every, end, every), num_steps)

    def num_kept(self, most: int | None = None) -> int:
        """Return the number of checkpoints that are kept, ``most`` or as configured; less than 1:
        all.
        """
        if self._training.ckpt_keep_ratio is None:
            return self._training.max_ckpt_keep if most is None else most
        return max(1, math.ceil(self._training.ckpt_keep_ratio * self.checkpoint.count()))
