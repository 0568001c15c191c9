"""Parts of model files by kind, checked when a file is read; a digest covers what is inside of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema.errors import CheckpointError, first_few
from deepmd_ema.tensors import StoredTensor

# a type, or the parts that a dictionary must have
_ALL: dict[str, Any] = {"version": str, "weights": str, "step": int, "config": {"model": {}}, "model": {}}
KINDS: dict[str, dict[str, Any]] = {
    "training": _ALL
    | {"config": {"model": {}, "training": {}}, "optimizer": {"type": str}, "streams": {}, "display": {"sums": {}}}
    | {"validation_pending": bool},
    "average": _ALL | {"average": {}},
    "best": _ALL,
    "snapshot": _ALL | {"average": {"type": str, "updates": int}, "averaged": list},
    # a model of another program may not say of which step it is
    "weights": _ALL | {"step": int | None},
}
_OPTIONAL: dict[str, Any] = {
    # files of 0.1.0 have none of the first two
    "run": str | None, "num_steps": int, "min_nbor_dist": int | float | dict | None,
    "averages": {"steps": int, "profiles": {}},
    **{name: {} for name in ("average", "best", "early_stop", "interpolation", "refitted", "refitted_bias", "bias")},
}  # fmt: skip
_MAX_COUNT = 1 << 62  # numpy and torch compute with 64 bits


def check_content(payload: Mapping[str, Any], path: str | Path) -> None:
    """Check that ``payload``, read from ``path``, holds the parts of its kind.

    Raises:
        CheckpointError: naming parts that are missing or of another type.
    """
    kind = payload["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{path}: a file of kind {kind!r}, expected one of {', '.join(KINDS)}. Update dp-ema.")
    there = {name: expected for name, expected in _OPTIONAL.items() if name in payload}
    if problems := list(_problems(payload, there | KINDS[kind])):
        raise CheckpointError(
            f"{path}: not a file of kind {kind} as dp-ema writes it: {first_few(problems, 5)}. Another program has "
            "changed it, or it was not made by a run: take another file."
        )


def _problems(content: Mapping[str, Any], parts: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for name, expected in parts.items():
        value: Any = content.get(name)
        kind = dict if isinstance(expected, dict) else expected
        if name not in content:
            yield f"{place}{name} is missing"
        elif not _is_a(value, kind):
            yield f"{place}{name} is {_describe(value)}, expected {getattr(kind, '__name__', kind)}"
        elif isinstance(expected, dict):
            yield from _problems(value, expected, f"{place}{name}.")
    weights = content.get("model") if not place else {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else ():
        if not (isinstance(tensor, Tensor | StoredTensor) and tensor.is_floating_point()):
            yield f"model.{name} is {_describe(tensor)}, expected a tensor of floating-point numbers"


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):  # Python counts it among whole numbers
        return bool(kind is bool)
    return isinstance(value, kind) and (not isinstance(value, int) or 0 <= value < _MAX_COUNT)


def _describe(value: Any) -> str:
    return (
        f"{type(value).__name__} {str(value)[:30]!r}" if isinstance(value, str | int | float) else type(value).__name__
    )
