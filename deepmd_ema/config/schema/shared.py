"""Options, tests and rules that several sections of a model share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from deepmd_ema.config.fields import Check, not_negative_int, option
from deepmd_ema.config.messages import show
from deepmd_ema.config.schema.texts import ActivationName, is_readable

LARGEST_SIZE = 100_000  # of a layer, of the neighbors of an atom: far beyond any model, so that a typo is told
layer_widths = Check(
    lambda v: len(v) > 0 and all(0 < n <= LARGEST_SIZE for n in v),
    f"a list of at least one whole number > 0, none above {LARGEST_SIZE:,}",
)
num_parameters = Check(lambda v: 0 <= v <= LARGEST_SIZE, f"a whole number from 0 to {LARGEST_SIZE:,}")
cutoff = Check(lambda v: 0 < v <= 100, "a number > 0 and at most 100")  # angstrom; atoms farther away do not matter
type_pairs = Check(
    lambda v: all(len(pair) == 2 and min(pair) >= 0 for pair in v), "a list of pairs of type numbers, e.g. [[0, 1]]"
)
_bent_silu = Check(lambda v: v.startswith("silut:") and is_readable(ActivationName, v), "silut:T, e.g. silut:3")


def activation_option(doc: str) -> Any:
    """Declare an option ``activation_function``."""
    default = ActivationName("tanh")
    return option(default, choices=ActivationName.known, check=_bent_silu, convert=ActivationName, doc=doc)


def precision_option() -> Any:
    """Declare an option ``precision``."""
    choices = ("default", "float64", "float32")
    return option("default", choices=choices, doc="Precision of the parameters; `default` is float64.")


def seed_option() -> Any:
    """Declare an option ``seed`` of a part of the model."""
    doc = "Seed of the initial parameters; null takes it from `training.seed`."
    return option(None, check=not_negative_int, doc=doc)


def not_one_per_element(values: Sequence[Any], type_map: Sequence[str]) -> Iterator[str]:
    """Yield the rest of a message if ``values`` has not one entry for each element."""
    if len(values) != len(type_map):
        expected = f"{len(type_map)}, one for each of type_map = {show(type_map)}"
        yield f" = {show(values)}: has length {len(values)}, expected {expected}."


def unknown_types(types: Iterable[int], type_map: Sequence[str]) -> Iterator[str]:
    """Yield the rest of a message if one of ``types`` is no place in ``type_map``."""
    bad = sorted({t for t in types if t >= len(type_map)})
    if bad:
        expected = f"0 to {len(type_map) - 1}, places in type_map = {show(type_map)}"
        yield f": type {bad[0]} does not exist, expected {expected}."


def dashes(numbers: Iterable[int]) -> str:
    """Return widths of layers in words: ``120-120-120``."""
    return "-".join(map(str, numbers))


def dtype_name(precision: str) -> str:
    """Return the name of the numbers that an option ``precision`` stands for."""
    return "float64" if precision == "default" else precision
