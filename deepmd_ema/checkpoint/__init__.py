"""Checkpoints: payload, names, atomic writes, rotation, the latest pointer and the best files.

A checkpoint is a dictionary that loads with ``torch.load(weights_only=True)``::

    {"format": 1, "version": ..., "kind": "training" | "average" | "best" | "snapshot" | "weights",
     "weights": "live" | <average>, "step": n, "config": {...}, "model": {name: tensor}, ...}

``kind`` training holds everything a restart needs; the others hold weights only.
"""

from deepmd_ema.checkpoint.best import BestFiles
from deepmd_ema.checkpoint.family import Family, keep_count, save_together
from deepmd_ema.checkpoint.files import (
    FORMAT,
    POINTER,
    check_weights,
    ensure_writable,
    load,
    load_facts,
    refuse_to_replace,
    require_training,
    resolve,
    save,
    snapshot,
)
from deepmd_ema.checkpoint.payload import choose_profile, weights_in

__all__ = [
    "FORMAT",
    "POINTER",
    "BestFiles",
    "Family",
    "check_weights",
    "choose_profile",
    "ensure_writable",
    "keep_count",
    "load",
    "load_facts",
    "refuse_to_replace",
    "require_training",
    "resolve",
    "save",
    "save_together",
    "snapshot",
    "weights_in",
]
