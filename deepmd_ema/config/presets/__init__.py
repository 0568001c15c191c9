"""Models and recipes of ``dp-ema init``, as YAML files beside this module.

``configs/presets`` in the repository is the same folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from deepmd_ema.config.text import read_config_file

Kind: TypeAlias = Literal["liquid", "molecules", "solid"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIZES = ("S", "M", "L")
MODELS, REASONS = "models", "reasons"
"""Files of all models, each with the name of the file of its recipes, and of reasons of options."""


def read_preset(name: str) -> dict[str, Any]:
    """Return the values of a file."""
    return read_config_file(Path(__file__).parent / f"{name}.yaml")[0]
