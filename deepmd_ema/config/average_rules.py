"""Rules for one entry of ``training.averaging``."""

from __future__ import annotations

from deepmd_ema.config.messages import dotted, show
from deepmd_ema.config.rules import NEEDS_DATA, AverageEntry, Violations, rule
from deepmd_ema.config.schema.averaging import EmaAverageConfig, PowerAverageConfig, SwaAverageConfig


@rule("average")
def names_are_unique(entry: AverageEntry) -> Violations:
    """No two averages have one name; upper and lower case are one on some disks."""
    name, averages = entry.average.name, entry.run.training.averaging
    same = next((n for n in range(entry.number) if averages[n].name.lower() == name.lower()), None)
    if same is not None:
        case = "" if averages[same].name == name else " but for upper and lower case, and so have its files"
        first = dotted(entry.run.source.path(f"training.averaging[{same}]"))
        yield "name", f" = {show(name)}: {first} has this name{case}. Choose another."


@rule("average")
def one_length_of_the_average(entry: AverageEntry) -> Violations:
    """An average of type ema has exactly one of ``decay`` and ``half_life``."""
    if isinstance(entry.average, EmaAverageConfig):
        yield from _one_of("decay", "half_life", entry, '"decay": 0.999')


@rule("average")
def one_width_of_the_average(entry: AverageEntry) -> Violations:
    """An average of type power has exactly one of ``gamma`` and ``sigma_rel``."""
    if isinstance(entry.average, PowerAverageConfig):
        yield from _one_of("gamma", "sigma_rel", entry, '"sigma_rel": 0.05')


def _one_of(first: str, second: str, entry: AverageEntry, example: str) -> Violations:
    a, b = getattr(entry.average, first), getattr(entry.average, second)
    if a is not None and b is not None:
        yield second, f" = {b:g}: {first} = {a:g} is given too. Remove one of the two."
    if a is None and b is None:
        yield "", f": {first} or {second} is required for type {entry.average.type}. Add one, e.g. {example}."


@rule("average")
def one_start_of_the_average(entry: AverageEntry) -> Violations:
    """``start_step`` and ``start_epoch`` exclude each other."""
    average = entry.average
    if average.start_step > 0 and average.start_epoch is not None:
        yield (
            "start_epoch",
            f" = {average.start_epoch:g}: start_step = {average.start_step} is given too. Remove one of the two.",
        )


@rule("average")
def validated_average_needs_data(entry: AverageEntry) -> Violations:
    """``full_validation`` of an average needs ``validation_data``."""
    if entry.average.full_validation and entry.run.training.validation_data is None:
        yield "full_validation", NEEDS_DATA


@rule("average")
def displayed_average_needs_display(entry: AverageEntry) -> Violations:
    """``lcurve`` of an average needs ``disp_training``."""
    if entry.average.lcurve and not entry.run.training.disp_training:
        yield "lcurve", " = true: needs training.disp_training, which is false. Set it to true, or remove this."


@rule("average")
def snapshots_have_a_frequency(entry: AverageEntry) -> Violations:
    """``snapshots`` come with the checkpoints, unless ``snapshot_freq`` says otherwise."""
    average, save_freq = entry.average, entry.run.training.save_freq
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
