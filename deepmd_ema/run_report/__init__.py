"""One page about a run, ``dp-ema report``: errors, curves, parity, averages, times, data and programs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmd_ema import checkpoint
from deepmd_ema.config import RunConfig, config_summary, saved_config
from deepmd_ema.config.messages import as_text
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.data.run import TaskData, open_split
from deepmd_ema.errors import UserError, command, counted
from deepmd_ema.files import HTML, atomic_write, check_output
from deepmd_ema.metrics import Errors
from deepmd_ema.model.model_set import nested
from deepmd_ema.report.panels import draw_curves, draw_parities
from deepmd_ema.report.plots import read_curves
from deepmd_ema.report.status import ENDED, RunStatus, describe_row, read_status, run_folder
from deepmd_ema.report.table import duration
from deepmd_ema.run_report import errors, facts, html
from deepmd_ema.run_report.errors import TRAINING, VALIDATION, Tested
from deepmd_ema.weight_names import LIVE

_MAX_SHOWN = 2  # averages in the first table


@dataclass(frozen=True)
class Report:
    """A page that was written.

    Attributes:
        path: the page.
        remarks: what it lacks, and why.
    """

    path: Path
    remarks: Sequence[str]


@dataclass(frozen=True)
class _Run:
    """The subject of the page.

    Attributes:
        folder: of the run.
        file: its newest training checkpoint.
        payload: content of that.
        config: of the run, with absolute paths of its data.
        status: how far it is; None of a checkpoint that lies elsewhere.
        data: frames of each task; None where they cannot be read.
        tested: errors of all weights; none where there are no data.
        chosen: the weights of which details are shown.
    """

    folder: Path
    file: Path
    payload: Mapping[str, Any]
    config: RunConfig
    status: RunStatus | None
    data: Mapping[str, TaskData] | None
    tested: Sequence[Tested]
    chosen: str

    @property
    def weights(self) -> list[str]:
        """``live`` and the names of the averages, the chosen one first."""
        found = weights_of(self.payload)
        return sorted(found, key=lambda name: (name != LIVE, name != self.chosen))

    @property
    def base(self) -> str:
        """Folder that all systems are in."""
        assert self.data is not None
        return errors.folder_of(self.data)

    def of(self, task: str, part: str) -> list[Tested]:
        """Return the errors of a task on a part of the data, in the order of the weights."""
        found = [one for one in self.tested if (one.task, one.part) == (task, part)]
        return sorted(found, key=lambda one: self.weights.index(one.weights))


def write_report(
    run: str | Path,
    output: str | Path,
    num_frames: int = 0,
    device: str | None = None,
    average: str | None = None,
) -> Report:
    """Write the page about a run, which may still be training or have been interrupted.

    Args:
        run: its folder, of which the newest checkpoint counts, or a training checkpoint.
        output: the page.
        num_frames: most frames that are evaluated of each part of the data, evenly spaced; 0: all for validation, as
            many for training.
        device: on which the model is evaluated.
        average: the average of which details are shown; the first one if None, the live weights if there is none.

    Raises:
        UserError: if there is no training checkpoint, or a file that is no page is there.
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib  # noqa: F401 - reported before the work, not after it

    check_output(output, "-o", HTML)
    remarks = list[str]()
    file, status = _newest_checkpoint(Path(run))
    payload = checkpoint.load(file)
    if payload["kind"] != "training":
        raise UserError(
            f"{file}: is of the kind {payload['kind']}. Expected the folder of a run, or its model.ckpt.pt."
        )
    weights = weights_of(payload)
    chosen = weights[min(1, len(weights) - 1)] if average is None else checkpoint.choose_profile(payload, file, average)
    folder = status.folder if status is not None else file.parent
    config = saved_config(with_absolute_paths(payload["config"], folder), str(file))
    data, tested = None, list[Tested]()
    try:
        data = open_split(config)
        tested = list(errors.evaluate(file, data, weights, num_frames, device))
    except UserError as error:
        remarks.append(f"The errors of single frames are missing: {error.problems[0]}")
    if status is not None and status.state != ENDED:
        remarks.append(f"Status: {status.describe()}. The page shows the checkpoint of step {payload['step']:,}.")
    on_page = list(remarks)
    if len(weights) > 2 and average is None:
        remarks.append(f"Details are of the average {chosen}; --average shows another: {', '.join(weights[2:])}.")
    about = _Run(folder, file, payload, config, status, data, tested, chosen)
    name = folder.resolve().name
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as scratch:
        parts = list(_parts(name, about, on_page, Path(scratch)))
    with atomic_write(output) as part:
        part.write_text(html.document(f"{name}: report of a training run", parts), encoding="utf-8")
    return Report(Path(output), remarks)


def weights_of(payload: Mapping[str, Any]) -> list[str]:
    """Return ``live`` and the names of the averages in a training checkpoint."""
    return [LIVE, *payload.get("averages", {}).get("profiles", {})]


def _newest_checkpoint(run: Path) -> tuple[Path, RunStatus | None]:
    """Return a training checkpoint, and the status of its run if that is known.

    Raises:
        UserError: if there is none.
    """
    if run.is_dir() and not checkpoint.is_sharded(run):
        status = read_status(run)
        if not status.checkpoint:
            show = command("dp-ema", "show", run)
            raise UserError(
                f"{run}: no checkpoint yet ({status.describe()}), and a report shows the newest. `{show}` says how far "
                "the run is."
            )
        return checkpoint.resolve(run), status
    file, known = checkpoint.resolve(run), None
    with suppress(UserError):
        known = read_status(run_folder(run.parent))
    return file, known


def _parts(name: str, run: _Run, remarks: Sequence[str], scratch: Path) -> Iterator[str]:
    """Yield the parts of the page from top to bottom."""
    yield f"<header><h1>{html.escape(name)}</h1>"
    yield from (html.paragraph(sentence, "lead") for sentence in facts.lead(run.config, run.data))
    yield "".join(html.paragraph(remark, "notice") for remark in remarks)
    yield from _final_errors(run)
    yield html.facts_list(_first_facts(run)) + "</header>"
    sections = {
        "Learning curves": list(_curves(run, scratch)),
        "Parity": list(_parity(run, scratch)),
        "Errors in detail": list(_details(run)),
        "Worst frames": list(_worst(run)),
        "Averages": list(_averages(run)),
        "Time": list(_times(run)),
        "Data": [html.table(facts.table_of_data(run.data))] if run.data is not None else [],
        "Input": [
            html.facts_list(config_summary(run.config)),
            html.folded("all options", as_text(run.payload["config"])),
        ],
        "Programs and machine": list(_programs(run)),
        "Last warnings": list(_warnings(run)),
        "Definitions": [html.facts_list(facts.DEFINITIONS)],
    }
    shown = {title: (title.lower().replace(" ", "-"), body) for title, body in sections.items() if body}
    yield f"<nav>{''.join(f'<a href=#{anchor}>{title}</a>' for title, (anchor, _) in shown.items())}</nav>"
    for title, (anchor, body) in shown.items():
        yield f"<section>{html.heading(title, anchor)}"
        yield from body
        yield "</section>"


def _first_facts(run: _Run) -> Iterator[tuple[str, str]]:
    status, step = run.status, run.payload["step"]
    if status is not None:
        yield "run", status.describe()
        if status.parts:
            part = status.parts[-1]
            yield "time", f"{duration(status.elapsed or 0.0)} on {part.device}, {part.updated[:10]}"
    yield "shown here", f"{run.file.name}, step {step:,}" + f"; details of {run.chosen}" * (run.chosen != LIVE)
    if status is not None:
        name = "best" if status.state == ENDED else "best so far"
        yield from ((name, f"{weights}: {status.describe_best(weights)}") for weights in status.best)


def _final_errors(run: _Run) -> Iterator[str]:
    """Yield a table of errors of live and averaged weights for each task."""
    shown = run.weights[: 1 + _MAX_SHOWN]
    display = run.payload["display"]
    before = nested(display["before"], tuple(run.config.tasks)) if "before" in display else {}
    for task in run.config.tasks:
        tested = run.of(task, VALIDATION) or run.of(task, TRAINING)
        if tested:
            part, frames = tested[0].part, len(tested[0].report.frames)
            columns = [one for one in tested if one.weights in shown]
            title = f"{task}: " * bool(task) + counted(frames, f"{part} frame")
            known = Errors(before[task]) if task in before and part == VALIDATION else None
            same = known is not None and known.summary()["num_frames"] == frames  # not a part of them
            yield html.table(errors.table_of_quantities(columns, title, known if same else None))
    if not run.tested and run.status is not None:
        for weights, row in run.status.validation.items():
            yield html.paragraph(f"{weights}, validation of step {row['step']:,}: {describe_row(row)}")
    yield '<p class=soft>Errors per atom and per component: <a href="#definitions">definitions</a>.</p>'


def _curves(run: _Run, scratch: Path) -> Iterator[str]:
    try:
        curves = read_curves([run.folder])
    except UserError:
        yield html.paragraph("No rows were written yet.")
        return
    for number, task in enumerate(run.config.tasks):
        own = [curve for curve in curves if curve.task == task]
        if own:
            folder = scratch / f"curves{number}"
            folder.mkdir()
            drawn, keys = draw_curves(own, folder)
            yield f"<h3>{html.escape(task)}</h3>" * bool(task) + html.keys(keys) + html.figures(drawn)


def _details_of(run: _Run) -> Iterator[Tested]:
    """Yield the errors of the chosen weights for each task, on validation frames if there are any."""
    for task in run.config.tasks:
        found = run.of(task, VALIDATION) or run.of(task, TRAINING)
        yield from (one for one in found if one.weights == run.chosen)


def _parity(run: _Run, scratch: Path) -> Iterator[str]:
    for number, one in enumerate(_details_of(run)):
        folder = scratch / f"parity{number}"
        folder.mkdir()
        yield html.paragraph(_about(one)) + html.figures(draw_parities(one.report.pairs(), folder))
    if run.tested:
        words = "Where dots would hide each other, the color shows their number: yellow is most."
        yield html.paragraph(words, "soft")


def _about(one: Tested) -> str:
    task = f"{one.task}: " if one.task else ""
    return f"{task}{counted(len(one.report.frames), f'{one.part} frame')}, weights {one.weights}."


def _details(run: _Run) -> Iterator[str]:
    if run.tested:
        yield html.table(errors.table_of_weights(run.tested))
    for one in _details_of(run):
        yield html.paragraph(_about(one))
        tables = [errors.table_of_elements(one), *errors.tables_of_groups(one, run.base)]
        yield from (html.table(table, long=("system",)) for table in tables if table.rows)


def _worst(run: _Run) -> Iterator[str]:
    for one in _details_of(run):
        yield html.paragraph(_about(one))
        yield html.table(errors.table_of_worst_frames(one, run.base), long=("file",))


def _averages(run: _Run) -> Iterator[str]:
    if len(run.weights) > 1:
        yield html.table(facts.table_of_averages(run.config, run.payload), long=("settings",))
        yield "<h3>Deviation from the live weights</h3>"
        yield html.table(facts.table_of_deviations(run.payload))


def _times(run: _Run) -> Iterator[str]:
    parts = run.status.parts if run.status is not None else ()
    if rows := facts.times_of(parts):
        total = duration(sum(part.elapsed for part in parts))
        restarts = f" in {counted(len(parts), 'part')}" * (len(parts) > 1)
        yield html.bars(f"{total}{restarts}", rows)
    else:
        yield html.paragraph("Not known: the folder has no record of the run.")


def _programs(run: _Run) -> Iterator[str]:
    found = [("checkpoint", f"written by dp-ema {run.payload['version']}")]
    yield html.facts_list([*found, *facts.facts_of_parts(run.status.parts if run.status is not None else ())])


def _warnings(run: _Run) -> Iterator[str]:
    parts = run.status.parts if run.status is not None else ()
    found = [(time, text) for part in parts for time, text in part.warnings]
    if found:
        yield html.facts_list((time[:19], text) for time, text in found)
    elif parts:
        yield html.paragraph("None.")
