"""One page about a run, ``dp-ema report``: errors, curves, parity, averages, times, data and
programs.
"""

from __future__ import annotations

import base64
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from string import Template

from deepmd_ema import checkpoint
from deepmd_ema.config import config_summary, saved_config
from deepmd_ema.config.labels import ATOM_PREF, ENERGY, GPA, METRICS, VIRIAL
from deepmd_ema.config.messages import as_text
from deepmd_ema.config.outputs import is_sharded, with_absolute_paths
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.run import TaskData, open_split
from deepmd_ema.data.source import FrameSource, evenly_spaced
from deepmd_ema.distributed.files import HTML, atomic_write, check_output
from deepmd_ema.errors import DataError, UserError, command, counted
from deepmd_ema.infer.evaluate import (
    WORST,
    ErrorReport,
    describe_composition,
    open_labelled,
    predict,
)
from deepmd_ema.infer.load import load_model
from deepmd_ema.model.metrics import Errors, worst_frames
from deepmd_ema.model.model_set import nested
from deepmd_ema.report.curves import read_curves
from deepmd_ema.report.plots import Figure, Key, curve_figures, parity_figures
from deepmd_ema.report.record import Part, table_of_times
from deepmd_ema.report.status import ENDED, RunStatus, describe_row
from deepmd_ema.report.table import Cell, Column, Table, duration, significant
from deepmd_ema.utils import LIVE

VALIDATION = "validation"
TEST = "test"
TRAINING = "training"
KINDS = ("RMSE", "MAE")
_DIGITS = 3
_MAX_SHOWN = 2  # averages in the first table
_MAX_GROUPS = 40  # rows of a table of systems or kinds of frames


@dataclass(frozen=True)
class Tested:
    """Errors of some weights on frames of a part of the data.

    Attributes:
        task: empty in a run of one.
        weights: ``live`` or the name of an average.
        part: ``validation``, ``test`` or ``training``.
        report: the errors.
    """

    task: str
    weights: str
    part: str
    report: ErrorReport

    def describe(self) -> str:
        """Return such as ``ice: 24 validation frames, weights ema.``."""
        task = f"{self.task}: " if self.task else ""
        return (
            f"{task}{counted(len(self.report.frames), f'{self.part} frame')}, weights "
            f"{self.weights}."
        )


def write_report(
    run: str | Path,
    output: str | Path,
    num_frames: int = 0,
    device: str | None = None,
    average: str | None = None,
    systems: Sequence[str] = (),
    title: str | None = None,
) -> list[str]:
    """Write the page about a run, which may still be training or have been interrupted; return what
    it lacks, and why.

    Args:
        run: its folder, of which the newest checkpoint counts, or a training checkpoint.
        output: the page.
        num_frames: most frames that are evaluated of each part of the data, evenly spaced; 0: all
            for validation and test, as many as for validation for training.
        device: on which the model is evaluated.
        average: the average of which details are shown; the first one if None, the live weights if
            there is none.
        systems: test data of a run of one task, in place of those of its input.
        title: of the page; the name of the folder if None.

    Raises:
        UserError: if there is no training checkpoint, or a file that is no page is there.
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib  # noqa: F401 - reported before the work, not after it

    check_output(output, "-o", HTML)
    page = _Page(Path(run), num_frames, device, average, systems)
    if title is not None:
        page.title = title
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as scratch:
        body = "\n".join(page.parts(Path(scratch)))
    # its style is for screens of any width and for paper; pictures are drawn once, and inverted in
    # dark mode
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    with atomic_write(output) as part:
        part.write_text(template.substitute(title=escape(page.title), body=body), encoding="utf-8")
    if len(page.weights) > 2 and average is None:
        others = ", ".join(page.weights[2:])
        page.remarks.append(
            f"Details are of the average {page.chosen}; --average shows another: {others}."
        )
    return page.remarks


def _evaluate(
    file: Path,
    data: Mapping[str, TaskData],
    weights: Sequence[str],
    num_frames: int,
    device: str | None,
) -> Iterator[Tested]:
    """Yield the errors by task, weights and part of the data; arguments are those of
    :func:`write_report`.
    """
    cache = PairCache()
    for task, of_task in data.items():
        valid, test = (
            evenly_spaced(s, num_frames) if num_frames else s for s in (of_task.valid, of_task.test)
        )
        number = sum(source.num_frames for source in valid) or num_frames
        train = evenly_spaced(of_task.train, number) if number else of_task.train
        for name in weights:
            loaded = load_model(file, average=None if name == LIVE else name, head=task or None)
            for part, sources in ((VALIDATION, valid), (TEST, test), (TRAINING, train)):
                if sources:
                    ranges = [range(source.num_frames) for source in sources]
                    labels = loaded.config.fitting_net.labels
                    report = predict(loaded, sources, ranges, device, labels, cache)
                    yield Tested(task, name, part, report)


class _Page:
    """The parts of the page as HTML; arguments are those of :func:`write_report`.

    Attributes:
        status: how far the run is; None of a checkpoint that lies elsewhere.
        file: its newest training checkpoint.
        payload: content of that.
        folder: of the run.
        title: its name.
        config: of the run, with absolute paths of its data.
        data: frames of each task; None where they cannot be read.
        base: folder that all systems are in, which is left out of their names.
        tested: errors of all weights; none where there are no data.
        remarks: what the page lacks, and why.
        weights: ``live`` and the names of the averages, the chosen one first.
        chosen: the weights of which details are shown.
        shown: by task and part, the errors in the order of the weights: on validation frames, or on
            training frames if there are none, and on test frames.
        details: those of the chosen weights.
    """

    def __init__(
        self,
        run: Path,
        num_frames: int,
        device: str | None,
        average: str | None,
        systems: Sequence[str],
    ) -> None:
        self.status: RunStatus | None = None
        if run.is_dir() and not is_sharded(run):
            self.status = RunStatus(run)
            if not self.status.checkpoint:
                raise UserError(
                    f"{run}: no checkpoint yet ({self.status.describe()}), and a report shows the "
                    f"newest. `{command('dp-ema', 'show', run)}` says how far the run is."
                )
        self.file = file = checkpoint.resolve(run)
        if self.status is None:
            with suppress(UserError):  # a checkpoint that lies elsewhere
                self.status = RunStatus(file.parent)
        self.payload = payload = checkpoint.load(file)
        if payload["kind"] != "training":
            raise UserError(
                f"{file}: is of the kind {payload['kind']}. Expected the folder of a run, or its "
                "model.ckpt.pt."
            )
        weights = [LIVE, *payload.get("averages", {}).get("profiles", {})]
        first = weights[min(1, len(weights) - 1)]
        self.chosen = (
            first if average is None else checkpoint.choose_profile(payload, file, average)
        )
        self.folder = self.status.folder if self.status is not None else file.parent
        self.title = self.folder.resolve().name
        self.config = saved_config(with_absolute_paths(payload["config"], self.folder), str(file))
        if systems and len(self.config.tasks) > 1:
            raise UserError(
                "-s: of a run of several tasks. Name their test data in validating.test_data_dict."
            )
        model = next(iter(self.config.tasks.values())).model
        labels = model.fitting_net.labels
        if ENERGY in labels:
            labels = (*labels, ATOM_PREF)
        test = open_labelled(systems, model, labels) if systems else []
        self.data: Mapping[str, TaskData] | None = None
        self.tested, self.remarks = list[Tested](), list[str]()
        try:
            with suppress(DataError):  # of test data that were moved; their rows are in the run
                self.data = open_split(self.config, with_test=not systems)
            self.data = self.data or open_split(self.config)
            self.data = {
                name: of_task._replace(test=test or of_task.test)
                for name, of_task in self.data.items()
            }
            sources = [
                source for of_task in self.data.values() for part in of_task for source in part
            ]
            self.base = os.path.commonpath(
                [os.path.dirname(os.path.abspath(source.name)) for source in sources]
            )
            self.tested = list(_evaluate(file, self.data, weights, num_frames, device))
        except UserError as error:
            self.remarks.append(f"The errors of single frames are missing: {error.problems[0]}")
        if self.status is not None and self.status.state != ENDED:
            self.remarks.append(
                f"Status: {self.status.describe()}. The checkpoint is of step {payload['step']:,}."
            )
        self.weights = sorted(weights, key=lambda name: (name != LIVE, name != self.chosen))
        self.shown: dict[tuple[str, str], list[Tested]] = {}
        for one in sorted(self.tested, key=lambda one: self.weights.index(one.weights)):
            if one.part != TRAINING or (self.data and not self.data[one.task].valid):
                self.shown.setdefault((one.task, one.part), []).append(one)
        self.details = [
            one for of_part in self.shown.values() for one in of_part if one.weights == self.chosen
        ]

    def parts(self, scratch: Path) -> Iterator[str]:
        """Yield the parts of the page from top to bottom; pictures are made in the folder
        ``scratch``.
        """
        yield f"<header><h1>{escape(self.title)}</h1>"
        for name, task in self.config.tasks.items():
            label = task.model.fitting_net.labels[0].partition("[")[0]
            kind = "potential" if label == ENERGY else f"{label} model"
            words = f"{kind} {task.model.descriptor.type} for {', '.join(task.model.type_map)}"
            if self.data is not None:
                valid = self.data[name].valid
                words += f", trained on {_amount(self.data[name].train)}"
                words += (
                    f", validated on {_amount(valid)}" if valid else ", without validation frames"
                )
            yield _paragraph(
                f"{name}: {words}." if name else f"{words[0].upper()}{words[1:]}.", "lead"
            )
        yield "".join(_paragraph(remark, "notice") for remark in self.remarks)
        yield from self._final_errors()
        yield _list(self._first_facts()) + "</header>"
        records = self.status.parts if self.status is not None else ()
        warnings = [(time[:19], text) for part in records for time, text in part.warnings]
        times = table_of_times(records)
        options = escape(as_text(self.payload["config"]))
        sections = {
            "Learning curves": list(self._curves(scratch)),
            "Parity": list(self._parity(scratch)),
            "Errors in detail": list(self._details()),
            "Worst frames": [part for one in self.details for part in self._worst(one)],
            "Averages": list(self._averages()),
            "Time": [
                _table(times)
                if times.rows
                else _paragraph("Not known: the folder has no record of the run.")
            ],
            "Data": [_table(_table_of_data(self.data))] if self.data is not None else [],
            "Input": [
                _list(config_summary(self.config)),
                f"<details><summary>all options</summary><pre>{options}</pre></details>",
            ],
            "Programs and machine": [_list(self._programs(records))],
            "Last warnings": [_list(warnings) if warnings else _paragraph("None.")]
            if records
            else [],
        }
        shown = {
            title: (title.lower().replace(" ", "-"), body)
            for title, body in sections.items()
            if body
        }
        links = [f"<a href=#{anchor}>{title}</a>" for title, (anchor, _) in shown.items()]
        yield f"<nav>{''.join(links)}"
        yield "<a href=#definitions>Definitions</a></nav>"
        for title, (anchor, body) in shown.items():
            yield f'<section><h2 id="{anchor}">{title}</h2>'
            yield from body
            yield "</section>"

    def _first_facts(self) -> Iterator[tuple[str, str]]:
        status = self.status
        if status is not None:
            yield "run", status.describe()
            for part in status.parts[-1:]:
                yield (
                    "time",
                    f"{duration(status.elapsed or 0.0)} on {part.device}, {part.updated[:10]}",
                )
        details = f"; details of {self.chosen}" if self.chosen != LIVE else ""
        yield "shown here", f"{self.file.name}, step {self.payload['step']:,}{details}"
        if status is not None:
            name = "best" if status.state == ENDED else "best so far"
            yield from (
                (name, f"{weights}: {status.describe_best(weights)}") for weights in status.best
            )

    def _final_errors(self) -> Iterator[str]:
        """Yield a table of errors of live and averaged weights for each task and part of the
        data.
        """
        display = self.payload["display"]
        before = nested(display["before"], tuple(self.config.tasks)) if "before" in display else {}
        for (task, part), of_part in self.shown.items():
            tested = [one for one in of_part if one.weights in self.weights[: 1 + _MAX_SHOWN]]
            frames = len(tested[0].report.frames)
            columns = [(one.weights, "" if one.weights == LIVE else "averaged") for one in tested]
            errors = [one.report.total for one in tested]
            if task in before and part == VALIDATION:
                first = Errors(before[task])
                if first.summary()["num_frames"] == frames:  # not a part of them
                    columns, errors = [("at the start", "loaded"), *columns], [first, *errors]
            sizes = tested[0].report.labels
            columns.append(("labels", "RMS"))
            rows = list[Sequence[Cell]]()
            for q, kind in product(_quantities(tested), KINDS):
                name = ", ".join(
                    filter(None, (f"{METRICS[q].title} {kind}", METRICS[q].display_unit))
                )
                # energies have no zero
                size = _error(sizes, q, kind) if kind == "RMSE" and q not in "EQ" else ""
                rows.append([name, *(_error(of, q, kind) for of in errors), size])
            if "S" in _quantities(tested):
                stresses = (GPA * of.metric("S:RMSE") for of in errors)
                rows.append(
                    ["Stress RMSE, GPa", *(significant(stress, _DIGITS) for stress in stresses), ""]
                )
            title = (f"{task}: " if task else "") + counted(frames, f"{part} frame")
            yield _table(
                Table("", (Column(title), *(Column(*column, "s") for column in columns)), rows)
            )
        if not self.tested and self.status is not None:
            for weights, row in self.status.validation.items():
                yield _paragraph(
                    f"{weights}, validation of step {row['step']:,}: {describe_row(row)}"
                )
        if (
            self.status is not None
            and self.status.test
            and not any(part == TEST for _, part in self.shown)
        ):
            test = self.status.test.items()
            yield "<h3>Test data</h3>" + _list(
                (n, f"step {row['step']:,.0f}: {describe_row(row)}") for n, row in test
            )
        yield (
            "<p class=soft>Errors per atom and per component: <a "
            'href="#definitions">definitions</a>.</p>'
        )

    def _curves(self, scratch: Path) -> Iterator[str]:
        try:
            curves = read_curves([self.folder])
        except UserError:
            yield _paragraph("No rows were written yet.")
            return
        for task in self.config.tasks:
            if of_task := [curve for curve in curves if curve.task == task]:
                tested = self.shown.get((task, VALIDATION), ())
                frames = [
                    frame for one in tested for frame in one.report.frames if VIRIAL in frame.label
                ]
                volumes = [(frame.volume or math.inf) / frame.num_atoms for frame in frames]
                volumes += [math.inf] * (
                    not any("S_RMSE(" in name for c in of_task for name in c.columns)
                )
                # of frames of like volumes errors of virials are those of stresses times the mean
                volume = (
                    sum(volumes) / len(volumes)
                    if volumes and max(volumes) < 1.2 * min(volumes)
                    else 0.0
                )
                figures, keys = curve_figures(of_task, Path(tempfile.mkdtemp(dir=scratch)), volume)
                yield (f"<h3>{escape(task)}</h3>" if task else "") + _keys(keys) + _figures(figures)
                if volume:
                    shown = significant(volume, 4)
                    yield _paragraph(
                        f"Virial: errors of stresses times the mean volume, {shown} Å³/atom.",
                        "soft",
                    )

    def _parity(self, scratch: Path) -> Iterator[str]:
        for one in self.details:
            figures = parity_figures(one.report.pairs(), Path(tempfile.mkdtemp(dir=scratch)))
            yield _paragraph(one.describe()) + _figures(figures)
        if self.tested:
            words = "Where dots would hide each other, the color shows their number."
            yield _paragraph(words, "soft")

    def _details(self) -> Iterator[str]:
        """Yield errors of all weights, then by element, system, composition and kind of
        calculation.
        """
        if self.tested:
            rows = {
                f"{one.task} {one.weights}, {one.part}".strip(): one.report.total
                for one in self.tested
            }
            yield _table(_table_of_errors("", "weights, frames", rows, _quantities(self.tested)))
        for one in self.details:
            report, quantities = one.report, _quantities([one])
            yield _paragraph(one.describe())
            if elements := report.by_element:
                yield _table(
                    _table_of_errors("forces by element", "element", elements, "F", "atoms")
                )
            systems = {
                os.path.relpath(name, self.base): of for name, of in report.by_system.items()
            }
            groups = {
                "system": systems,
                "composition": report.by_composition,
                "kind of calculation": report.by_kind,
            }
            for name, of_groups in groups.items():
                if len(of_groups) > 1:
                    more = (
                        f" (the first {_MAX_GROUPS} of {len(of_groups)})"
                        if len(of_groups) > _MAX_GROUPS
                        else ""
                    )
                    title = f"by {name}{more}" + (f", in {self.base}" if name == "system" else "")
                    first = dict(list(of_groups.items())[:_MAX_GROUPS])
                    yield _table(_table_of_errors(title, name, first, quantities), long=("system",))

    def _worst(self, one: Tested) -> Iterator[str]:
        """Yield the frames of largest force error, or energy error without forces, and where they
        are.
        """
        quantities = _quantities([one])
        first = "F" if "F" in quantities else quantities[:1] or "E"
        by = METRICS[first].title.lower()
        rows = list[Sequence[Cell]]()
        for frame in worst_frames(one.report.frames, f"{first}:RMSE", WORST):
            place = one.report.systems[frame.source[0]].where(frame.source[1])
            errors = [_error(frame.errors, q, "RMSE") for q in quantities]
            file = os.path.relpath(place.file, self.base)
            rows.append(
                (
                    str(place.frame),
                    *errors,
                    describe_composition(frame.atom_type, one.report.type_map),
                    file,
                )
            )
        columns = [
            Column(f"{METRICS[q].title} RMSE", METRICS[q].display_unit, "s") for q in quantities
        ]
        title = (
            f"the {len(rows)} frames of largest {by} error; frames of a file count from 0; files "
            f"in {self.base}"
        )
        yield _paragraph(one.describe())
        table = Table(
            title, (Column("frame", "", "s"), *columns, Column("composition"), Column("file")), rows
        )
        yield _table(table, long=("file",))

    def _averages(self) -> Iterator[str]:
        """Yield settings, updates and mean age of each average, and their relative distances from
        the live weights.
        """
        averages = self.payload.get("averages", {}).get("profiles", {})
        if not averages:
            return
        settings = {average.name: average.summary({}) for average in self.config.training.averaging}
        rows = list[Sequence[Cell]]()
        for name, state in averages.items():
            age = state["mean_age"] if state["updates"] > 0 else None
            rows.append((name, settings.get(name, ""), max(0, state["updates"]), age))
        columns = (Column("average"), Column("settings"), Column("updates", "", ",.0f"))
        yield _table(
            Table("", (*columns, Column("mean age", "steps", ",.1f")), rows), long=("settings",)
        )
        yield "<h3>Deviation from the live weights</h3>"
        live, tasks = self.payload["model"], self.payload["config"]["model"].get("model_dict", {})
        # of tensors that tasks share, one
        names = {
            (t.data_ptr(), t.shape) if t.numel() else name: name
            for name, t in reversed(list(live.items()))
        }
        parts: dict[str, list[str]] = {}
        for name in (name for name in live if name in set(names.values())):
            if any(name in state["weights"] for state in averages.values()):
                task, _, rest = (
                    name.partition(".") if name.partition(".")[0] in tasks else ("", "", name)
                )
                parts.setdefault(f"{task} {rest.partition('.')[0]}".strip(), []).append(name)
        if len(parts) > 1:
            parts["all trained numbers"] = [name for part in parts.values() for name in part]
        rows = []
        for part, members in parts.items():
            distances = []
            for state in averages.values():
                pairs = [
                    (live[name].double(), state["weights"][name])
                    for name in members
                    if name in state["weights"]
                ]
                apart = sum(
                    float((average.double() - of_live).square().sum()) for of_live, average in pairs
                )
                size = sum(float(of_live.square().sum()) for of_live, _ in pairs)
                distances.append(significant(100 * (apart / size) ** 0.5 if size else 0.0, _DIGITS))
            rows.append((part, sum(live[name].numel() for name in members), *distances))
        columns_of_averages = [Column(name, "%", "s") for name in averages]
        heads = (Column("part of the model"), Column("numbers", "", ",.0f"), *columns_of_averages)
        yield _table(Table("", heads, rows))

    def _programs(self, records: Sequence[Part]) -> Iterator[tuple[str, str]]:
        """Yield names and texts of programs, machine and dates, of each part of a run that
        differ.
        """
        yield "checkpoint", f"written by dp-ema {self.payload['version']}"
        before = Part()
        for part in records:
            more = f", from step {part.first_step:,}" if part.first_step else ""
            yield "command", f"{part.command}, {part.began[:19]} to {part.updated[:19]}{more}"
            if (part.programs, part.machine) != (before.programs, before.machine):
                yield (
                    "programs",
                    ", ".join(f"{name} {version}" for name, version in part.programs.items()),
                )
                ranks = f", {counted(part.ranks, 'rank')}" if part.ranks > 1 else ""
                yield "machine", f"{part.machine}; {part.device}{ranks}"
            before = part


def _table_of_data(data: Mapping[str, TaskData]) -> Table:
    """Return systems, frames and atoms of each part of the data."""
    rows = list[Sequence[Cell]]()
    for task, of_task in data.items():
        for part, sources in zip((TRAINING, VALIDATION, TEST), of_task):
            if sources:
                low = min(int(source.frame_sizes.min()) for source in sources)
                high = max(int(source.frame_sizes.max()) for source in sources)
                frames = sum(source.num_frames for source in sources)
                atoms = str(low) if low == high else f"{low} to {high}"
                rows.append((f"{task} {part}".strip(), len(sources), frames, atoms))
    columns = (Column("data"), Column("systems", "", ",.0f"), Column("frames", "", ",.0f"))
    return Table("", (*columns, Column("atoms of a frame", "", "s")), rows)


def _table_of_errors(
    title: str, first: str, errors: Mapping[str, Errors], quantities: str, counts: str = "frames"
) -> Table:
    """Return a row for each entry of ``errors``, with the number of frames or atoms and both errors
    per quantity.
    """
    columns = [Column(first), Column(counts, "", ",.0f")]
    columns += [
        Column(f"{METRICS[q].title} {k}", METRICS[q].display_unit, "s")
        for q in quantities
        for k in KINDS
    ]
    rows: list[Sequence[Cell]] = [
        (
            name,
            of.summary()[f"num_{counts}"],
            *(_error(of, q, kind) for q in quantities for kind in KINDS),
        )
        for name, of in errors.items()
    ]
    return Table(title, columns, rows)


def _quantities(tested: Sequence[Tested]) -> str:
    """Return the letters of the quantities that some frame has a label of."""
    return "".join(
        q for q in METRICS if any(_error(one.report.total, q, "RMSE") != "–" for one in tested)
    )


def _error(errors: Errors, quantity: str, kind: str) -> str:
    value = METRICS[quantity].display_factor * errors.metric(f"{quantity}:{kind}")
    return significant(value, _DIGITS) if math.isfinite(value) else "–"


def _amount(sources: Sequence[FrameSource]) -> str:
    frames = sum(source.num_frames for source in sources)
    return f"{counted(frames, 'frame')} of {counted(len(sources), 'system')}"


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and texts; names without a text are left out, and a name is not
    repeated.
    """
    items, last = [], ""
    for name, text in pairs:
        if text:
            items.append(f"<dt>{escape(name) if name != last else ''}</dt><dd>{escape(text)}</dd>")
            last = name
    return f"<dl>{''.join(items)}</dl>"


def _table(table: Table, long: Sequence[str] = ()) -> str:
    """Return a table; columns of text are set to the left, and those named in ``long`` may be
    wrapped.
    """
    html = f"<caption>{escape(table.title)}</caption><tr>" if table.title else "<tr>"
    for column in table.columns:
        kind, unit = (
            "" if column.spec else " class=text",
            f"<br><small>{escape(column.unit)}</small>",
        )
        html += f"<th{kind}>{escape(column.name)}{unit * bool(column.unit)}</th>"
    for cells in table.texts():
        html += "</tr>\n<tr>"
        for column, cell in zip(table.columns, cells):
            kind = (
                " class='text long'"
                if column.name in long
                else ""
                if column.spec
                else " class=text"
            )
            html += f"<td{kind}>{escape(cell)}</td>"
    return f"<div class=wide><table>{html}</tr></table></div>"


def _figures(figures: Sequence[Figure]) -> str:
    """Return pictures side by side as far as there is room, with their content in the page."""
    html = ""
    for file, words in figures:
        kind = {".svg": "svg+xml", ".png": "png"}[file.suffix]
        data = base64.b64encode(file.read_bytes()).decode()
        html += f'<img alt="{escape(words)}" src="data:image/{kind};base64,{data}">'
    return f"<div class=figures>{html}</div>"


def _keys(keys: Sequence[Key]) -> str:
    """Return the meaning of the lines of the pictures."""
    html = ""
    for label, color, width in keys:
        line = (
            f'<i style="border-top: {max(1.5, 1.5 * width):.1f}px solid {color}"></i>'
            if width
            else "<i>★</i>"
        )
        html += f"<li>{line}{escape(label)}</li>"
    return f"<ul class=keys>{html}</ul>"
