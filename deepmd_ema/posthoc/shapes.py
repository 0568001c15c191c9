"""Decays of the learning rate that are made of snapshots: requested ones, and those that the snapshots resolve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepmd_ema.errors import UserError, counted
from deepmd_ema.posthoc.profiles import SHAPES, Decay, Track, first_grid, percent

DEFAULT_PARTS = (0.05, 0.1, 0.2, 0.4)
MIN_INTERVALS = 4  # between snapshots, in a decay that is not linear: with fewer it equals a linear one
NONE = "none"


@dataclass(frozen=True)
class DecayRequest:
    """A requested decay.

    Attributes:
        shape: one of ``SHAPES``.
        part: its length as a part of the run, above 0 and at most 1.
    """

    shape: str
    part: float


def parse_shapes(words: Sequence[str] | None) -> list[DecayRequest]:
    """Return the decays that a command line names: ``linear``, ``linear:0.2``, several, or ``none``; none for None.

    A shape without a part means one decay with each of ``DEFAULT_PARTS``.

    Raises:
        UserError: naming every word that is none of these.
    """
    if words is None or list(words) == [NONE]:
        return []
    requests: list[DecayRequest] = []
    problems = []
    for word in words:
        found = _parse_word(word)
        requests += found
        if not found:
            names = ", ".join(SHAPES)
            problems.append(
                f"--shapes {word}: expected one of {names}, or one with the part of the run in which the learning rate "
                f"goes down, above 0 and at most 1, as linear:0.2; or {NONE} alone."
            )
    if problems:
        raise UserError(problems)
    return list(dict.fromkeys(requests))


def default_requests() -> list[DecayRequest]:
    """Return every shape with each of ``DEFAULT_PARTS``."""
    return [DecayRequest(shape, part) for shape in SHAPES for part in DEFAULT_PARTS]


def place_decays(
    requests: Sequence[DecayRequest], tracks: Sequence[Track], step: int
) -> tuple[list[Decay], dict[str, list[str]]]:
    """Return the decays with their nodes at snapshots, and by reason the ones that there are too few snapshots for.

    Args:
        requests: a decay begins at the snapshot that is nearest to where its part does.
        tracks: of the snapshots, none of them later than ``step``.
        step: the end of the decays.
    """
    start, every = first_grid(tracks)
    last = (step - start) // every
    marks = sorted({0, last, *(min(last, max(0, (track.end - start) // every)) for track in tracks)})
    decays: dict[Decay, None] = {}
    refused: dict[str, list[str]] = {}
    for request in requests:
        begin = min(marks, key=lambda mark: abs(mark - (1 - request.part) * last))
        nodes = tuple(mark for mark in marks if mark >= begin)
        fewest = 1 if request.shape == "linear" else MIN_INTERVALS
        if len(nodes) > fewest:
            decays[Decay(request.shape, nodes, start, every)] = None
        else:
            name = f"{request.shape} {percent(request.part)}"
            needed = counted(fewest, "interval")
            refused.setdefault(f"less than {needed} between snapshots", []).append(name)
    return list(decays), refused


def _parse_word(word: str) -> list[DecayRequest]:
    """Return the decays that one word names; none if it is not understood."""
    shape, colon, part = word.partition(":")
    if shape not in SHAPES:
        return []
    if not colon:
        return [DecayRequest(shape, each) for each in DEFAULT_PARTS]
    try:
        number = float(part)
    except ValueError:
        return []
    return [DecayRequest(shape, number)] if 0 < number <= 1 else []
