"""In what two normalized configs differ, for messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_MAX_CHARACTERS = 200  # characters of a value
# sections of an input by task; the shares of the others change when one comes or goes
_BY_TASK = re.compile(r"(?:model\.model_dict|loss_dict|training\.data_dict)\.([^.]+)")
_SHARES = ("training.model_prob", "training.num_epoch_dict")
Difference = tuple[str, Any, Any]


def without_tasks(differences: Iterable[Difference], tasks: Collection[str]) -> Iterator[Difference]:
    """Yield the differences of two configs that do not follow from ``tasks`` being in one of them only."""
    for path, old, new in differences:
        found = _BY_TASK.match(path)
        follows = path.startswith(_SHARES) or (path.startswith("model.shared_dict.") and None in (old, new))
        if not (found and found[1] in tasks) and not (tasks and follows):
            yield path, old, new


def differences_of(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """Yield the path of each option that differs, with both values; None where a section is missing."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(set(old) | set(new)):
            yield from differences_of(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif _are_sections(old) and _are_sections(new) and len(old) == len(new):
        for k, (one, other) in enumerate(zip(old, new)):
            yield from differences_of(one, other, f"{path}[{k}]")
    elif old != new:
        yield path, old, new


def shortened(value: Any) -> str:
    """Return a value as text, shortened: a table of pair energies has thousands of numbers."""
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, Mapping) for part in value)
