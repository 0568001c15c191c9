"""One page about a run, ``dp-ema report``: curves, errors of all weights, parity, worst frames, the input."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from deepmd_ema import checkpoint
from deepmd_ema.config import RunConfig, saved_config
from deepmd_ema.config.messages import as_text
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.run import choose_validation, open_run, split_off
from deepmd_ema.data.source import FrameSource, evenly_spaced
from deepmd_ema.errors import UserError
from deepmd_ema.files import HTML, atomic_write, refuse_to_lose
from deepmd_ema.infer.evaluate import ErrorReport, predict
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.show import describe
from deepmd_ema.labels import ENERGY, FORCE, METRICS, VIRIAL
from deepmd_ema.metrics import Errors, FrameResult, group_frames
from deepmd_ema.report.plots import plot_curves
from deepmd_ema.report.table import Cell, Column, Table
from deepmd_ema.weight_names import LIVE

VALIDATION, TRAINING = "validation", "training"
_LABELS = (ENERGY, FORCE, VIRIAL)
_QUANTITIES = "EFSV"
_MAX_GROUPS = 40  # rows of a table of systems or kinds of frames
_STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #222 }
img { max-width: 100% }
h2 { margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 0.5rem 0 1.5rem }
td, th { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
caption { text-align: left; font-weight: bold }
pre { overflow-x: auto; background: #f6f6f6; padding: 0.7rem; font-size: 13px }
"""


@dataclass(frozen=True)
class Tested:
    """Errors of some weights on frames of a part of the data.

    Attributes:
        task: empty in a run of one.
        weights: ``live`` or the name of an average.
        part: ``validation`` or ``training``.
        report: the errors.
        kinds: kind of calculation by system and frame, where the data name one.
    """

    task: str
    weights: str
    part: str
    report: ErrorReport
    kinds: Mapping[tuple[str, int], str]


def write_report(run: str | Path, output: str | Path, num_frames: int = 0, device: str | None = None) -> Path:
    """Write the page about a run, which may still be training, and return its path.

    Args:
        run: its folder, of which the newest checkpoint counts, or a training checkpoint.
        output: the page.
        num_frames: most frames that are evaluated of each part of the data, evenly spaced; 0: all for validation, as
            many for training.
        device: on which the model is evaluated.

    Raises:
        UserError: if there is no training checkpoint, its data cannot be read, or a file that is no page is there.
    """
    refuse_to_lose(output, "-o", HTML)
    file = checkpoint.resolve(run)
    payload = checkpoint.load(file)
    if payload["kind"] != "training":
        raise UserError(
            f"{file}: is of the kind {payload['kind']}. Expected the folder of a run, or its model.ckpt.pt."
        )
    folder = Path(run) if Path(run).is_dir() else file.parent
    weights = [LIVE, *payload.get("averages", {}).get("profiles", {})]
    config = saved_config(with_absolute_paths(payload["config"], folder), str(file))
    tested = list(_evaluate(file, config, weights, num_frames, device))
    name = escape(folder.resolve().name)
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as scratch:
        body = [f"<h1>{name}</h1>", f"<pre>{escape(describe(file))}</pre>", *_curves(folder, Path(scratch))]
        body += ["<h2>Errors</h2>", _html(_table_of_errors(tested))]
        for one in tested:  # the averaged weights, which are those to use
            if one.part == VALIDATION and one.weights == weights[min(1, len(weights) - 1)]:
                body += _details(one, Path(scratch))
    text = escape(as_text(payload["config"]))
    body += ["<h2>Input</h2>", f"<details><summary>all options</summary><pre>{text}</pre></details>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    with atomic_write(output) as part:
        part.write_text(
            f'<!doctype html>\n<html lang="en"><head>{head}<title>{name}</title><style>{_STYLE}</style></head>\n<body>'
            + "\n".join(body)
            + "</body></html>\n",
            encoding="utf-8",
        )
    return Path(output)


def _evaluate(
    file: Path, config: RunConfig, weights: Sequence[str], num_frames: int, device: str | None
) -> Iterator[Tested]:
    """Yield the errors by task, weights and part of the data."""
    opened, cache = open_run(config), PairCache()
    data = split_off(config, opened, choose_validation(config, opened, config.training.seed or 0))
    for task in config.tasks:
        valid = evenly_spaced(data[task].valid, num_frames) if num_frames else data[task].valid
        number = sum(source.num_frames for source in valid) or num_frames
        train = evenly_spaced(data[task].train, number) if number else data[task].train
        for name in weights:
            loaded = load_model(file, average=None if name == LIVE else name, head=task or None)
            for part, sources in ((VALIDATION, valid), (TRAINING, train)):
                if sources:
                    ranges = [range(source.num_frames) for source in sources]
                    report = predict(loaded, sources, ranges, device, _LABELS, cache)
                    yield Tested(task, name, part, report, _kinds(sources))


def _kinds(sources: Sequence[FrameSource]) -> dict[tuple[str, int], str]:
    """Return the kinds of calculation by system and number of the frame in it, where the data name one."""
    found = [(source.name, zip(source.numbers.tolist(), source.kinds or ())) for source in sources]
    return {(name, number): kind for name, own in found for number, kind in own if kind}


def _table_of_errors(tested: Sequence[Tested]) -> Table:
    """Return a row of errors for each of ``tested``."""
    rows = [(f"{one.task} {one.weights}, {one.part}".strip(), *_numbers(one.report.total)) for one in tested]
    return Table("", (Column("weights, frames"), *_columns()), rows)


def _columns() -> tuple[Column, ...]:
    errors = [(quantity, kind) for quantity in _QUANTITIES for kind in ("MAE", "RMSE")]
    columns = [Column(f"{quantity} {kind}", METRICS[quantity].display_unit, ".4g") for quantity, kind in errors]
    return (Column("frames", "", ",.0f"), *columns)


def _numbers(errors: Errors) -> list[Cell]:
    values = [
        METRICS[quantity].display_factor * errors.metric(f"{quantity}:{kind}")
        for quantity in _QUANTITIES
        for kind in ("MAE", "RMSE")
    ]
    return [errors.summary()["num_frames"], *values]


def _details(one: Tested, scratch: Path) -> list[str]:
    """Return parity, errors of groups of frames, and the worst frames."""
    report = one.report
    title = f"{one.task} {one.weights}".strip()
    parts = [
        f"<h2>Validation frames, {escape(title)} weights</h2>",
        _image(report.plot(scratch / "parity.png"), "parity"),
    ]
    groups = {"system": report.by_system, "composition": group_frames(report.frames, _composition(report.type_map))}
    if one.kinds:
        groups["kind of calculation"] = group_frames(report.frames, lambda frame: one.kinds.get(frame.source, "none"))
    for name, errors in groups.items():
        if len(errors) > 1:
            rows = [(key, *_numbers(of)) for key, of in list(errors.items())[:_MAX_GROUPS]]
            more = f" (the first {_MAX_GROUPS} of {len(errors)})" * (len(errors) > _MAX_GROUPS)
            parts.append(_html(Table(f"by {name}{more}", (Column(name), *_columns()), rows)))
    tables = [table for table in (report.forces_by_element(), report.worst()) if table.rows]
    return parts + [_html(replace(table, title=table.title.removeprefix("# "))) for table in tables]


def _composition(type_map: Sequence[str]) -> Callable[[FrameResult], str]:
    """Return a function that returns the formula of a frame."""

    def formula(frame: FrameResult) -> str:
        counts = np.bincount(frame.atom_type, minlength=len(type_map))
        return " ".join(f"{name}{n}" for name, n in zip(type_map, counts) if n)

    return formula


def _curves(folder: Path, scratch: Path) -> list[str]:
    try:
        picture = plot_curves([folder], scratch / "curves.png")
    except UserError:
        return ["<h2>Learning curves</h2>", "<p>No rows were written yet.</p>"]
    return ["<h2>Learning curves</h2>", _image(picture, "errors over steps")]


def _image(picture: Path, words: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'


def _html(table: Table) -> str:
    """Return a table as HTML."""
    heads = "".join(
        f"<th>{escape(column.name)}{f'<br>{escape(column.unit)}' if column.unit else ''}</th>"
        for column in table.columns
    )
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in table.texts())
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<tr>{heads}</tr>{rows}</table>"
