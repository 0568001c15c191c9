"""Where a run writes: every folder is made, and every place that cannot be written is named before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_ema import checkpoint
from deepmd_ema.config import to_dict
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.files import atomic_write

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig

SNAPSHOTS = "snapshots"  # folder of the copies that `dp-ema posthoc` combines, beside the numbered checkpoints


def suffixed(file: str | Path, suffix: str) -> Path:
    """Return ``file`` with ``suffix`` before its last dot: ``val.log`` and ``_ema`` give ``val_ema.log``."""
    file = Path(file)
    return file.with_name(f"{file.stem}{suffix}{file.suffix}")


def snapshot_folder(config: RunConfig) -> Path:
    """Return the folder of the snapshots."""
    training = config.training
    return Path(training.save_dir if training.save_dir is not None else Path(training.save_ckpt).parent) / SNAPSHOTS


def check_places(config: RunConfig, output: str) -> None:
    """Make the folders that the run writes to; a place where it could not write is told now, not after an hour.

    Raises:
        CheckpointError: naming every place that cannot be written.
    """
    files = [("--output", Path(output)), ("name of the newest file", Path(checkpoint.POINTER)), *_files(config)]
    folders = [(option, file.parent) for option, file in files] + list(_folders(config))
    problems = [
        f"{option}: {file} is a folder, and the run writes a file of that name. Move it away, or choose another name."
        for option, file in files
        if file.is_dir()
    ]
    checked: set[Path] = set()
    for option, folder in folders:
        problems += _unwritable(folder, option) if folder not in checked else []
        checked.add(folder)
    if problems:
        raise CheckpointError(problems)


def write_config(output: str, config: RunConfig) -> None:
    """Write the config as the run uses it.

    Raises:
        UserError: if the file cannot be written.
    """
    try:
        with atomic_write(output) as part:
            part.write_text(json.dumps(to_dict(config), indent=4) + "\n")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}). Make room, or choose another -o.") from error


def _files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    training, validating = config.training, config.validating
    yield "training.disp_file", Path(training.disp_file)
    yield "training.save_ckpt", Path(f"{training.save_ckpt}.pt")
    yield "validating.full_val_file", Path(validating.full_val_file)
    for k, average in enumerate(training.averaging):
        where = f"training.averaging[{k}]"
        yield where, suffixed(f"{training.save_ckpt}.pt", f"_{average.name}")
        if average.full_validation:
            yield where, suffixed(validating.full_val_file, f"_{average.name}")
        if average.lcurve:
            yield where, suffixed(training.disp_file, f"_{average.name}")


def _folders(config: RunConfig) -> Iterator[tuple[str, Path]]:
    training, validating = config.training, config.validating
    if training.save_dir is not None:
        yield "training.save_dir", Path(training.save_dir)
    if validating.save_best_dir is not None:
        yield "validating.save_best_dir", Path(validating.save_best_dir)
    if training.stat_file is not None and training.stat_file_mode != "read":
        yield "training.stat_file", Path(training.stat_file).parent
    if training.tensorboard:
        yield "training.tensorboard_log_dir", Path(training.tensorboard_log_dir)
    if any(getattr(average, "snapshots", False) for average in training.averaging):
        yield "training.averaging", snapshot_folder(config)


def _unwritable(folder: Path, option: str) -> Sequence[str]:
    try:
        checkpoint.ensure_writable(folder, option)
    except CheckpointError as error:
        return error.problems
    return []
