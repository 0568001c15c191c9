"""Content of model files: their head, parts by kind, and the weights that a reader takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema.distributed.tensors import StoredTensor
from deepmd_ema.errors import CheckpointError
from deepmd_ema.text import first_few
from deepmd_ema.utils import __version__

# number of the format of the payload; this version reads it and all smaller ones
FORMAT = 1

# parts that a file must have, by their path, and their types; a digest covers what is inside of
# them
_ALL: dict[str, Any] = {
    "version": str,
    "weights": str,
    "step": int,
    "config.model": dict,
    "model": dict,
}
_TRAINING = {
    "config.training": dict,
    "optimizer.type": str,
    "streams": dict,
    "display.sums": dict,
    "validation_pending": bool,
}
KINDS: dict[str, dict[str, Any]] = {
    "training": _ALL | _TRAINING,
    "average": _ALL | {"average": dict},
    "best": _ALL,
    "snapshot": _ALL | {"average.type": str, "average.updates": int, "averaged": list},
    # a model of another program may not say of which step it is
    "weights": _ALL | {"step": int | None},
}
_OPTIONAL: dict[str, Any] = {
    # files of 0.1.0 have none of the first two
    "run": str | None,
    "num_steps": int,
    "min_nbor_dist": int | float | dict | None,
    "averages.steps": int,
    "averages.profiles": dict,
    **dict.fromkeys(
        (
            "average",
            "best",
            "early_stop",
            "validated",
            "interpolation",
            "refitted",
            "refitted_bias",
            "bias",
        ),
        dict,
    ),
}
_MISSING = object()  # None is a value of some parts
_CHANGED = (
    "Another program has changed it, or it was not made by a run: take another file."
)
_MAX_COUNT = 1 << 62  # numpy and torch compute with 64 bits


def payload_head(
    kind: str,
    weights: str,
    step: int | None,
    config: Mapping[str, Any],
    min_nbor_dist: Any,
    **more: Any,
) -> dict[str, Any]:
    """Return the first entries of a model file: kind, program, and step and run of its weights.

    Args:
        kind: ``training``, ``average``, ``best``, ``snapshot`` or ``weights``.
        weights: ``live``, or the name of an average.
        step: optimizer steps after which the weights were saved.
        config: normalized config of the run.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it is not known; by
            task if there are several.
        more: what this kind of file has beside, such as ``run``.
    """
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": kind,
        "weights": weights,
        "step": step,
        "config": dict(config),
        "min_nbor_dist": min_nbor_dist,
        **more,
    }


def check_content(payload: Mapping[str, Any], path: str | Path) -> None:
    """Check that ``payload``, read from ``path``, holds the parts of its kind.

    Raises:
        CheckpointError: naming parts that are missing or of another type.
    """
    kind = payload["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"{path}: a file of kind {kind!r}, expected one of {', '.join(KINDS)}. Update dp-ema."
        )
    # An optional part is checked where it is. A section that is there must be complete: with
    # "averages" come their steps and profiles.
    present = {
        name: types
        for name, types in _OPTIONAL.items()
        if name.split(".")[0] in payload
    }
    parts = present | KINDS[kind]
    problems = []
    for name, types in parts.items():
        value: Any = payload
        for key in name.split("."):
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        # Python counts bool among whole numbers
        is_right = (
            types is bool if isinstance(value, bool) else isinstance(value, types)
        )
        # all whole numbers of a file are counts; type() leaves out True and False
        if value is _MISSING:
            problems.append(f"{name} is missing")
        elif not is_right or (type(value) is int and not 0 <= value < _MAX_COUNT):
            problems.append(
                f"{name} is {_describe(value)}, expected {getattr(types, '__name__', types)}"
            )
    # the type of "model" itself was checked above
    weights = payload.get("model")
    items = weights.items() if isinstance(weights, Mapping) else ()
    problems += [
        f"model.{name} is {_describe(tensor)}, expected a tensor of floating-point numbers"
        for name, tensor in items
        if not (
            isinstance(tensor, Tensor | StoredTensor) and tensor.is_floating_point()
        )
    ]
    if problems:
        raise CheckpointError(
            f"{path}: not a file of kind {kind} as dp-ema writes it: {first_few(problems, 5)}. "
            f"{_CHANGED}"
        )


@contextmanager
def reading(path: str | Path, part: str = "its content") -> Iterator[None]:
    """Report errors of the body, which reads a part of a file, as the fault of the file.

    :func:`check_content` checks kinds and types, and no details.

    Raises:
        CheckpointError: naming the part.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path}: {part} is not as dp-ema writes it ({reason}). {_CHANGED}"
        ) from error


def require_finite(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Check that weights of a file are finite, as those that a run writes are.

    Raises:
        CheckpointError: naming those that are not.
    """
    if names := [
        name for name, tensor in weights.items() if not tensor.isfinite().all()
    ]:
        raise CheckpointError(
            f"{path}: damaged, {first_few(names, 5)} is not finite. Take another file."
        )


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return (
        f"{kind} {str(value)[:30]!r}" if isinstance(value, str | int | float) else kind
    )


def weights_in(
    payload: Mapping[str, Any], path: str | Path, profile: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights that a reader of a file uses, by name, and the facts of the average.

    There are no facts about live weights.

    A training checkpoint holds the live weights and every average; any other file holds one set of
    weights. The live buffers complete an average. Tensors that were fitted after training
    (``refitted``) take the place of the raw ones, which only a restart needs.

    Args:
        payload: content of a model file.
        path: where it was read, for messages.
        profile: an average by name (see :func:`choose_profile`), or None for the file's own
            weights.

    Raises:
        CheckpointError: if there is no average of that name.
    """
    saved = payload["weights"]
    weights = dict(payload["model"])
    facts = dict(payload.get("average", {}))
    name = saved
    if profile is not None and payload["kind"] == "training":
        name = choose_profile(payload, path, profile)
        state = averages_in(payload)[name]
        # frozen parameters and buffers that are not averaged stay live
        weights |= state["weights"]
        plain = {
            key: value
            for key, value in state.items()
            if isinstance(value, str | int | float | None)
        }
        # a bank writes -1 before the start, where there is no update
        facts = {"profile": name, **plain, "updates": max(0, state["updates"])}
    elif profile is not None and profile != saved:
        raise CheckpointError(
            f"{path}: holds the weights {saved!r}, not the average {profile!r}."
        )
    return weights | refitted(payload).get(name, {}), facts


def averages_in(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of each average of a training checkpoint by its name; other files: none."""
    return payload.get("averages", {}).get("profiles", {})


def refitted(payload: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that were fitted after training, by name of the weights and by name."""
    # files of 0.1.0 have the bias of their one model in place of tensors by name
    by_weights = payload.get("refitted", payload.get("refitted_bias", {}))
    return {
        name: dict(fitted) if isinstance(fitted, Mapping) else {"out_bias": fitted}
        for name, fitted in by_weights.items()
    }


def choose_profile(
    payload: Mapping[str, Any], path: str | Path, profile: str | None = None
) -> str:
    """Return the name of an average of a training checkpoint: ``profile``, or that of the only one.

    Raises:
        CheckpointError: if there is none, or none of that name, or several and no name.
    """
    profiles = averages_in(payload)
    if not profiles:
        raise CheckpointError(
            f"{path}: no averaged weights in this checkpoint: training.enable_ema was false and "
            "training.averaging "
            'empty. Train with "enable_ema": true, or leave out --use-ema to take the live '
            "weights."
        )
    if profile is None and len(profiles) == 1:
        return str(next(iter(profiles)))
    if profile is None or profile not in profiles:
        wanted = (
            "which average?"
            if profile is None
            else f"no average is called {profile!r}."
        )
        raise CheckpointError(
            f"{path}: {wanted} Give --average one of: {', '.join(profiles)}."
        )
    return profile
