"""Rules for the entries of ``training.averaging``: each one function, asked about one entry after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepmd_ema.config.messages import Problem, path_of, show
from deepmd_ema.config.rules import is_broken
from deepmd_ema.config.schema.averaging import (
    SHORT_FORM,
    AverageConfig,
    EmaAverageConfig,
    PowerAverageConfig,
    SwaAverageConfig,
)

if TYPE_CHECKING:
    from deepmd_ema.config.explain import Walk
    from deepmd_ema.config.schema.run import RunConfig

Found = Iterator[tuple[str, str]]
"""Option of the entry that a message begins with (empty: the entry), and the rest of the message."""


@dataclass(frozen=True)
class Entry:
    """One entry of the list.

    Attributes:
        average: what it says.
        number: its place, from 0.
        config: the run around it.
    """

    average: AverageConfig
    number: int
    config: RunConfig

    @property
    def path(self) -> str:
        """Dotted path of the entry."""
        return f"training.averaging[{self.number}]"


@dataclass(frozen=True)
class AverageRule:
    """A rule for an entry; it is silent about an entry in which an option that it looks at is wrong in itself."""

    check: Callable[[Entry], Found]
    looks_at: tuple[str, ...]


AVERAGE_RULES: list[AverageRule] = []


def average_rule(*looks_at: str) -> Callable[[Callable[[Entry], Found]], Callable[[Entry], Found]]:
    """Enter a function into the registry.

    Args:
        looks_at: options that it reads: a name in the entry, or a path with a dot elsewhere.
    """

    def register(check: Callable[[Entry], Found]) -> Callable[[Entry], Found]:
        AVERAGE_RULES.append(AverageRule(check, looks_at))
        return check

    return register


def average_problems(config: RunConfig, walk: Walk) -> list[Problem]:
    """Return what the rules find in the entries of ``training.averaging``."""
    found = []
    for number, average in enumerate(config.training.averaging):
        entry = Entry(average, number, config)
        for r in AVERAGE_RULES:
            paths = [path if "." in path else f"{entry.path}.{path}" for path in r.looks_at]
            if not any(is_broken(path_of(path), walk.broken) for path in paths):
                found += [Problem(path_of(f"{entry.path}.{name}"), text) for name, text in r.check(entry)]
    return found


@average_rule("name", "training.enable_ema")
def names_are_unique(entry: Entry) -> Found:
    """No two averages have one name; upper and lower case are one on some disks."""
    name, averages = entry.average.name, entry.config.training.averaging
    same = [n for n in range(entry.number) if averages[n].name and averages[n].name.lower() == name.lower()]
    if same:
        yield (
            "name",
            f" = {show(name)}: training.averaging[{same[0]}] has this name{_but_case(averages[same[0]].name, name)}. "
            "Choose another.",
        )
    elif entry.config.training.enable_ema and name.lower() == SHORT_FORM:
        yield (
            "name",
            f" = {show(name)}: training.enable_ema already tracks one of that name{_but_case(SHORT_FORM, name)}. "
            "Choose another name, or remove enable_ema.",
        )


def _but_case(one: str, other: str) -> str:
    return "" if one == other else " but for upper and lower case, and so have its files"


@average_rule("decay", "half_life", "gamma", "sigma_rel")
def one_length_of_the_average(entry: Entry) -> Found:
    """An average of type ema has exactly one of ``decay`` and ``half_life``."""
    if isinstance(entry.average, EmaAverageConfig):
        yield from _one_of("decay", "half_life", entry, '"decay": 0.999')


@average_rule("decay", "half_life", "gamma", "sigma_rel")
def one_width_of_the_average(entry: Entry) -> Found:
    """An average of type power has exactly one of ``gamma`` and ``sigma_rel``."""
    if isinstance(entry.average, PowerAverageConfig):
        yield from _one_of("gamma", "sigma_rel", entry, '"sigma_rel": 0.05')


def _one_of(first: str, second: str, entry: Entry, example: str) -> Found:
    a, b = getattr(entry.average, first), getattr(entry.average, second)
    if a is not None and b is not None:
        yield second, f" = {b:g}: {first} = {a:g} is given too. Remove one of the two."
    if a is None and b is None:
        yield "", f": {first} or {second} is required for type {entry.average.type}. Add one, e.g. {example}."


@average_rule("start_step", "start_epoch")
def one_start_of_the_average(entry: Entry) -> Found:
    """``start_step`` and ``start_epoch`` exclude each other."""
    average = entry.average
    if average.start_step > 0 and average.start_epoch is not None:
        yield (
            "start_epoch",
            f" = {average.start_epoch:g}: start_step = {average.start_step} is given too. Remove one of the two.",
        )


@average_rule("full_validation", "training.validation_data")
def validated_average_needs_data(entry: Entry) -> Found:
    """``full_validation`` of an average needs ``validation_data``."""
    if entry.average.full_validation and entry.config.training.validation_data is None:
        yield "full_validation", " = true: needs training.validation_data. Add it, or set this to false."


@average_rule("lcurve", "training.disp_training")
def displayed_average_needs_display(entry: Entry) -> Found:
    """``lcurve`` of an average needs ``disp_training``."""
    if entry.average.lcurve and not entry.config.training.disp_training:
        yield "lcurve", " = true: needs training.disp_training, which is false. Set it to true, or remove this."


@average_rule("snapshots", "snapshot_freq", "training.save_freq")
def snapshots_have_a_frequency(entry: Entry) -> Found:
    """``snapshots`` come with the checkpoints, unless ``snapshot_freq`` says otherwise."""
    average, save_freq = entry.average, entry.config.training.save_freq
    stored = (
        isinstance(average, PowerAverageConfig | SwaAverageConfig)
        and average.snapshots
        and average.snapshot_freq is None
    )
    if stored and save_freq <= 0:
        yield (
            "snapshots",
            f" = true: needs snapshot_freq, because training.save_freq = {save_freq} writes the last step only. "
            'Add it, e.g. "snapshot_freq": 1000.',
        )
