"""Which weights a reader takes out of a model file: the live ones or an average, each with its own output bias."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


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
        facts = {"profile": name, **_plain(state)}
    elif profile is not None and profile != own:
        raise CheckpointError(f"{path}: holds the weights {own!r}, not the average {profile!r}.")
    biases = payload.get("refitted_bias", {})
    if name in biases:
        weights["out_bias"] = biases[name]
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


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings and counters of an average without its tensors; before its start it has no update."""
    facts = {key: value for key, value in state.items() if isinstance(value, str | int | float | None)}
    return {**facts, "updates": max(0, state["updates"])}
