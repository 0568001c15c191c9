"""Train Deep Potential models with averaged weights, exact restarts and one config file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepmd_ema.version import __version__

if TYPE_CHECKING:
    from deepmd_ema.infer.potential import Potential

__all__ = ["Potential", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: `dp-ema --help` must not pay for it
    if name == "Potential":
        return import_module("deepmd_ema.infer.potential").Potential
    raise AttributeError(f"module 'deepmd_ema' has no attribute '{name}'")
