"""Train Deep Potential models with averaged weights, exact restarts and one config file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepmd_ema.utils import __version__

if TYPE_CHECKING:
    from deepmd_ema.infer.potential import Potential
    from deepmd_ema.training.run import TrainedRun, train

__all__ = ["Potential", "TrainedRun", "__version__", "train"]

_PLACES = {
    "Potential": "infer.potential",
    "TrainedRun": "training.run",
    "train": "training.run",
}


def __getattr__(name: str) -> Any:
    # torch takes a second to import: `dp-ema --help` must not pay for it
    if name in _PLACES:
        return getattr(import_module(f"deepmd_ema.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'deepmd_ema' has no attribute '{name}'")
