"""Rules between options of one entry of ``training.averaging``; importing this module enters them."""

from __future__ import annotations

from deepmd_ema.config.messages import dotted, show
from deepmd_ema.config.rules import NEEDS_DATA, AverageEntry, Violations, rule
from deepmd_ema.config.schema.averaging import CustomAverage, ScheduleFreeAverageConfig
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig


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
    """Exactly one of ``decay`` and ``half_life`` is given, or of ``gamma`` and ``sigma_rel``."""
    average = entry.average
    given = [(name, value) for name in average.lengths if (value := getattr(average, name)) is not None]
    if len(given) > 1:
        (first, a), (second, b) = given
        yield second, f" = {b:g}: {first} = {a:g} is given too. Remove one of the two."
    if average.lengths and not given:
        example = '"decay": 0.999' if average.type == "ema" else '"sigma_rel": 0.05'
        yield "", f": {' or '.join(average.lengths)} is required for type {average.type}. Add one, e.g. {example}."


@rule("average")
def averaged_point_is_that_of_an_optimizer(entry: AverageEntry) -> Violations:
    """``schedule_free`` is the averaged point of the optimizer AdamWScheduleFree."""
    optimizer = entry.run.optimizer
    is_there = isinstance(optimizer, AdamWScheduleFreeConfig)
    if isinstance(entry.average, ScheduleFreeAverageConfig) and not is_there:
        why = f"optimizer.type is {optimizer.type}, and only AdamWScheduleFree has this average"
        yield "type", f' = "schedule_free": {why}. Change one of the two.'


@rule("average")
def averaged_point_takes_every_step(entry: AverageEntry) -> Violations:
    """``schedule_free`` has no start and no interval of its own."""
    if isinstance(entry.average, ScheduleFreeAverageConfig):
        for name, default in (("start_step", 0), ("start_epoch", None), ("update_every", 1)):
            if (value := getattr(entry.average, name)) != default:
                yield name, f" = {value:g}: the averaged point of the optimizer is updated in every step. Remove it."


@rule("average")
def one_rule_of_updates(entry: AverageEntry) -> Violations:
    """``update_every`` has no meaning beside a rule of updates of its own."""
    average = entry.average
    if isinstance(average, CustomAverage) and average.update_rule is not None and average.update_every != 1:
        why = f"type {average.type} says itself which steps count"
        yield "update_every", f" = {average.update_every}: {why}. Remove it."


@rule("average")
def one_start_of_the_average(entry: AverageEntry) -> Violations:
    """``start_step`` and ``start_epoch`` exclude each other."""
    average = entry.average
    if average.start_step > 0 and average.start_epoch is not None:
        steps, epoch = average.start_step, average.start_epoch
        yield "start_epoch", f" = {epoch:g}: start_step = {steps} is given too. Remove one of the two."


@rule("average")
def validated_average_needs_data(entry: AverageEntry) -> Violations:
    """``full_validation`` of an average needs ``validation_data``."""
    if entry.average.full_validation and not entry.run.has_validation_data:
        yield "full_validation", NEEDS_DATA


@rule("average")
def displayed_average_needs_display(entry: AverageEntry) -> Violations:
    """``lcurve`` of an average needs ``disp_training``."""
    if entry.average.lcurve and not entry.run.training.disp_training:
        yield "lcurve", " = true: needs training.disp_training, which is false. Set it to true, or remove this."


@rule("average")
def snapshots_have_a_frequency(entry: AverageEntry) -> Violations:
    """``snapshots`` come with the checkpoints, unless ``snapshot_freq`` says otherwise."""
    save_freq = entry.run.training.save_freq
    if entry.average.snapshots and entry.average.snapshot_freq is None and save_freq <= 0:
        why = f"training.save_freq = {save_freq} writes the last step only"
        yield "snapshots", f' = true: needs snapshot_freq, because {why}. Add it, e.g. "snapshot_freq": 1000.'
