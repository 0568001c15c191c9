"""Inputs with one change, and what dargs says of them."""

import copy
from pathlib import Path

from dargs.dargs import ArgumentError

from deepmd_ema.config import (
    run_arguments,
)
from deepmd_ema.config.argcheck import find_mistakes, take_options
from deepmd_ema.config.upgrade import upgrade

ROOT = Path(__file__).parents[1]
FILES = sorted(
    [*(ROOT / "examples").rglob("input*.json"), *(ROOT / "configs").glob("*.json")]
)
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    10**18,
    0.5,
    2.0,
    float("nan"),
    "",
    "x",
    "auto",
    "1",
    "a\0",
    [],
    [1],
    ["a"],
    [None],
    [1, "a"],
    [True],
    [[0, 1]],
    {},
    {"a": 1},
    {"type": "x"},
    [{}],
    [{"type": "ema"}],
    {"a": {}},
    1e30,
]


def places(values, path=()):
    """Yield the container and the key of each value in nested sections and lists."""
    items = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    )
    for key, value in items:
        yield values, key
        yield from places(value, (*path, key))


def mutated(values, rng):
    """Return a copy with one to three changes: a value, a key that goes, comes, is misspelled or
    moves.
    """
    values = copy.deepcopy(values)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(places(values))
        if not every:
            return values
        section, key = rng.choice(every)
        kind = rng.randrange(5)
        if kind == 0 or not isinstance(section, dict):
            section[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 1:
            del section[key]
        elif kind == 2:
            section[str(key)[:-1] + rng.choice("xs_")] = section.pop(key)
        elif kind == 3:
            other, name = rng.choice(every)
            section[str(name)] = copy.deepcopy(other[name])
        else:
            section[
                rng.choice(
                    ("type", "sel", "numb_steps", "stop_batch", "neuron", "systems")
                )
            ] = rng.choice(VALUES)
    return values


def judged(values):
    """Return whether dargs accepts an input, and the mistakes that are found in what it refuses."""
    reading, _ = upgrade("input.json", values, {})
    missing_parts = [
        mistake for mistake in reading.mistakes if "shared_dict" in str(mistake)
    ]
    reading.mistakes.clear()
    root = run_arguments(reading.has_tasks)
    take_options(root, reading)
    try:
        root.check_value(root.normalize_value(reading.values), strict=True)
        is_accepted = True
    except ArgumentError:
        is_accepted = False
        reading.mistakes += (
            missing_parts  # in whose places nothing is that dargs could accept
        )
    find_mistakes(root, reading)
    return is_accepted, reading.mistakes
