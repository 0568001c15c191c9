"""Tables of the results of gpu_first_contact.py, as benchmarks/results/gpu.md has them.

python tests/gpu_page.py DIR/results.jsonl  # writes them anew
"""

import os
import sys
from pathlib import Path

from gpu_results import Results

WAYS = {
    "eager": "dp-ema, eager",
    "graphs": "CUDA graphs",
    "compiled": "compiled",
    "compiled_graphs": "compiled in graphs",
    "pt": "`pt`",
    "pt_compiled": "`pt`, compiled",
    "pt_expt": "`pt_expt`",
    "pt_expt_compiled": "`pt_expt`, compiled",
}
OURS = ("eager", "graphs", "compiled", "compiled_graphs")
NUM_OPERATIONS = 5  # of a step, in the table
MAX_ERROR = 160  # characters of an error in a table


def write(results, page):
    """Write all tables to the file ``page``."""
    rows = results.rows()
    sections = [
        versions(rows),
        speed(rows),
        kernels(rows),
        growth(rows),
        inference(rows),
        bits(rows),
        parts(rows),
    ]
    text = "\n\n".join(section for section in sections if section) + "\n"
    unfinished = page.with_suffix(".part")
    unfinished.write_text(text)
    os.replace(unfinished, page)


def versions(rows):
    """Return the list of versions."""
    row = rows.get(("versions", "versions"))
    lines = [f"- {line}" for line in row["lines"]] if row else []
    return "\n".join(lines)


def speed(rows):
    """Return the tables of times and memory of a step, and the errors of ways that have none."""
    found = of_part(rows, "speed")
    cases = list(dict.fromkeys(tuple(row["key"][:3]) for row in found))
    if not cases:
        return ""
    by_key = {tuple(row["key"]): row for row in found}
    times, memory, errors = [], [], []
    for case in cases:
        of_way = {way: by_key.get((*case, way), {}) for way in WAYS}
        ms = {way: row["ms"] for way, row in of_way.items() if "ms" in row}
        ours = min((ms[way] for way in ms if way in OURS), default=None)
        theirs = min((ms[way] for way in ms if way not in OURS), default=None)
        ratio = f"{theirs / ours:.2f}" if ours and theirs else ""
        cells = [case[0], case[1], str(case[2])]
        times.append([*cells, *(number(ms.get(way)) for way in WAYS), ratio])
        sizes = [row.get("memory", 0) for row in of_way.values()]
        memory.append(
            [*cells, *(f"{size / 1e6:.0f}" if size else "" for size in sizes)]
        )
        for way, row in of_way.items():
            if row.get("error"):
                errors.append(
                    f"- {case[0]}, {case[2]} frames, {WAYS[way]}: {short(row['error'])}"
                )
    head = ["model", "precision", "frames", *WAYS.values()]
    machines = dict.fromkeys(row["machine"] for row in found if row.get("machine"))
    text = (
        "Medians of turns. The last column is the fastest way of DeePMD-kit over the fastest of "
        "dp-ema."
    )
    lines = [
        "## Steps beside DeePMD-kit, ms",
        "",
        f"On {'; '.join(machines)}. {text}",
        "",
    ]
    lines += [table([*head, "times as fast"], times), ""]
    lines += [
        "## Memory of these runs, MB that torch had allocated at most",
        "",
        table(head, memory),
        "",
        *errors,
    ]
    return "\n".join(lines).strip()


def kernels(rows):
    """Return the table of kernels beside the limit of the card, and of the operations that take
    most.
    """
    found = [row for row in of_part(rows, "kernels") if "kernels_ms" in row]
    ceilings = rows.get(("kernels", "ceilings"))
    if not found:
        return ""
    body, operations = [], []
    for row in found:
        kind, _, frames = row["key"]
        share = row["limit_ms"] / row["kernels_ms"] if row["kernels_ms"] else 0.0
        cells = [number(row[name]) for name in ("step_ms", "kernels_ms", "limit_ms")]
        counts = [
            f"{row['kernels']:.0f}",
            f"{row['gflops']:.1f}",
            f"{row['gbytes']:.2f}",
        ]
        body.append([kind, str(frames), *cells, f"{share:.2f}", *counts])
        for name, ms, limit, calls in row["operations"][:NUM_OPERATIONS]:
            operations.append(
                [kind, str(frames), f"`{name}`", str(calls), number(ms), number(limit)]
            )
    rates = {
        name: ceilings[name] / 1e12
        for name in ("bandwidth", "float32", "tf32", "float64", "bfloat16")
    }
    listed = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    head = [
        "model",
        "frames",
        "step, ms",
        "kernels, ms",
        "limit, ms",
        "limit / kernels",
        "kernels",
        "GFLOP",
        "GB",
    ]
    lines = ["## Kernels of an eager step beside the limit of the card", ""]
    lines += [
        f"Measured: TB/s of a copy and TFLOP/s of products: {listed}.",
        "",
        table(head, body),
        "",
    ]
    lines += [
        table(
            ["model", "frames", "operation", "calls", "kernels, ms", "limit, ms"],
            operations,
        )
    ]
    return "\n".join(lines)


def growth(rows):
    """Return the table of time and memory against atoms."""
    body = []
    for row in of_part(rows, "growth"):
        kind, precision, atoms = row["key"]
        cells = [short(row.get("error") or row.get("full", "")), "", "", ""]
        if "ms" in row:
            cells = [
                number(row["ms"]),
                f"{row['memory'] / 1e9:.2f}",
                f"{row['bytes_per_atom'] / 1e3:.1f}",
                row["way"],
            ]
        body.append([kind, precision, f"{atoms:,}", *cells])
    if not body:
        return ""
    head = ["model", "precision", "atoms", "step, ms", "GB", "kB per atom", "steps are"]
    return "## Growth with the atoms of a frame\n\n" + table(head, body)


def inference(rows):
    """Return the table of inference by a checkpoint and by a .pt2."""
    body = []
    for row in of_part(rows, "inference"):
        sizes = [
            name.removeprefix("eager_ms_")
            for name in row
            if name.startswith("eager_ms_")
        ]
        if row.get("error"):
            body.append([row["key"][0], "", short(row["error"]), "", "", ""])
        for size in sizes:
            times = [number(row[f"{name}_ms_{size}"]) for name in ("eager", "pt2")]
            body.append(
                [
                    row["key"][0],
                    size,
                    *times,
                    f"{row[f'force_error_{size}']:.1e}",
                    f"{row['freeze_s']:.0f}",
                ]
            )
    if not body:
        return ""
    head = [
        "model",
        "atoms",
        "checkpoint, ms",
        ".pt2, ms",
        "difference of forces",
        "freeze, s",
    ]
    return "## Energies and forces by a checkpoint and by its .pt2\n\n" + table(
        head, body
    )


def bits(rows):
    """Return the table of products with fewer bits."""
    body = []
    for row in of_part(rows, "bits"):
        cells = (
            [short(row["error"]), ""]
            if row.get("error")
            else [number(row["ms"]), f"{row['gradient_error']:.1e}"]
        )
        body.append([*row["key"], *cells])
    if not body:
        return ""
    head = ["model", "factors", "step, ms", "error of gradient"]
    return "## Products with fewer bits, 8 frames\n\n" + table(head, body)


def parts(rows):
    """Return the table of all parts."""
    body = []
    for row in of_part(rows, "parts"):
        state = row.get("error") or row.get("summary") or "measured"
        body.append([row["key"][0], row["title"], state, f"{row['seconds']:.0f}"])
    failed = [
        f"- {row['key'][0]}: `{row['command']}`"
        for row in of_part(rows, "parts")
        if row.get("error")
    ]
    return (
        "## Parts\n\n"
        + table(["part", "content", "result", "seconds"], body)
        + "\n\n"
        + "\n".join(failed)
    )


def of_part(rows, part):
    """Return the rows of a part."""
    return [row for row in rows.values() if row["part"] == part]


def number(value):
    """Return a time as a table shows it."""
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def short(error):
    """Return the last line of an error, without what would break a table."""
    lines = error.strip().splitlines() or [""]
    return lines[-1].replace("|", "/")[-MAX_ERROR:]


def table(header, body):
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    write(Results(sys.argv[1]), Path(sys.argv[1]).with_name("page.md"))
