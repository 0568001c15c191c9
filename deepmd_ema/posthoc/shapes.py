"""Decays of the learning rate that are made of snapshots: requested ones, and those that the snapshots resolve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deepmd_ema.errors import UserError, counted
from deepmd_ema.posthoc.profiles import SHAPES, Decay, Track, first_grid, percent

DEFAULT_PARTS = (0.05, 0.1, 0.2, 0.4)
MIN_INTERVALS = 4  # between snapshots, in a decay that is not linear: with fewer it equals a linear one
NONE = "none"

T = TypeVar("T")


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
    expected = (
        f"one of {', '.join(SHAPES)}, or one with the part of the run in which the learning rate goes down, above 0 "
        f"and at most 1, as linear:0.2; or {NONE} alone."
    )
    return list(dict.fromkeys(parse_words("--shapes", words, _parse_word, expected)))


def parse_words(option: str, words: Sequence[str], parse: Callable[[str], list[T]], expected: str) -> list[T]:
    """Return the values that the words of an option name.

    Args:
        option: its name.
        words: as given.
        parse: returns the values that one word names; none if it is not understood.
        expected: completes the sentence ``expected ...``.

    Raises:
        UserError: naming every word that is not understood.
    """
    found = [parse(word) for word in words]
    if not all(found):
        raise UserError([f"{option} {word}: expected {expected}" for word, values in zip(words, found) if not values])
    return [value for values in found for value in values]


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
