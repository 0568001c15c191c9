"""The head of model files, and the weights in them: the live ones or an average, each with its own output bias."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from deepmd_ema import __version__
from deepmd_ema.checkpoint.files import FORMAT
from deepmd_ema.errors import CheckpointError


def payload_head(
    kind: str, weights: str, step: int | None, config: Mapping[str, Any], min_nbor_dist: Any, **more: Any
) -> dict[str, Any]:
    """Return how every model file begins: what it is, who wrote it, and of which run and step the weights are.

    Args:
        kind: ``training``, ``average``, ``best``, ``snapshot`` or ``weights``.
        weights: ``live``, or the name of an average.
        step: optimizer steps after which the weights were saved.
        config: normalized config of the run.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it is not known; by task if there are
            several.
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


def weights_in(
    payload: Mapping[str, Any], path: str | Path, profile: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights that a reader of a file uses, by name, and the facts of the average (empty for live weights).

    A training checkpoint holds the live weights and every average; any other file holds one set of weights. The live
    buffers complete an average. A bias that was fitted after training (``refitted_bias``) takes the place of the raw
    one, which only a restart needs.

    Args:
        payload: content of a model file.
        path: where it was read, for messages.
        profile: an average by name (see :func:`choose_profile`), or None for the file's own weights.

    Raises:
        CheckpointError: if there is no average of that name.
    """
    own = payload["weights"]
    weights, facts, name = dict(payload["model"]), dict(payload.get("average", {})), own
    if profile is not None and payload["kind"] == "training":
        name = choose_profile(payload, path, profile)
        state = payload["averages"]["profiles"][name]
        weights |= state["weights"]
        plain = {key: value for key, value in state.items() if isinstance(value, str | int | float | None)}
        facts = {"profile": name, **plain, "updates": max(0, state["updates"])}  # before its start it has no update
    elif profile is not None and profile != own:
        raise CheckpointError(f"{path}: holds the weights {own!r}, not the average {profile!r}.")
    biases = payload.get("refitted_bias", {})
    if name in biases:
        fitted = biases[name]  # of one model, or by name where there are several
        weights |= fitted if isinstance(fitted, Mapping) else {"out_bias": fitted}
    return weights, facts


def choose_profile(payload: Mapping[str, Any], path: str | Path, profile: str | None = None) -> str:
    """Return the name of an average that a training checkpoint holds: ``profile``, or the only one there is.

    Raises:
        CheckpointError: if there is none, or none of that name, or several and no name.
    """
    profiles = payload.get("averages", {}).get("profiles", {})
    if not profiles:
        raise CheckpointError(
            f"{path}: no averaged weights in this checkpoint: training.enable_ema was false and training.averaging "
            'empty. Train with "enable_ema": true, or leave out --use-ema to take the live weights.'
        )
    if profile is None and len(profiles) == 1:
        return str(next(iter(profiles)))
    if profile is None or profile not in profiles:
        wanted = "which average?" if profile is None else f"no average is called {profile!r}."
        raise CheckpointError(f"{path}: {wanted} Give --average one of: {', '.join(profiles)}.")
    return profile
