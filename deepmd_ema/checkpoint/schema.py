"""Schema of model files: the parts of each kind and the type of every part, checked once, when a file is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from deepmd_ema.config.schema.text_options import Metric, is_readable
from deepmd_ema.config.unsupported import REMOVED_METRICS
from deepmd_ema.errors import CheckpointError, first_few
from deepmd_ema.tensors import StoredTensor
from deepmd_ema.weight_names import LIVE

Rule: TypeAlias = Callable[[Any, str], Iterator[str]]
"""Yields the mistakes in a value; the second argument is its place."""

_MAX_COUNT = 1 << 62  # of a count; numpy and torch compute with 64 bits
_MAX_PROBLEMS = 5


def check_content(payload: Mapping[str, Any], path: str | Path) -> None:
    """Check that ``payload``, read from ``path``, holds the parts of its kind.

    Raises:
        CheckpointError: naming parts that are missing or of another type.
    """
    kind = payload["kind"]
    rule = KINDS.get(kind) if isinstance(kind, str) else None
    if rule is None:
        raise CheckpointError(f"{path}: a file of kind {kind!r}, expected one of {', '.join(KINDS)}. Update dp-ema.")
    _refuse(_all(rule, _distance_is_of_the_tasks)(payload, ""), path, f"a file of kind {kind}")


def check_frozen_facts(facts: Any, path: str | Path) -> None:
    """Check what a frozen model file says of its weights.

    Raises:
        CheckpointError: naming facts that are of another type.
    """
    _refuse(FROZEN_FACTS(facts, "dp_ema"), path, "a frozen model")


def _refuse(problems: Iterator[str], path: str | Path, what: str) -> None:
    found = list(problems)
    if found:
        raise CheckpointError(
            f"{path}: not {what} as dp-ema writes it: {first_few(found, _MAX_PROBLEMS)}. Another program has changed "
            "it, or it was not made by a run: take another file."
        )


def _value(test: Callable[[Any], bool], wants: str) -> Rule:
    return lambda value, place: iter(() if test(value) else (f"{place} is {_kind(value)}, expected {wants}",))


def _parts(required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    """Return the rule of a dictionary with certain keys; others are not looked at."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, Mapping):
            yield f"{place} is {_kind(value)}, expected a dictionary"
            return
        for name, of_part in {**required, **(optional or {})}.items():
            there = f"{place}.{name}" if place else name
            if name in value:
                yield from of_part(value[name], there)
            elif name in required:
                yield f"{there} is missing"

    return rule


def _each(of_value: Rule) -> Rule:
    """Return the rule of a dictionary by names."""

    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            yield f"{place} is {_kind(value)}, expected a dictionary by names"
            return
        for name, each in value.items():
            yield from of_value(each, f"{place}.{name}" if name else place)

    return rule


def _list(of_item: Rule) -> Rule:
    def rule(value: Any, place: str) -> Iterator[str]:
        if not isinstance(value, list | tuple):
            yield f"{place} is {_kind(value)}, expected a list"
            return
        for number, item in enumerate(value):
            yield from of_item(item, f"{place}[{number}]")

    return rule


def _either(test: Callable[[Any], bool], one: Rule, other: Rule) -> Rule:
    """Return a rule that is ``one`` for a value that passes ``test``, else ``other``."""
    return lambda value, place: (one if test(value) else other)(value, place)


def _all(*rules: Rule) -> Rule:
    """Return the rule of what follows every one of ``rules``; a later one sees only what passed those before."""
    return lambda value, place: iter(next(filter(None, (list(rule(value, place)) for rule in rules)), []))


def _or_none(rule: Rule) -> Rule:
    return lambda value, place: iter(()) if value is None else rule(value, place)


def _of_one_or_each_task(test: Callable[[Any], bool], rule: Rule) -> Rule:
    """Return the rule of a value, or of values by task; ``test`` recognizes a single value."""
    return _either(test, rule, _each(rule))


def _kind(value: Any) -> str:
    if _is_tensor(value):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return (
        f"{type(value).__name__} {str(value)[:30]!r}" if isinstance(value, str | int | float) else type(value).__name__
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MAX_COUNT < value < _MAX_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_int(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | StoredTensor)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


TEXT = _value(lambda v: isinstance(v, str), "a text")
FLAG = _value(lambda v: isinstance(v, bool), "true or false")
NUMBER = _value(_is_number, "a number")
NOT_NEGATIVE = _value(lambda v: _is_number(v) and v >= 0, "a number of at least 0")
WHOLE = _value(_is_int, "a whole number")
COUNT = _value(lambda v: _is_int(v) and v >= 0, "a whole number of at least 0")
POSITIVE = _value(lambda v: _is_int(v) and v > 0, "a whole number above 0")
TENSOR = _value(lambda v: _is_tensor(v) and v.is_floating_point(), "a tensor of floating-point numbers")
TENSORS = _each(TENSOR)
TEXTS = _list(TEXT)

# an average: its settings, which depend on its type, and how far it is
SETTINGS: dict[str, Rule] = {
    **dict.fromkeys(("type", "shape", "profile", "device", "dtype", "layout", "buffers"), TEXT),
    **dict.fromkeys(("step", "start_step", "snapshots"), COUNT),
    **dict.fromkeys(("decay", "effective_decay", "gamma", "sigma_rel", "part", "residual", "condition"), NOT_NEGATIVE),
    "update_every": POSITIVE,
    "warmup": FLAG,
    "should_update": _or_none(TEXT),
    "options": _each(lambda value, place: iter(())),
}
PROGRESS: dict[str, Rule] = {"updates": COUNT, "mean_age": NUMBER}
AVERAGE = _parts({}, {**SETTINGS, **PROGRESS})
# what `dp-ema posthoc` computes with
TRACKED = _parts({"type": TEXT, "start_step": COUNT, "update_every": POSITIVE, **PROGRESS}, SETTINGS)
_UPDATES = _value(lambda v: _is_int(v) and v >= -1, "a whole number of at least -1")  # -1: before the start
HELD = _parts(  # in a training checkpoint
    {"updates": _UPDATES, "mean_age": NUMBER, "weights": TENSORS}, {**SETTINGS, "mean_step": NUMBER}
)

_GRADIENT = _parts({"type": TEXT, "state": _each(TENSORS)})
_KALMAN = _parts(
    {
        "parameters": _each(_list(COUNT)),
        "memory": _value(lambda v: _is_tensor(v) and v.numel() == 1, "a tensor of one number"),
        "covariances": _all(
            _list(_value(lambda v: _is_tensor(v) and v.ndim == 2 and v.shape[0] == v.shape[1], "a square matrix")),
            _value(bool, "at least one matrix"),
        ),
    }
)
OPTIMIZER = _either(lambda v: isinstance(v, Mapping) and v.get("type") == "LKF", _KALMAN, _GRADIENT)

_METRIC = _value(
    lambda v: isinstance(v, str) and (v in REMOVED_METRICS or is_readable(Metric, v)), "a metric such as E:RMSE"
)
_RECORD = _all(
    _value(lambda v: isinstance(v, list | tuple) and len(v) == 2, "a value and its step"),
    lambda v, place: NUMBER(v[0], place),
    lambda v, place: COUNT(v[1], place),
)
_RECORDS = _parts({"metric": _METRIC, "records": _list(_RECORD)})
BEST = _each(_of_one_or_each_task(lambda v: isinstance(v, Mapping) and "records" in v, _RECORDS))
EARLY_STOP = _parts({
    "metric": _METRIC, "waited": COUNT,
    "improvements": _each(_of_one_or_each_task(lambda v: isinstance(v, list | tuple), _RECORD)),
})  # fmt: skip

STREAMS = _each(
    _parts({"frames": COUNT}, {"num_frames": COUNT, "frames_per_step": NUMBER, "display_frames": COUNT, "split": TEXT})
)
_BY_NAME = _each(_of_one_or_each_task(_is_tensor, TENSOR))
DISPLAY = _parts(
    {"sums": _BY_NAME},
    # an older checkpoint has one count for all errors
    {
        "counts": _BY_NAME,
        "count": _of_one_or_each_task(_is_int, COUNT),
        "last": _each(TENSORS),
        "before": _of_one_or_each_task(_is_tensor, TENSOR),
    },
)
AVERAGES = _parts({"steps": COUNT, "tasks": TEXTS, "frozen": TEXTS, "profiles": _each(HELD)})
_FITTED_TO: dict[str, Rule] = {"source": TEXT, "frames": COUNT}
BIAS = _either(
    lambda v: isinstance(v, Mapping) and v.get("mode") == "given",
    _parts({"mode": TEXT}, _FITTED_TO),
    _parts({"mode": TEXT, **_FITTED_TO}),
)
BIASES = _of_one_or_each_task(lambda v: not isinstance(v, Mapping) or "mode" in v, BIAS)

_MODEL = _parts({"type_map": TEXTS})
_SECTIONS = _all(
    _parts({"model": _either(
        lambda v: isinstance(v, Mapping) and "model_dict" in v, _parts({"model_dict": _each(_parts({}))}), _MODEL
    )}),
    _value(_is_plain, "the plain values of an input"),
)  # fmt: skip
_OF_RUN = _all(_SECTIONS, _parts({"training": _parts({"seed": _or_none(WHOLE)})}))
_ALL: dict[str, Rule] = {"version": TEXT, "weights": TEXT, "step": COUNT, "config": _SECTIONS, "model": TENSORS}
_DISTANCE = _value(lambda v: _is_number(v) and v > 0, "a length above 0")
_COMMON: dict[str, Rule] = {
    # files of 0.1.0 have neither of these two
    "run": _or_none(TEXT),
    "num_steps": COUNT,
    "min_nbor_dist": _or_none(_of_one_or_each_task(_is_number, _or_none(_DISTANCE))),
}


def _averaged_are_there(payload: Any, place: str) -> Iterator[str]:
    missing = [name for name in payload["averaged"] if name not in payload["model"]]
    if missing:
        yield f"model.{missing[0]} is missing"


def _distance_is_of_the_tasks(payload: Any, place: str) -> Iterator[str]:
    distance = payload.get("min_nbor_dist")
    if distance is not None and isinstance(distance, Mapping) != ("model_dict" in payload["config"]["model"]):
        yield f"min_nbor_dist is {_kind(distance)}, expected a number, or one for each of several tasks"


INTERPOLATION = _parts({"choice": _each(TEXT), "terms": _each(COUNT), "needed": _each(COUNT)}, {})
# as version 0.1 has it
SPLINES = _parts({"wanted": _each(TEXT)}, {"terms": _each(COUNT), "needed": _each(COUNT), "checked": _each(COUNT)})

KINDS: dict[str, Rule] = {
    "training": _parts(
        {**_ALL, "weights": _value(lambda v: v == LIVE, f"{LIVE!r}"), "config": _OF_RUN, "optimizer": OPTIMIZER,
         "streams": STREAMS, "display": DISPLAY, "validation_pending": FLAG},
        {**_COMMON, "averages": AVERAGES, "best": BEST, "early_stop": EARLY_STOP, "interpolation": INTERPOLATION,
         "splines": SPLINES, "refitted": _each(TENSORS),
         "refitted_bias": _each(_of_one_or_each_task(_is_tensor, TENSOR))},
    ),
    "average": _parts({**_ALL, "average": AVERAGE}, _COMMON),
    "best": _parts(_ALL, {**_COMMON, "average": AVERAGE}),
    "snapshot": _all(_parts({**_ALL, "average": TRACKED, "averaged": TEXTS}, _COMMON), _averaged_are_there),
    # a model of another program may not say of which step it is
    "weights": _parts(
        {**_ALL, "step": _or_none(COUNT)}, {**_COMMON, "average": AVERAGE, "bias": BIASES, "fitted": TEXT}
    ),
}  # fmt: skip

FROZEN_FACTS = _parts(
    {},
    {"weights": TEXT, "step": _or_none(COUNT), "kind": TEXT, "average": AVERAGE, "bias": BIAS, "config": _parts({}),
     "head": TEXT},
)  # fmt: skip
