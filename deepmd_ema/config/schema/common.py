"""Options, tests and rules that several sections of a model share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, replace
from functools import partial
from typing import Any, TypeVar

from deepmd_ema.config.fields import Check, not_negative, option
from deepmd_ema.config.messages import NOT_AVAILABLE, show
from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.findings import Findings, error

Section = TypeVar("Section", bound=Any)

# width of a layer, neighbors of an atom: far beyond any model, so that a typo is found
MAX_SIZE = 100_000
layer_widths = Check(
    lambda v: len(v) > 0 and all(0 < n <= MAX_SIZE for n in v),
    f"a list of at least one whole number > 0, none above {MAX_SIZE:,}",
)
num_parameters = Check(
    lambda v: 0 <= v <= MAX_SIZE, f"a whole number from 0 to {MAX_SIZE:,}"
)
# angstrom; atoms farther away do not matter
_cutoff = Check(lambda v: 0 < v <= 100, "a number > 0 and at most 100")
type_pairs = Check(
    lambda v: all(len(pair) == 2 and min(pair) >= 0 for pair in v),
    "a list of pairs of type numbers, e.g. [[0, 1]]",
)
_bent_silu = Check(
    lambda v: v.startswith("silut:") and ActivationName.is_readable(v),
    "silut:T, e.g. silut:3",
)


MAX_SEL_RATIO = 100  # ratio of `sel: auto` to the neighbors in the data
SEL_MULTIPLE = 4  # `sel: auto` is rounded up to a multiple of this, as DeePMD-kit does


def auto_sel(max_neighbors: Iterable[int], sel: str = "auto") -> list[int]:
    """Return the numbers for ``auto`` or ``auto:1.2``.

    They are the largest in the data times 1.1 or 1.2, rounded up to a multiple of four. Where no
    atom has a neighbor it is four: sums over neighbors are divided by it.
    """
    ratio = float(sel.partition(":")[2] or 1.1)
    # int() before ceil() is DeePMD-kit's order; other numbers would change the model
    numbers = [
        SEL_MULTIPLE * math.ceil(int(n * ratio) / SEL_MULTIPLE) for n in max_neighbors
    ]
    return numbers if any(numbers) else [SEL_MULTIPLE for _ in numbers]


def _is_sel(value: Any) -> bool:
    """Whether numbers of neighbors have a possible sum, or a text is ``auto`` or ``auto:1.2``."""
    if isinstance(value, str):
        match = re.fullmatch(r"auto(?::(\d+(?:\.\d*)?))?", value)
        return match is not None and (
            match[1] is None or 1 <= float(match[1]) <= MAX_SEL_RATIO
        )
    numbers = value if isinstance(value, list) else [value]
    return len(numbers) > 0 and min(numbers) >= 0 and 0 < sum(numbers) <= MAX_SIZE


def sel_option(
    doc: str,
    default: Any = MISSING,
    numbers: str = f"a whole number > 0, at most {MAX_SIZE:,}",
) -> Any:
    """Declare an option of the most neighbors, of which ``auto`` is a value.

    Args:
        doc: beginning of its manual text.
        default: its default; without it the option is required.
        numbers: its other values, for messages; one number for all elements together if not given.
    """
    return option(
        default,
        f"{doc} `auto` counts the neighbors in the training data and takes 1.1 times the largest "
        "number, rounded up to a multiple of 4; `auto:1.2` takes 1.2 times.",
        Check(
            _is_sel,
            f'{numbers}, or "auto" or "auto:1.2", the number from 1 to {MAX_SEL_RATIO}',
        ),
    )


def with_options(section: Section, values: Mapping[str, Any]) -> Section:
    """Return a section with values of options replaced.

    Args:
        section: the section.
        values: new values by name; an option of an inner section is ``inner.name``.
    """
    for path, value in values.items():
        outer, _, name = path.rpartition(".")
        changes = {name: value}
        if outer:
            changes = {outer: replace(getattr(section, outer), **changes)}
        section = replace(section, **changes)
    return section


def sel_text(sel: int | list[int] | str) -> str:
    """Return ``sel`` as text."""
    return " ".join(map(str, sel)) if isinstance(sel, list) else str(sel)


def in_order(
    first: tuple[str, float], last: tuple[str, float], rcut: float
) -> Findings:
    """Yield an error if the last of two distances is not between the first and the cutoff.

    Args:
        first: name and value of the option, angstrom.
        last: name and value of the option, angstrom.
        rcut: cutoff of the descriptor, angstrom.
    """
    if not first[1] < last[1] <= rcut:
        yield error(
            last[0],
            f" = {last[1]:g}: expected more than {first[0]} = {first[1]:g}, at most rcut = "
            f"{rcut:g} (angstrom).",
        )


def smooth_before(rcut_smth: float, rcut: float, prefix: str = "") -> Findings:
    """Yield an error if the switch does not begin before it ends.

    Args:
        rcut_smth: where it begins, angstrom.
        rcut: where it ends, angstrom.
        prefix: beginning of the names of both options.
    """
    if rcut_smth >= rcut:
        name = f"{prefix}rcut_smth"
        yield error(
            name,
            f" = {rcut_smth:g}: expected less than {prefix}rcut = {rcut:g} (angstrom). Try {name} "
            f"= {0.1 * rcut:.2g}.",
        )


def axis_fits(axis_neuron: int, neuron: Sequence[int]) -> Findings:
    """Yield an error if there are more axis channels than channels."""
    if axis_neuron > neuron[-1]:
        yield error(
            "axis_neuron",
            f" = {axis_neuron}: expected at most {neuron[-1]}, the last number of neuron = "
            f"{show(neuron)}.",
        )


def unavailable_option(value: Any, feature: str) -> Any:
    """Declare an option that is refused unless it has the value that turns a feature off.

    Args:
        value: value that turns it off, the default.
        feature: name with its verb: ``attention over layers is``.
    """
    check = Check(lambda v: v == value, f"{show(value)}: {feature} {NOT_AVAILABLE}")
    return option(
        value,
        f"{feature[0].upper()}{feature[1:].rpartition(' ')[0]}. Only {show(value)} here.",
        check,
    )


# values of `embedding_eval`, as `interpolate` was called
_OLD_VALUES = {"spline": "always", "direct": "never"}


def interpolate_choice(value: str | bool) -> str:
    """Return the value of ``interpolate`` of today: ``auto``, ``always`` or ``never``."""
    if isinstance(value, bool):
        return "always" if value else "never"
    return _OLD_VALUES.get(value, value)


# options that several sections declare: a default, a text and what these fix
cutoff_option = partial(option, unit="angstrom", check=_cutoff)
length_option = partial(option, unit="angstrom", check=not_negative)
activation_option = partial(
    option,
    convert=ActivationName,
    choices=ActivationName.choices,
    check=_bent_silu,
    unavailable="custom_silu",
)
interpolate_option = partial(
    option,
    "auto",
    doc="Whether the embedding networks are interpolated, on a CPU only: `auto` where there are "
    "many pairs of neighbors, `always` (or true), or `never` (or false). Derivatives then "
    "differ by less than 1e-9 of the largest (1e-6 in float32), which is ensured in every "
    "evaluation. The trained networks are ordinary ones.",
    choices=("auto", "always", "never"),
    check=Check(
        lambda v: isinstance(v, bool) or v in _OLD_VALUES,
        "auto, always, never, true or false",
    ),
    convert=interpolate_choice,
    also=(bool,),
    alias=("embedding_eval",),
    is_own=True,
)


def not_one_per_element(
    name: str,
    values: Sequence[Any],
    type_map: Sequence[str],
) -> Findings:
    """Yield an error if the ``values`` of an option are not one for each element."""
    if len(values) != len(type_map):
        yield error(
            name,
            f" = {show(values)}: has length {len(values)}, expected {len(type_map)}, "
            f"one for each of type_map = {show(type_map)}.",
        )


def unknown_types(name: str, types: Iterable[int], type_map: Sequence[str]) -> Findings:
    """Yield an error if one of the ``types`` of an option is no place in ``type_map``."""
    bad = sorted({t for t in types if t >= len(type_map)})
    if bad:
        yield error(
            name,
            f": type {bad[0]} does not exist, expected 0 to {len(type_map) - 1}, places "
            f"in type_map = {show(type_map)}.",
        )


def dashes(numbers: Iterable[int]) -> str:
    """Return widths of layers as text: ``120-120-120``."""
    return "-".join(map(str, numbers))


def dtype_name(precision: str) -> str:
    """Return the name of the dtype of an option ``precision``."""
    return "float64" if precision == "default" else precision
