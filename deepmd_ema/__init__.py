"""Train Deep Potential models with averaged weights, exact restarts and one config file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_ema.infer.potential import Potential

__version__ = "0.2.0.dev0"
__all__ = ["Potential", "__version__"]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: `dp-ema --help` must not pay for it
    if name == "Potential":
        return import_module("deepmd_ema.infer.potential").Potential
    raise AttributeError(f"module 'deepmd_ema' has no attribute '{name}'")
