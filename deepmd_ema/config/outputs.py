"""Files that a run reads, files and folders that it writes, and the steps after which it writes."""

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
CHECKED = ".checked"  # end of the name of a folder with results of checks of the data
LOGGED = (
    ".dp-ema.logged"  # identifiers by which a restart continues the runs of loggers
)
BEST = "best"  # best files are called best.ckpt-<step>.t-<rank>.pt

_READ = (
    "systems",
    "stat_file",
    "tab_file",
    "use_srtab",
)  # options that name files to read

GATHERED_SUFFIX = ".pt"  # a checkpoint that is one file
# a checkpoint that is a folder, to which every rank writes: torch.distributed.checkpoint
SHARDED_SUFFIX = ".dcp"
_MAX_PATH_BYTES = (
    4096  # on any system; a pointer that is longer was not written by a run
)
# file in the folder: a gathered checkpoint without the tensors, which are in the shards
HEAD = "head.pt"


def with_absolute_paths(values: Any, folder: str | Path, option: str = "") -> Any:
    """Return normalized values of an input with absolute paths of the files that are read.

    Args:
        values: the values.
        folder: folder in which relative paths begin.
        option: name of the option that has the values; empty for a whole input.
    """
    if isinstance(values, Mapping):
        return {
            name: with_absolute_paths(value, folder, name)
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [with_absolute_paths(value, folder, option) for value in values]
    if option in _READ and isinstance(values, str):
        return os.path.abspath(os.path.join(folder, values))
    return values


def outside_paths(
    values: Any, folder: Path, place: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield option and path of files that a run would write outside of ``folder``.

    Every text counts but the names of files to read: options of loggers of other distributions are
    not known here.

    Args:
        values: normalized sections ``training`` and ``validating``, or a part of them.
        folder: the working folder.
        place: place of the values, as a dotted path.
    """
    if isinstance(values, str):
        path = values.removeprefix("file://")
        # with symbolic links as they are and followed: the folder itself may be named through a
        # link, and a path inside of it may lead out by one
        forms = (Path(os.path.abspath(folder / path)), (folder / path).resolve())
        roots = (folder, folder.resolve())
        if not any(form.is_relative_to(root) for form in forms for root in roots):
            yield place, values
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from outside_paths(value, folder, f"{place}[{number}]")
    elif isinstance(values, Mapping):
        for name, value in values.items():
            is_written = name == "stat_file" and values.get("stat_file_mode") != "read"
            if is_written or name not in (*_READ, "rglob_patterns"):
                yield from outside_paths(
                    value, folder, f"{place}.{name}" if place else name
                )


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is the folder of a sharded checkpoint, whole or not."""
    return path.is_dir() and (
        path.resolve().suffix == SHARDED_SUFFIX or (path / HEAD).is_file()
    )


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
    """Return ``file`` with ``suffix`` before its last dot: ``val.log`` becomes ``val_ema.log``."""
    file = Path(file)
    # a name without a dot, or with one at its beginning only, gets the suffix at its end
    stem, _, ending = file.name.rpartition(".")
    return file.parent / (
        f"{stem}{suffix}.{ending}" if stem else f"{file.name}{suffix}"
    )


def suffix_of(weights: str, task: str = "") -> str:
    """Return the suffix of the files of weights and of a task; empty for the live weights.

    Args:
        weights: ``live`` or the name of an average.
        task: its name; empty in a run of one task.
    """
    return (f"_{task}" if task else "") + (f"_{weights}" if weights != LIVE else "")


def best_link(prefix: str, suffix: str) -> str:
    """Return the name of the link to the best of the best files of a prefix."""
    return f"{prefix}.ckpt{suffix}"


def weights_of_rows(file: Path, values: Mapping[str, Any]) -> str:
    """Return the weights whose rows a file holds, by its name.

    The inverse of :meth:`Outputs.lcurve` and :meth:`Outputs.validation_log`.

    Args:
        file: a learning curve or log of full validation.
        values: the normalized input of the run; empty where it is not known.

    Returns:
        ``live``, the name of an average, or the stem of a file that the run does not write.
    """
    curve = values.get("training", {}).get("disp_file")
    log = values.get("validating", {}).get("full_val_file")
    stems = {"lcurve", "val", *(Path(name).stem for name in (curve, log) if name)}
    if file.stem in stems:
        return LIVE
    # the longest: of run.out and run_ice.out, run_ice_ema.out belongs to the second
    start = max(
        (stem for stem in stems if file.stem.startswith(f"{stem}_")),
        key=len,
        default=None,
    )
    return file.stem if start is None else file.stem.removeprefix(f"{start}_")


@dataclass(frozen=True)
class Output:
    """One file or folder of a run.

    Attributes:
        option: dotted path of the option that names it.
        content: description of the content, for messages.
        path: path of the file or folder.
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
        checkpoint_folder: folder of the numbered checkpoints.
        snapshot_folder: folder of the copies of averages.
        best_folder: folder of the best files.
        has_best: whether the run keeps best files.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        training = config.training
        validating = config.validating
        self.suffix = SHARDED_SUFFIX if training.writes_shards else GATHERED_SUFFIX
        folder = Path(training.save_ckpt).parent
        self.checkpoint_folder = (
            folder if training.save_dir is None else Path(training.save_dir)
        )
        self.snapshot_folder = self.checkpoint_folder / SNAPSHOTS
        self.best_folder = Path(validating.save_best_dir or folder)
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
        """Return the folder with results of checks of the data of a task.

        It is beside the cached statistics if there are any.
        """
        data = self._config.tasks[task].data
        if data.stat_file is not None and data.stat_file_mode != "read":
            return Path(f"{data.stat_file}{CHECKED}")
        return Path(f".dp-ema{suffix_of(LIVE, task)}{CHECKED}")

    def __iter__(self) -> Iterator[Output]:
        training = self._config.training
        names = (LIVE, *(average.name for average in training.averaging))
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
            for task in self._config.tasks.values():
                if not task.is_validated:
                    continue
                content = f"validation of {name}" + (
                    f" in task {task.name}" if task.name else ""
                )
                yield Output(
                    "validating.full_val_file",
                    content,
                    self.validation_log(name, task.name),
                    has_rows=True,
                )
                if self.has_best:
                    content = f"the link to the best weights of {name}"
                    prefix = self.best_prefix(name, task.name)
                    link = self.best_folder / best_link(prefix, self.suffix)
                    yield Output(
                        "validating.save_best_dir", content, link, is_link=True
                    )
        folders = [("training.save_dir", "checkpoints", self.checkpoint_folder)]
        if self.has_best:
            folders.append(("validating.save_best_dir", "best files", self.best_folder))
        for task in self._config.tasks.values():
            if task.data.stat_file is not None and task.data.stat_file_mode != "read":
                option = f"{task.place('training')}.stat_file"
                folders.append((option, "statistics", Path(task.data.stat_file).parent))
        if training.tensorboard:
            folder = Path(training.tensorboard_log_dir)
            folders.append(
                ("training.tensorboard_log_dir", "files of TensorBoard", folder)
            )
        if any(average.snapshots for average in training.averaging):
            folders.append(("training.averaging", "snapshots", self.snapshot_folder))
        yield from (Output(*folder, is_folder=True) for folder in folders)


@dataclass(frozen=True)
class Due:
    """Steps after which something is done: the steps of a range, and one more.

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
        config: config of the run.
        num_steps: length of the whole run. The last files are due after this step; an early stop
            ends a run before it.

    Attributes:
        rows: steps with a row of the learning curve.
        checkpoint: steps with a checkpoint, with the files of all weights.
        validation: steps with full validation; None: never.
        snapshots: steps with a copy of an average for ``dp-ema posthoc``, by its name, of the
            averages that have some.
    """

    def __init__(self, config: RunConfig, num_steps: int) -> None:
        training = config.training
        validating = config.validating
        end = num_steps + 1
        self.num_steps = num_steps
        self._training = training
        # the first step has a row too, as DeePMD-kit's learning curve does
        self.rows = Due(range(training.disp_freq, end, training.disp_freq), 1)
        # 0 or less writes the last step only
        saved = range(0)
        if training.save_freq > 0:
            saved = range(training.save_freq, end, training.save_freq)
        self.checkpoint = Due(saved, num_steps)
        # below 1 a fraction of the run, above it a step; 1 itself is never
        start = validating.full_val_start
        self.validation: Due | None = None
        if start != 1 and config.fully_validated and config.has_validation_data:
            first = int(start * num_steps) if start < 1 else int(start)
            self.validation = Due(
                range(first, end, validating.validation_freq), num_steps
            )
        self.snapshots: dict[str, Due] = {}
        for average in training.averaging:
            every = (
                training.save_freq
                if average.snapshot_freq is None
                else average.snapshot_freq
            )
            if average.snapshots and every > 0:
                self.snapshots[average.name] = Due(range(every, end, every), num_steps)

    def num_kept(self, most: int | None = None) -> int:
        """Return the number of checkpoints that are kept; less than 1: all.

        Args:
            most: the number without ``ckpt_keep_ratio``; None: ``max_ckpt_keep``.
        """
        if self._training.ckpt_keep_ratio is None:
            return self._training.max_ckpt_keep if most is None else most
        return max(
            1, math.ceil(self._training.ckpt_keep_ratio * self.checkpoint.count())
        )
