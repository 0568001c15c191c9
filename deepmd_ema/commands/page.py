"""One page about a run, ``dp-ema report``: errors, curves, parity, averages, times, data."""

from __future__ import annotations

import base64
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from deepmd_ema import checkpoint
from deepmd_ema.config import config_summary, saved_config
from deepmd_ema.config.labels import ATOM_PREF, ENERGY, GPA, METRICS, VIRIAL
from deepmd_ema.config.messages import as_text
from deepmd_ema.config.outputs import is_sharded, with_absolute_paths
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.run import TaskData, open_split
from deepmd_ema.data.source import describe_amount, evenly_spaced
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.files import HTML, atomic_write, check_output
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
from deepmd_ema.report.facts import displayed, error_table, labelled
from deepmd_ema.report.plots import Figure, Key, curve_figures, parity_figures
from deepmd_ema.report.record import Part, table_of_times
from deepmd_ema.report.status import ENDED, RunStatus, describe_row
from deepmd_ema.report.table import Cell, Column, Table, duration, significant
from deepmd_ema.text import command, counted, printable
from deepmd_ema.utils import LIVE

VALIDATION = "validation"
TEST = "test"
TRAINING = "training"
_DIGITS = 3  # significant ones of an error
_MAX_SHOWN = 2  # averages in the first table, beside the live weights
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
    """Write the page about a run and return what it lacks, and why.

    The run may still be training, or have been interrupted.

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
    # The template has the style, for screens of any width and for paper; pictures are drawn once,
    # and inverted in dark mode.
    template = Template(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    )
    with atomic_write(output) as part:
        # names of systems and options of an input may be of others
        text = printable(template.substitute(title=escape(page.title), body=body))
        part.write_text(text, encoding="utf-8", errors="replace")
    if len(page.weights) > 2 and average is None:
        unshown = ", ".join(page.weights[2:])
        page.remarks.append(
            f"Details are of the average {page.chosen}; --average shows another: {unshown}."
        )
    return page.remarks


def _evaluate(
    file: Path,
    data: Mapping[str, TaskData],
    weights: Sequence[str],
    num_frames: int,
    device: str | None,
) -> Iterator[Tested]:
    """Yield the errors by task, weights and part of the data.

    Arguments are those of :func:`write_report`.
    """
    # neighbors of a frame are searched once for all weights
    cache = PairCache()
    for task, parts in data.items():
        valid = parts.valid
        test = parts.test
        if num_frames:
            valid = evenly_spaced(valid, num_frames)
            test = evenly_spaced(test, num_frames)
        # training frames may be millions: as many are evaluated as validation frames
        number = sum(source.num_frames for source in valid) or num_frames
        train = evenly_spaced(parts.train, number) if number else parts.train
        for name in weights:
            loaded = load_model(
                file, average=None if name == LIVE else name, head=task or None
            )
            for part, sources in ((VALIDATION, valid), (TEST, test), (TRAINING, train)):
                if sources:
                    ranges = [range(source.num_frames) for source in sources]
                    labels = loaded.config.fitting_net.labels
                    report = predict(loaded, sources, ranges, device, labels, cache)
                    yield Tested(task, name, part, report)


class _Page:
    """The parts of the page as HTML; arguments are those of :func:`write_report`.

    Attributes:
        status: progress of the run; None if the checkpoint is in another folder.
        file: its newest training checkpoint.
        payload: content of this checkpoint.
        folder: of the run.
        title: its name.
        config: of the run, with absolute paths of its data.
        data: frames of each task; None where they cannot be read.
        base: folder that all systems are in, which is left out of their names.
        tested: errors of all weights; none where there are no data.
        remarks: parts that the page lacks, and reasons.
        weights: ``live`` and the names of the averages, the chosen one first.
        chosen: the weights of which details are shown.
        shown: by task and part, the errors in the order of the weights: on validation frames, or on
            training frames if there are none, and on test frames.
        details: errors of the chosen weights.
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
            # beside the file of a checkpoint is its run, unless it was copied to another place
            with suppress(UserError):
                self.status = RunStatus(file.parent)
        self.payload = payload = checkpoint.load(file)
        if payload["kind"] != "training":
            raise UserError(
                f"{file}: is of the kind {payload['kind']}. Expected the folder of a run, or its "
                "model.ckpt.pt."
            )
        weights = [LIVE, *checkpoint.averages_in(payload)]
        if (
            average is None
        ):  # the first average, or the live weights of a run without any
            self.chosen = weights[min(1, len(weights) - 1)]
        else:
            self.chosen = checkpoint.choose_profile(payload, file, average)
        self.folder = self.status.folder if self.status is not None else file.parent
        self.title = self.folder.resolve().name
        self.config = saved_config(
            with_absolute_paths(payload["config"], self.folder), str(file)
        )
        if systems and len(self.config.tasks) > 1:
            raise UserError(
                "-s: of a run of several tasks. Name their test data in validating.test_data_dict."
            )
        model = next(iter(self.config.tasks.values())).model
        labels = model.fitting_net.labels
        if (
            ENERGY in labels
        ):  # errors of forces are weighted by it, where frames have it
            labels = (*labels, ATOM_PREF)
        test = open_labelled(systems, model, labels) if systems else []
        self.data: Mapping[str, TaskData] | None = None
        self.tested = list[Tested]()
        self.remarks = list[str]()
        try:
            # Test data that were moved are no reason to show nothing: the record of the run has
            # their errors. The second call reads the other parts, or raises their errors.
            with suppress(DataError):
                self.data = open_split(self.config, with_test=not systems)
            self.data = self.data or open_split(self.config)
            self.data = {
                name: parts._replace(test=test or parts.test)
                for name, parts in self.data.items()
            }
            sources = [
                source
                for parts in self.data.values()
                for part in parts
                for source in part
            ]
            folders = [
                os.path.dirname(os.path.abspath(source.name)) for source in sources
            ]
            self.base = os.path.commonpath(folders)
            self.tested = list(_evaluate(file, self.data, weights, num_frames, device))
        except UserError as error:
            self.remarks.append(
                f"The errors of single frames are missing: {error.problems[0]}"
            )
        if self.status is not None and self.status.state != ENDED:
            self.remarks.append(
                f"Status: {self.status.describe()}. The checkpoint is of step {payload['step']:,}."
            )
        self.weights = sorted(
            weights, key=lambda name: (name != LIVE, name != self.chosen)
        )
        self.shown: dict[tuple[str, str], list[Tested]] = {}
        for tested in sorted(
            self.tested, key=lambda tested: self.weights.index(tested.weights)
        ):
            # errors on training frames are small whatever the model is worth: they are shown where
            # there are no better ones
            if tested.part != TRAINING or (
                self.data and not self.data[tested.task].valid
            ):
                self.shown.setdefault((tested.task, tested.part), []).append(tested)
        self.details = [
            tested
            for tests in self.shown.values()
            for tested in tests
            if tested.weights == self.chosen
        ]

    def parts(self, scratch: Path) -> Iterator[str]:
        """Yield the parts of the page from top to bottom.

        Pictures are drawn in the folder ``scratch``.
        """
        # the header has what a reader has to know who stops there: content, errors, facts
        yield f"<header><h1>{escape(self.title)}</h1>"
        for name, task in self.config.tasks.items():
            # dos[250] is called dos here
            label = task.model.fitting_net.labels[0].partition("[")[0]
            kind = "potential" if label == ENERGY else f"{label} model"
            lead = f"{kind} {task.model.descriptor.type} for {', '.join(task.model.type_map)}"
            if self.data is not None:
                valid = self.data[name].valid
                lead += f", trained on {describe_amount(self.data[name].train)}"
                lead += (
                    f", validated on {describe_amount(valid)}"
                    if valid
                    else ", without validation frames"
                )
            # not capitalize(), which changes the symbols of elements
            lead = f"{name}: {lead}" if name else f"{lead[0].upper()}{lead[1:]}"
            yield _paragraph(f"{lead}.", "lead")
        yield "".join(_paragraph(remark, "notice") for remark in self.remarks)
        yield from self._final_errors()
        yield _list(self._first_facts()) + "</header>"
        # a run that was restarted has several parts, each with times and warnings of its own
        records = self.status.parts if self.status is not None else ()
        warnings = [
            (time[:19], text) for part in records for time, text in part.warnings
        ]
        times = table_of_times(records)
        options = escape(as_text(self.payload["config"]))
        # in the order of the page; a section without content has no heading
        sections = {
            "Learning curves": list(self._curves(scratch)),
            "Parity": list(self._parity(scratch)),
            "Errors in detail": list(self._details()),
            "Worst frames": [
                part for tested in self.details for part in self._worst(tested)
            ],
            "Averages": list(self._averages()),
            "Time": [
                _table(times)
                if times.rows
                else _paragraph("Not known: the folder has no record of the run.")
            ],
            "Data": [_table(_table_of_data(self.data))]
            if self.data is not None
            else [],
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
        # a link to each section, at the top of the page
        links = [
            f"<a href=#{anchor}>{title}</a>" for title, (anchor, _) in shown.items()
        ]
        yield f"<nav>{''.join(links)}"
        yield "<a href=#definitions>Definitions</a></nav>"
        for title, (anchor, body) in shown.items():
            yield f'<section><h2 id="{anchor}">{title}</h2>'
            yield from body
            yield "</section>"

    def _first_facts(self) -> Iterator[tuple[str, str]]:
        """Yield facts of the run beside the errors: how far it is, its time, and its best files."""
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
                (name, f"{weights}: {status.describe_best(weights)}")
                for weights in status.best
            )

    def _final_errors(self) -> Iterator[str]:
        """Yield a table of the errors of all weights for each task and part of the data."""
        display = self.payload["display"]
        # errors of the model that the run began with, if it began with one
        before = (
            nested(display["before"], tuple(self.config.tasks))
            if "before" in display
            else {}
        )
        for (task, part), every in self.shown.items():
            tests = [
                tested
                for tested in every
                if tested.weights in self.weights[: 1 + _MAX_SHOWN]
            ]
            frames = len(tests[0].report.frames)
            columns = [
                _column(tested.weights, "" if tested.weights == LIVE else "averaged")
                for tested in tests
            ]
            errors = [tested.report.total for tested in tests]
            if task in before and part == VALIDATION:
                first = Errors(before[task])
                # errors are compared on the same frames, not with those of a sample
                if first.summary()["num_frames"] == frames:
                    columns.insert(0, _column("at the start", "loaded"))
                    errors.insert(0, first)
            sizes = tests[0].report.labels
            rows = list[Sequence[Cell]]()
            for metric in _metrics(tests):
                name = (
                    f"{metric.full_name}, {metric.unit}"
                    if metric.unit
                    else metric.full_name
                )
                # the size of energies says nothing: their zero is arbitrary
                has_size = metric.error == "RMSE" and metric.quantity not in "EQ"
                size = displayed(sizes, metric) if has_size else ""
                rows.append(
                    [name, *(displayed(total, metric) for total in errors), size]
                )
            if "S:RMSE" in _metrics(tests):
                stresses = (GPA * total.metric("S:RMSE") for total in errors)
                rows.append(["Stress RMSE, GPa", *stresses, ""])
            title = (f"{task}: " if task else "") + counted(frames, f"{part} frame")
            yield _table(
                Table("", (Column(title), *columns, _column("labels", "RMS")), rows)
            )
        # where data cannot be read, there are the rows of the run itself
        if not self.tested and self.status is not None:
            for weights, row in self.status.validation.items():
                yield _paragraph(f"{weights}, validation of {describe_row(row)}")
        has_test = any(part == TEST for _, part in self.shown)
        if self.status is not None and self.status.test and not has_test:
            pairs = [
                (weights, describe_row(row))
                for weights, row in self.status.test.items()
            ]
            yield "<h3>Test data</h3>" + _list(pairs)
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
            task_curves = [curve for curve in curves if curve.task == task]
            if not task_curves:
                continue
            # Batches have errors of virials, val.log those of stresses. Where all frames have like
            # volumes, the errors of stresses times the mean volume are those of virials, and one
            # panel has both. A volume of 0: it has not.
            frames = [
                frame
                for tested in self.shown.get((task, VALIDATION), ())
                for frame in tested.report.frames
                if VIRIAL in frame.label
            ]
            volumes = [(frame.volume or math.inf) / frame.num_atoms for frame in frames]
            has_stresses = any(
                "S_RMSE(" in name for curve in task_curves for name in curve.columns
            )
            volume = 0.0
            if has_stresses and volumes and max(volumes) < 1.2 * min(volumes):
                volume = sum(volumes) / len(volumes)
            figures, keys = curve_figures(
                task_curves, Path(tempfile.mkdtemp(dir=scratch)), volume
            )
            yield (
                (f"<h3>{escape(task)}</h3>" if task else "")
                + _keys(keys)
                + _figures(figures)
            )
            if volume:
                shown = significant(volume, 4)
                note = f"Virial: errors of stresses times the mean volume, {shown} Å³/atom."
                yield _paragraph(note, "soft")

    def _parity(self, scratch: Path) -> Iterator[str]:
        for tested in self.details:
            figures = parity_figures(
                tested.report.pairs(), Path(tempfile.mkdtemp(dir=scratch))
            )
            yield _paragraph(tested.describe()) + _figures(figures)
        if self.tested:
            note = "Where dots would hide each other, the color shows their number."
            yield _paragraph(note, "soft")

    def _details(self) -> Iterator[str]:
        """Yield errors of all weights, then errors by element, system, composition and kind."""
        if self.tested:
            rows = {
                f"{tested.task} {tested.weights}, {tested.part}".strip(): tested.report.total
                for tested in self.tested
            }
            yield _table_of_errors("", "weights, frames", rows, _metrics(self.tested))
        for tested in self.details:
            report = tested.report
            metrics = _metrics([tested])
            yield _paragraph(tested.describe())
            if elements := report.by_element:
                forces = [metric for metric in metrics if metric.quantity == "F"]
                title = "forces by element"
                yield _table_of_errors(title, "element", elements, forces, "atoms")
            systems = {
                os.path.relpath(name, self.base): errors
                for name, errors in report.by_system.items()
            }
            groups = {
                "system": systems,
                "composition": report.by_composition,
                "kind of calculation": report.by_kind,
            }
            for name, errors_by_group in groups.items():
                # errors of a single group are those of all frames, which are shown above
                if len(errors_by_group) < 2:
                    continue
                title = f"by {name}"
                if len(errors_by_group) > _MAX_GROUPS:
                    title += f" (the first {_MAX_GROUPS} of {len(errors_by_group)})"
                if name == "system":
                    title += f", in {self.base}"
                first = dict(list(errors_by_group.items())[:_MAX_GROUPS])
                yield _table_of_errors(title, name, first, metrics)

    def _worst(self, tested: Tested) -> Iterator[str]:
        """Yield the frames of largest force error, and where they are.

        Without forces they are ranked by the first quantity that is predicted.
        """
        report = tested.report
        columns = _columns(
            metric for metric in _metrics([tested]) if metric.error == "RMSE"
        )
        first = "F:RMSE" if "F:RMSE" in columns else next(iter(columns), "E:RMSE")
        by = METRICS[first[0]].title.lower()
        rows = list[Sequence[Cell]]()
        for frame in worst_frames(report.frames, first, WORST):
            # a frame of a system is one of a file, in which a person looks for it
            place = report.systems[frame.source[0]].where(frame.source[1])
            errors = [displayed(frame.errors, metric) for metric in columns]
            composition = describe_composition(frame.atom_type, report.type_map)
            file = os.path.relpath(place.file, self.base)
            rows.append((place.frame, *errors, composition, file))
        title = (
            f"the {len(rows)} frames of largest {by} error; frames of a file count from 0; files "
            f"in {self.base}"
        )
        yield _paragraph(tested.describe())
        more = Column("composition"), Column("file")
        heads = [Column("frame", "", "d"), *columns.values(), *more]
        yield _table(Table(title, heads, rows), long=("file",))

    def _averages(self) -> Iterator[str]:
        """Yield settings and age of each average, and its distance from the live weights."""
        averages = checkpoint.averages_in(self.payload)
        if not averages:
            return
        settings = {
            average.name: average.summary({})
            for average in self.config.training.averaging
        }
        rows = list[Sequence[Cell]]()
        for name, state in averages.items():
            # an average that has not begun has -1 updates and no age
            age = state["mean_age"] if state["updates"] > 0 else None
            rows.append((name, settings.get(name, ""), max(0, state["updates"]), age))
        columns = [Column("average"), Column("settings"), Column("updates", "", ",.0f")]
        columns.append(Column("mean age", "steps", ",.1f"))
        yield _table(Table("", columns, rows), long=("settings",))
        yield "<h3>Deviation from the live weights</h3>"
        live = self.payload["model"]
        tasks = self.payload["config"]["model"].get("model_dict", {})
        # A tensor that tasks share has a name for each task and counts once, by the first name;
        # tensors are shared if they have one address. Empty tensors have none.
        first_names = {
            (tensor.data_ptr(), tensor.shape) if tensor.numel() else name: name
            for name, tensor in reversed(list(live.items()))
        }
        distinct_names = set(first_names.values())
        # by the first component of the name, after the task: descriptor, fitting_net, ...
        parts: dict[str, list[str]] = {}
        for name in live:
            is_averaged = any(name in state["weights"] for state in averages.values())
            if name in distinct_names and is_averaged:
                components = name.split(".")
                is_of_task = components[0] in tasks
                part = " ".join(components[: 2 if is_of_task else 1])
                parts.setdefault(part, []).append(name)
        if len(parts) > 1:
            parts["all trained numbers"] = [
                name for part in parts.values() for name in part
            ]
        rows = []
        for part, members in parts.items():
            distances = []
            for state in averages.values():
                # the norm of the difference of all numbers over that of the live ones
                difference = size = 0.0
                for name in members:
                    if name in state["weights"]:
                        live_tensor = live[name].double()
                        average_tensor = state["weights"][name].double()
                        difference += float(
                            (average_tensor - live_tensor).square().sum()
                        )
                        size += float(live_tensor.square().sum())
                percent = 100 * (difference / size) ** 0.5 if size else 0.0
                distances.append(percent)
            rows.append((part, sum(live[name].numel() for name in members), *distances))
        columns = [Column("part of the model"), Column("numbers", "", ",.0f")]
        columns += [_column(name, "%") for name in averages]
        yield _table(Table("", columns, rows))

    def _programs(self, records: Sequence[Part]) -> Iterator[tuple[str, str]]:
        """Yield names and texts of programs, machine and dates of each part of a run."""
        yield "checkpoint", f"written by dp-ema {self.payload['version']}"
        before = Part()  # compared with the next one
        for part in records:
            more = f", from step {part.first_step:,}" if part.first_step else ""
            yield (
                "command",
                f"{part.command}, {part.began[:19]} to {part.updated[:19]}{more}",
            )
            # a restart with the same programs on the same machine repeats nothing
            if (part.programs, part.machine) != (before.programs, before.machine):
                programs = (
                    f"{name} {version}" for name, version in part.programs.items()
                )
                yield "programs", ", ".join(programs)
                ranks = f", {counted(part.ranks, 'rank')}" if part.ranks > 1 else ""
                yield "machine", f"{part.machine}; {part.device}{ranks}"
            before = part


def _table_of_data(data: Mapping[str, TaskData]) -> Table:
    """Return systems, frames and atoms of each part of the data."""
    rows = list[Sequence[Cell]]()
    for task, parts in data.items():
        for part, sources in zip((TRAINING, VALIDATION, TEST), parts):
            if sources:
                low = min(int(source.frame_sizes.min()) for source in sources)
                high = max(int(source.frame_sizes.max()) for source in sources)
                frames = sum(source.num_frames for source in sources)
                atoms = str(low) if low == high else f"{low} to {high}"
                rows.append((f"{task} {part}".strip(), len(sources), frames, atoms))
    columns = (
        Column("data"),
        Column("systems", "", ",.0f"),
        Column("frames", "", ",.0f"),
    )
    return Table("", (*columns, Column("atoms of a frame", "", "s")), rows)


def _table_of_errors(
    title: str,
    first: str,
    errors: Mapping[str, Errors],
    metrics: Sequence[Metric],
    counts: str = "frames",
) -> str:
    """Return a table with a row for each entry of ``errors``.

    The second column is the number of frames, or that of atoms.
    """
    heads = Column(first), Column(counts, "", ",.0f")
    # names of systems may be long
    return _table(
        error_table(title, heads, _columns(metrics), errors), long=("system",)
    )


def _metrics(tests: Sequence[Tested]) -> list[Metric]:
    """Return the errors of quantities that some frame has a label of."""
    letters = labelled(*(tested.report.total for tested in tests))
    return [
        Metric(f"{q}:{kind}")
        for q in METRICS
        if q in letters
        for kind in ("RMSE", "MAE")
    ]


def _columns(metrics: Iterable[Metric]) -> dict[str, Column]:
    return {metric: _column(metric.full_name, metric.unit) for metric in metrics}


def _column(name: str, unit: str) -> Column:
    """Return a column of errors or shares, with a dash where no frame has a label."""
    return Column(name, unit, f".{_DIGITS}s", "–")


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and texts, without names that have no text or that are repeated."""
    items = []
    last = ""
    for name, text in pairs:
        if text:
            items.append(
                f"<dt>{escape(name) if name != last else ''}</dt><dd>{escape(text)}</dd>"
            )
            last = name
    return f"<dl>{''.join(items)}</dl>"


def _table(table: Table, long: Sequence[str] = ()) -> str:
    """Return a table; columns of text are set to the left, and those in ``long`` may be wrapped."""
    html = f"<caption>{escape(table.title)}</caption><tr>" if table.title else "<tr>"
    for column in table.columns:
        kind = "" if column.spec else " class=text"
        unit = f"<br><small>{escape(column.unit)}</small>" if column.unit else ""
        html += f"<th{kind}>{escape(column.name)}{unit}</th>"
    for cells in table.texts():
        html += "</tr>\n<tr>"
        for column, cell in zip(table.columns, cells):
            kind = "" if column.spec else " class=text"
            if column.name in long:
                kind = " class='text long'"
            html += f"<td{kind}>{escape(cell)}</td>"
    return f"<div class=wide><table>{html}</tr></table></div>"


def _figures(figures: Sequence[Figure]) -> str:
    """Return pictures side by side as far as there is room, with their content in the page."""
    html = ""
    # a page that is one file can be sent and archived; readers who do not see it get the text
    for file, alternative in figures:
        kind = {".svg": "svg+xml", ".png": "png"}[file.suffix]
        data = base64.b64encode(file.read_bytes()).decode()
        html += (
            f'<img alt="{escape(alternative)}" src="data:image/{kind};base64,{data}">'
        )
    return f"<div class=figures>{html}</div>"


def _keys(keys: Sequence[Key]) -> str:
    """Return the meaning of the lines of the pictures."""
    html = ""
    for label, color, width in keys:
        line = "<i>★</i>"
        if width:  # points to pixels, and at least as thick as is seen
            line = f'<i style="border-top: {max(1.5, 1.5 * width):.1f}px solid {color}"></i>'
        html += f"<li>{line}{escape(label)}</li>"
    return f"<ul class=keys>{html}</ul>"
