"""Facts of a run for its page: model and data, averages, times, programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from deepmd_ema.config import RunConfig
from deepmd_ema.data.run import TaskData
from deepmd_ema.data.source import FrameSource
from deepmd_ema.errors import counted
from deepmd_ema.report.record import Part
from deepmd_ema.report.table import Cell, Column, Table, duration, significant

# parts of the record with their names on the page; those in a step are subtracted from it
_IN_STEP = {
    "forward": "step: forward pass",
    "backward": "step: backward pass",
    "optimizer": "step: clipping, optimizer",
}
_PARTS = {
    "start": "start: data, statistics",
    "data": "waiting for data",
    **_IN_STEP,
    "step": "step",
    "row": "rows of the learning curve",
    "validation": "full validations",
    "checkpoint": "checkpoints",
    "snapshot": "snapshots of averages",
}
DEFINITIONS = (
    ("Energy", "(predicted − reference energy of a frame) / its number of atoms"),
    ("Force", "each Cartesian component of the force on each atom"),
    ("Virial", "each of the nine components of the virial of a frame / its number of atoms"),
    ("Stress", "minus the virial / the volume of the cell; periodic frames only"),
    ("MAE, RMSE", "mean of |error|, and root of the mean of error², over all frames or components that have the label"),
    ("live, averaged", "live weights are those of the optimizer; an average is a mean of live weights over steps"),
    ("mean age", "mean number of steps between the weights in an average and the newest ones"),
    ("deviation", "‖average − live‖ / ‖live‖ over all trained numbers of a part of the model"),
)


def lead(config: RunConfig, data: Mapping[str, TaskData] | None) -> Iterator[str]:
    """Yield a sentence for each task: what was trained on what."""
    for name, task in config.tasks.items():
        words = f"potential {task.model.descriptor.type} for {', '.join(task.model.type_map)}"
        if data is not None:
            words += f", trained on {_amount(data[name].train)}"
            valid = data[name].valid
            words += f", validated on {_amount(valid)}" if valid else ", without validation frames"
        yield f"{name}: {words}." if name else f"{words[0].upper()}{words[1:]}."


def table_of_data(data: Mapping[str, TaskData]) -> Table:
    """Return systems, frames and atoms of each part of the data."""
    rows = list[Sequence[Cell]]()
    for task, of_task in data.items():
        for part, sources in (("training", of_task.train), ("validation", of_task.valid)):
            if sources:
                sizes = [(int(s.frame_sizes.min()), int(s.frame_sizes.max())) for s in sources]
                low, high = min(low for low, _ in sizes), max(high for _, high in sizes)
                atoms = str(low) if low == high else f"{low} to {high}"
                frames = sum(source.num_frames for source in sources)
                rows.append((f"{task} {part}".strip(), len(sources), frames, atoms))
    columns = (Column("data"), Column("systems", "", ",.0f"), Column("frames", "", ",.0f"))
    return Table("", (*columns, Column("atoms of a frame", "", "s")), rows)


def table_of_averages(config: RunConfig, payload: Mapping[str, Any]) -> Table:
    """Return settings, updates and mean age of each average at the step of a training checkpoint."""
    settings = {average.name: average.summary({}) for average in config.training.averaging}
    rows = [
        (name, settings.get(name, ""), max(0, state["updates"]), state["mean_age"] if state["updates"] > 0 else None)
        for name, state in _averages(payload).items()
    ]
    columns = (Column("average"), Column("settings"), Column("updates", "", ",.0f"))
    return Table("", (*columns, Column("mean age", "steps", ",.1f")), rows)


def table_of_deviations(payload: Mapping[str, Any]) -> Table:
    """Return the relative distance of each average from the live weights, by part of the model."""
    live, averages = payload["model"], _averages(payload)
    parts: dict[str, list[str]] = {}
    for name in _once(live):
        if any(name in state["weights"] for state in averages.values()):
            parts.setdefault(_part_of(name, payload), []).append(name)
    rows = list[Sequence[Cell]]()
    whole = {"all trained numbers": [name for names in parts.values() for name in names]} if len(parts) > 1 else {}
    for part, names in (parts | whole).items():
        numbers = sum(live[name].numel() for name in names)
        distances = [significant(100 * _distance(live, state["weights"], names), 3) for state in averages.values()]
        rows.append((part, numbers, *distances))
    columns = [Column(name, "%", "s") for name in averages]
    return Table("", (Column("part of the model"), Column("numbers", "", ",.0f"), *columns), rows)


def times_of(parts: Sequence[Part]) -> list[tuple[str, str, float]]:
    """Return names, times and shares of the parts of a run; empty where there is no record of them."""
    found: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.seconds.items():
            found[name] = found.get(name, 0.0) + seconds
    known = sum(found.get(name, 0.0) for name in _PARTS if name not in _IN_STEP)
    total = max(sum(part.elapsed for part in parts), known)
    in_step = sum(found.get(name, 0.0) for name in _IN_STEP)
    names = dict(_PARTS) | ({"step": "step: averages, the rest"} if in_step else {})
    found["step"] = found.get("step", 0.0) - in_step
    rows = [(text, found[name]) for name, text in names.items() if found.get(name, 0.0) > 0]
    rows.append(("end and everything else", total - sum(seconds for _, seconds in rows)))
    return [(text, duration(seconds), seconds / total) for text, seconds in rows] if total > 0 else []


def facts_of_parts(parts: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """Yield names and texts of programs, machine and dates, of each part of a run that differ."""
    for number, part in enumerate(parts):
        more = f", from step {part.first_step:,}" if part.first_step else ""
        yield "command", f"{part.command}, {part.began[:19]} to {part.updated[:19]}{more}"
        if number and part.programs == parts[number - 1].programs and part.machine == parts[number - 1].machine:
            continue
        yield "programs", ", ".join(f"{name} {version}" for name, version in part.programs.items())
        ranks = f", {counted(part.ranks, 'rank')}" if part.ranks > 1 else ""
        yield "machine", f"{part.machine}; {part.device}{ranks}"


def _amount(sources: Sequence[FrameSource]) -> str:
    frames = sum(source.num_frames for source in sources)
    return f"{counted(frames, 'frame')} of {counted(len(sources), 'system')}"


def _averages(payload: Mapping[str, Any]) -> dict[str, Any]:
    return dict(payload.get("averages", {}).get("profiles", {}))


def _once(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors, of those that tasks share one."""
    seen = {(t.data_ptr(), t.shape) if t.numel() else name: name for name, t in reversed(list(tensors.items()))}
    return [name for name in tensors if name in set(seen.values())]


def _part_of(name: str, payload: Mapping[str, Any]) -> str:
    """Return the part of the model that a tensor belongs to: ``descriptor``, ``water fitting``."""
    tasks = payload["config"]["model"].get("model_dict", {})
    task, _, rest = name.partition(".") if name.partition(".")[0] in tasks else ("", "", name)
    return f"{task} {rest.partition('.')[0]}".strip()


def _distance(live: Mapping[str, torch.Tensor], average: Mapping[str, torch.Tensor], names: Sequence[str]) -> float:
    known = [name for name in names if name in average]
    apart = sum(float((average[name].double() - live[name].double()).square().sum()) for name in known)
    size = sum(float(live[name].double().square().sum()) for name in known)
    return (apart / size) ** 0.5 if size else 0.0
