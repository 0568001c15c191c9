"""Model files, single and sharded; the names that others use."""

from deepmd_ema.checkpoint.content import (
    FORMAT,
    averages_in,
    choose_profile,
    payload_head,
    reading,
    refitted,
    require_finite,
    weights_in,
)
from deepmd_ema.checkpoint.file import (
    DeepmdCheckpointError,
    load,
    load_shards,
    refuse_to_replace,
    require_training,
    resolve,
    save,
)

__all__ = [
    "FORMAT",
    "DeepmdCheckpointError",
    "averages_in",
    "choose_profile",
    "load",
    "load_shards",
    "payload_head",
    "reading",
    "refitted",
    "refuse_to_replace",
    "require_finite",
    "require_training",
    "resolve",
    "save",
    "weights_in",
]
