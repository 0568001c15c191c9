"""Runs whose record is changed."""

import json
from pathlib import Path

import pytest

from deepmd_ema.config.outputs import RECORD
from deepmd_ema.training.run import run_training


def train_in(folder, values, **options):
    """Train in a new folder with an input of these values."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("input.json").write_text(json.dumps(values))
        run_training("input.json", device="cpu", **options)


def change_record(folder, **changes):
    parts = json.loads((folder / RECORD).read_text())
    parts[-1] |= changes
    (folder / RECORD).write_text(json.dumps(parts))
