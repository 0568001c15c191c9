"""The page of speed.py: one table for each stage that has results."""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

import common
from speed_cases import Case, Runner

Found = dict[tuple[str, Case], dict[str, Any]]
Table = tuple[list[str], list[list[str]]]
CASE = ["model", "precision", "batch", "atoms"]
MEMORY_ERRORS = (
    r"out of memory|(?:can't|unable to|cannot) allocate|MemoryError|bad_alloc"
)
MEMORY = {
    "cpu": "Largest resident size of the main process",
    "cuda": "Most that torch has allocated",
}
SPREAD = (
    "Ratios are medians of the ratios of turns or pairs, with the least and the largest; above 1 "
    "dp-ema is faster."
)


def page(found: Found, runners: list[Runner], args: argparse.Namespace) -> str:
    """Return the page of all results that are known."""
    parts = [f"# Speed, {common.today()}"]
    for title, note, make in (
        ("Training steps", f"{SPREAD} {_clock_note(found, 'step')}", _step_rows),
        ("Peak memory of these runs", _memory_note(args.device), _memory_rows),
        (
            "Growth with the atoms of a frame",
            _growth_note(found, args.device),
            _growth_rows,
        ),
        (
            "Start of a run",
            "Seconds from the command to the first row, medians.",
            _start_rows,
        ),
        (
            "Full validation",
            "Frames per second; the time by which a step takes longer.",
            _validation_rows,
        ),
        (
            "Checkpoints",
            "Time by which a step that is saved takes longer, with one average.",
            _checkpoint_rows,
        ),
        ("Molecular dynamics", "Steps per second in ASE, 192 atoms.", _md_rows),
    ):
        header, rows = make(found, runners)
        if rows:
            parts += [f"## {title}", note, common.table(header, rows)]
    failed = [
        f"- {stage}, {', '.join(case.words)}, {name}: {text.strip().splitlines()[-1][:200]}"
        for (stage, case), result in found.items()
        for name, text in result.get("failed", {}).items()
    ]
    parts += ["## Not measured", "\n".join(failed)] if failed else []
    loads = [result["load"] for result in found.values()]
    span = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    where = common.machine(common.programs(args.peer), args.threads, args.device)
    return "\n\n".join(
        [*parts, f"Load of the machine while measuring: {span}.  \nOn {where}."]
    )


def _clock_note(found: Found, stage: str) -> str:
    return f"Clock: {', '.join(sorted({result['clock'] for _, result in _chosen(found, stage)}))}."


def _memory_note(device: str) -> str:
    return f"{MEMORY[device]}, MB; the ratio is that of DeePMD-kit to dp-ema."


def _chosen(found: Found, stage: str) -> list[tuple[Case, dict[str, Any]]]:
    return [(case, result) for (name, case), result in found.items() if name == stage]


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {
        name: statistics.median(numbers) for name, numbers in values.items() if numbers
    }


def _ratios(times: dict[str, list[float]], runners: list[Runner]) -> list[str]:
    """Return for each runner of dp-ema how many times the fastest program of the peer takes."""
    peers = {r.name: times[r.name] for r in runners if not r.ours and times.get(r.name)}
    if not peers:
        return [""] * sum(r.ours for r in runners)
    fastest = min(peers, key=lambda name: statistics.median(peers[name]))
    return [
        common.format_ratio(peers[fastest], times.get(r.name, []))
        for r in runners
        if r.ours
    ]


def _table(
    found: Found, stage: str, runners: list[Runner], unit: str, cells: Any
) -> Table:
    """Return a table with a cell of ``cells(seconds, result)`` for each program, and ratios of
    times.
    """
    rows = []
    for case, result in _chosen(found, stage):
        medians = _medians(result["times"])
        shown = [
            cells(medians[r.name], result) if r.name in medians else "" for r in runners
        ]
        rows.append(
            [
                *case.words,
                *shown,
                *_ratios(result["times"], runners),
                f"{result['load']:.1f}",
            ]
        )
    header = [
        *CASE,
        *(f"{r.title}, {unit}" for r in runners),
        *_ratio_titles(runners),
        "load",
    ]
    return header, rows


def _ratio_titles(runners: list[Runner]) -> list[str]:
    peers = [r.title for r in runners if not r.ours]
    one = "fastest DeePMD-kit" if len(peers) > 1 else (peers or ["DeePMD-kit"])[0]
    return [f"{one} / {r.title}" for r in runners if r.ours]


def _step_rows(found: Found, runners: list[Runner]) -> Table:
    return _table(
        found, "step", runners, "ms", lambda seconds, _: f"{1000 * seconds:.1f}"
    )


def _memory_rows(found: Found, runners: list[Runner]) -> Table:
    rows = []
    for case, result in _chosen(found, "step"):
        memory = result["memory"]
        shown = [
            f"{memory[r.name] / 1e6:.0f}" if r.name in memory else "" for r in runners
        ]
        peers = [memory[r.name] for r in runners if not r.ours and r.name in memory]
        ratios = [
            f"{min(peers) / memory[r.name]:.2f}" if peers and memory.get(r.name) else ""
            for r in runners
            if r.ours
        ]
        rows.append([*case.words, *shown, *ratios])
    return [*CASE, *(r.title for r in runners), *_ratio_titles(runners)], rows


def _growth_note(found: Found, device: str) -> str:
    limits = sorted(
        {f"{result['limit']:g} GB" for _, result in _chosen(found, "growth")}
    )
    where = ", ".join(limits) if device == "cpu" else "what the device has"
    return (
        f"Milliseconds of a step; {MEMORY[device].lower()}, GB. Each turn is a run of its own, "
        f"which may take {where}. A program that failed is not tried with more atoms (-). "
        f"{_clock_note(found, 'growth')}"
    )


def _growth_rows(found: Found, runners: list[Runner]) -> Table:
    rows = []
    for case, result in _chosen(found, "growth"):
        medians, memory, failed = (
            _medians(result["times"]),
            result["memory"],
            result["failed"],
        )
        shown = [
            _reason(failed[r.name])
            if r.name in failed
            else f"{1000 * medians[r.name]:.1f}; {memory[r.name] / 1e9:.2f}"
            if r.name in medians
            else "-"
            for r in runners
        ]
        rows.append(
            [
                *case.words,
                *shown,
                *_ratios(result["times"], runners),
                f"{result['load']:.1f}",
            ]
        )
    return [
        *CASE,
        *(f"{r.title}, ms; GB" for r in runners),
        *_ratio_titles(runners),
        "load",
    ], rows


def _reason(text: str) -> str:
    """Return an error in a few words, for lack of memory with the size that was requested, if the
    error has it.
    """
    if not re.search(MEMORY_ERRORS, text, re.IGNORECASE):
        return text.strip().splitlines()[-1][:80]
    requested = re.findall(r"allocate ([\d.]+) (bytes|[KMGT]iB)", text)
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    words = [
        f"{float(number) * 1024 ** units.index(unit) / 1e9:.1f} GB"
        for number, unit in requested[-1:]
    ]
    return "out of memory" + "".join(f" ({size} more requested)" for size in words)


def plot_growth(found: Found, runners: list[Runner], file: Path) -> None:
    """Draw time and memory of a step against the atoms of a frame; a line ends where its program
    has failed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    lines: dict[tuple[str, str, Runner], list[tuple[int, float, float]]] = {}
    for case, result in _chosen(found, "growth"):
        for runner in (r for r in runners if result["times"].get(r.name)):
            numbers = (
                statistics.median(result["times"][runner.name]),
                result["memory"][runner.name] / 1e9,
            )
            lines.setdefault((case.name, case.precision, runner), []).append(
                (case.atoms, *numbers)
            )
    for k, (panel, label) in enumerate(
        zip(panels, ("seconds of a step", "peak memory, GB"))
    ):
        for (name, precision, runner), points in lines.items():
            panel.loglog(
                *zip(*[(p[0], p[1 + k]) for p in points]),
                "o-",
                label=f"{runner.title}: {name}, {precision}",
            )
        panel.set(xlabel="atoms of a frame", ylabel=label)
        panel.set_xticks(
            atoms := sorted(
                {point[0] for points in lines.values() for point in points}
            ),
            atoms,
        )
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_minor_formatter(NullFormatter())
        panel.grid(which="major", alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(file, dpi=130)


def _start_rows(found: Found, runners: list[Runner]) -> Table:
    rows = []
    for _, result in _chosen(found, "start"):
        known = {
            r: result["times"][r.name] for r in runners if r.name in result["times"]
        }
        for runner, times in known.items():
            at = _medians(times)
            parts = (
                [
                    f"{at['all'] - at['numbers']:.2f}",
                    f"{at['numbers'] - at['stored']:.2f}",
                    f"{at['all']:.2f}",
                ]
                if "all" in at
                else ["", "", ""]
            )
            rows.append(
                [runner.title, str(result["frames"]), *parts, f"{at['numbers']:.2f}"]
            )
        ours, peers = (
            [t for r, t in known.items() if r.ours is which] for which in (True, False)
        )
        if ours and peers:
            ratios = [
                common.format_ratio(peers[0].get(k, []), ours[0].get(k, []))
                for k in ("all", "numbers")
            ]
            rows.append(["DeePMD-kit / dp-ema", "", "", "", *ratios])
    header = [
        "",
        "frames",
        "neighbor statistics, s",
        "descriptor and bias, s",
        "with all statistics, s",
        "sel in numbers, s",
    ]
    return header, rows


def _validation_rows(found: Found, runners: list[Runner]) -> Table:
    return _table(
        found,
        "validation",
        runners,
        "frames/s",
        lambda seconds, r: f"{r['frames'] / max(seconds, 1e-9):.1f}",
    )


def _checkpoint_rows(found: Found, runners: list[Runner]) -> Table:
    rows = []
    for case, result in _chosen(found, "checkpoint"):
        cells = []
        for name in (r.name for r in runners):
            extra, plain = result["times"].get(name), result["plain"].get(name)
            words = ""
            if extra and plain:
                stall, step = statistics.median(extra), statistics.median(plain)
                words = (
                    f"{1000 * stall:.0f} ({1000 * min(extra):.0f} to {1000 * max(extra):.0f}); "
                    f"{stall / step:.2f}"
                )
            cells.append(words)
        rows.append([*case.words[:2], *cells, f"{result['load']:.1f}"])
    return [
        *CASE[:2],
        *(f"{r.title}, ms (range); steps" for r in runners),
        "load",
    ], rows


def _md_rows(found: Found, runners: list[Runner]) -> Table:
    """Return a line for each form of a file."""
    rows = []
    for case, result in _chosen(found, "md"):
        times, peer = result["times"], result["times"].get("pt", [])
        forms = [
            (f"{r.title}, {suffix or '.dp'}", times.get(r.name + suffix))
            for r in runners
            if r.ours
            for suffix in ("", ".pt2")
        ]
        for title, own in [*forms, ("dp --pt, .pth", peer)]:
            if own:
                ratio = common.format_ratio(peer, own) if own is not peer else ""
                rows.append(
                    [
                        *case.words[:2],
                        title,
                        f"{1 / statistics.median(own):.1f}",
                        ratio,
                        f"{result['load']:.1f}",
                    ]
                )
    return [*CASE[:2], "", "steps/s", "dp --pt / this", "load"], rows
