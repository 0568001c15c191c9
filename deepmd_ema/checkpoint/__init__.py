"""Checkpoints: the content of a file (payload), one file (files), names, series with rotation, best files.

Files of kind ``training`` hold everything that a restart needs; the others hold weights only.
"""

from deepmd_ema.checkpoint.best import BestFiles
from deepmd_ema.checkpoint.files import (
    FORMAT,
    ensure_writable,
    load,
    load_facts,
    refuse_to_replace,
    require_training,
    resolve,
    save,
)
from deepmd_ema.checkpoint.payload import choose_profile, payload_head, weights_in
from deepmd_ema.checkpoint.series import CheckpointSeries, keep_count, save_together

__all__ = [
    "FORMAT",
    "BestFiles",
    "CheckpointSeries",
    "choose_profile",
    "ensure_writable",
    "keep_count",
    "load",
    "load_facts",
    "payload_head",
    "refuse_to_replace",
    "require_training",
    "resolve",
    "save",
    "save_together",
    "weights_in",
]
