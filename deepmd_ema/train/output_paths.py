"""Checks before the first step that every place a run writes to can be written, and writes the normalized config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_ema import checkpoint
from deepmd_ema.config import to_dict
from deepmd_ema.config.outputs import Output, Outputs
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.files import atomic_write

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig


def check_output_paths(config: RunConfig, output: str) -> None:
    """Make the folders that the run writes to; a place where it could not write is told now, not after an hour.

    Raises:
        CheckpointError: naming every place that cannot be written.
    """
    outputs = [Output("--output", "the normalized config", Path(output)), *Outputs(config)]
    problems = [
        f"{o.option}: {o.path} is a folder, and the run writes a file of that name. Move it away, or choose another "
        "name."
        for o in outputs
        if not o.is_folder and o.path.is_dir()
    ]
    checked: set[Path] = set()
    for o in outputs:
        folder = o.path if o.is_folder else o.path.parent
        problems += _unwritable(folder, o.option) if folder not in checked else []
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


def _unwritable(folder: Path, option: str) -> Sequence[str]:
    try:
        checkpoint.ensure_writable(folder, option)
    except CheckpointError as error:
        return error.problems
    return []
