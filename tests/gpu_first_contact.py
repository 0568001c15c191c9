"""The first minutes with a GPU: correctness, speed beside DeePMD-kit, kernels, memory.

    python tests/gpu_first_contact.py --output DIR [--minutes 10] [--peer PYTHON] [--parts NAME ...]

Parts run in order of value, each in a process of its own with a limit, after which it is killed
with all that it has started. Rows of results are added to DIR/results.jsonl as they are known, so
that a part that is killed leaves those that it had finished. A second call with the same DIR
measures what is missing or failed. DIR/page.md, the tables of benchmarks/results/gpu.md, is written
after each part, and DIR/log.txt has the output of all parts. PYTHON is that of an environment with
DeePMD-kit; without it only dp-ema is measured.

On a machine without a package index see gpu_archive.py; with one, in the root of the repository::

    python3 -m venv venv && . venv/bin/activate && pip install -c constraints.txt -e '.[test]'
    python3 -m venv peer && peer/bin/pip install torch==2.11.0 deepmd-kit==3.2.0 mpich e3nn
    python tests/gpu_first_contact.py --output gpu --peer peer/bin/python

``python tests/pretend_cuda tests/gpu_first_contact.py --minutes 60 --output DIR`` tries all parts
on the pretended device.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import gpu_page
from gpu_results import FILE_NAME, Results

ROOT = Path(__file__).resolve().parents[1]
MAX_WORKERS = 12  # tests at once
MIN_SECONDS = 5.0  # that must be left for a part to be started
MAX_LINES = 40  # of the output of a part that failed, in its row


@dataclass(frozen=True)
class Part:
    """A process that measures or tests something on the device.

    Attributes:
        name: on the command line and in results.
        title: what it shows.
        words: what follows ``python``.
        limit: seconds.
        beside: whether the next parts are started while it runs, up to the first that is not beside
            others. Parts that measure times run alone.
        adds_rows: whether it adds rows of results itself.
    """

    name: str
    title: str
    words: tuple[str, ...]
    limit: float
    beside: bool = False
    adds_rows: bool = False


@dataclass
class Running:
    """A part that was started."""

    part: Part
    process: subprocess.Popen
    log: Path
    until: float
    began: float = field(default_factory=time.monotonic)


def pytest_part(name, title, files, chosen, limit, *, beside=False):
    """Return a part of tests; warnings of other packages, which only a GPU shows, are no
    failures.
    """
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2)
    words = [
        "-m",
        "pytest",
        "-rfEs",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-m",
        "gpu",
    ]
    words += ["-n", str(workers)] * (workers > 1)
    words += [f"tests/gpu/test_gpu{file}.py" for file in files]
    if chosen:
        words += ["-k", chosen]
    return Part(name, title, tuple(words), limit, beside)


def measured(name, title, limit, script, *words):
    """Return a part that adds rows of results."""
    return Part(name, title, (f"tests/{script}.py", *words), limit, adds_rows=True)


def parts_of(peer=None, work=None, cache=None, device="cuda"):
    """Return all parts, those that matter most first."""
    of_peer = ["--peer", peer] if peer else []
    places = [
        *of_peer,
        *(["--work", work] if work else []),
        *(["--cache", cache] if cache else []),
    ]
    places += [] if device == "cuda" else ["--device", device]
    eager = ["--ways", "eager", "graphs", "pt", "pt_expt"]
    compiled = [
        "--ways",
        "compiled",
        "compiled_graphs",
        "pt_compiled",
        "pt_expt_compiled",
        "--part",
        "speed",
    ]

    def speed(name, limit, kinds, frames, ways, wait):
        title = f"steps of {', '.join(kinds)} with {frames} frames in turns"
        words = [
            "--part",
            "speed",
            "--kinds",
            *kinds,
            "--frames",
            frames,
            *ways,
            "--wait",
            wait,
            *places,
        ]
        return measured(name, title, limit, "gpu_speed", *words)

    numbers = "copies_of_a_step or numbers_and_gradients or parameters_of"
    return [
        measured(
            "versions",
            "the device and the versions",
            60,
            "gpu_water",
            "versions",
            *of_peer,
        ),
        speed("speed-1", 140, ["se_e2_a", "dpa4c"], "8", eager, "75"),
        speed("speed-2", 140, ["dpa3", "dpa4"], "8", eager, "75"),
        speed("speed-3", 170, ["se_e2_a", "dpa4c", "dpa3", "dpa4"], "1", eager, "85"),
        pytest_part(
            "numbers",
            "values and gradients beside the CPU",
            ["", "_models"],
            numbers,
            90,
            beside=True,
        ),
        pytest_part(
            "restart",
            "restarts to the last bit",
            ["", "_runs", "_graphs"],
            "restart",
            90,
        ),
        measured(
            "kernels",
            "kernels of a step beside the limit of the card",
            120,
            "gpu_water",
            "kernels",
        ),
        speed("speed-4", 140, ["se_atten, 2 layers", "dpa2"], "8", eager, "75"),
        speed("speed-5", 140, ["se_atten, 2 layers", "dpa2"], "1", eager, "75"),
        measured(
            "growth",
            "time and memory against atoms",
            150,
            "gpu_water",
            "growth",
            "--kinds",
            "se_e2_a",
            "dpa4c",
        ),
        speed(
            "compiled-1",
            330,
            ["se_e2_a", "dpa4c", "dpa3", "dpa4"],
            "8",
            compiled,
            "270",
        ),
        pytest_part(
            "nccl",
            "one rank through NCCL at stages 0 to 3",
            [""],
            "nccl",
            90,
            beside=True,
        ),
        pytest_part(
            "graphs",
            "CUDA graphs have the bits of eager steps",
            ["_graphs"],
            "",
            90,
            beside=True,
        ),
        pytest_part("tf32", "products in TF32", [""], "tf32", 60, beside=True),
        pytest_part(
            "waits", "bounds of kernels, no wait in a step", ["_counts"], "kernels", 90
        ),
        measured(
            "inference",
            "a .pt2 that is frozen for CUDA, and its speed",
            200,
            "gpu_water",
            "inference",
        ),
        measured("bits", "TF32 and bfloat16", 120, "gpu_water", "bits"),
        speed(
            "compiled-2",
            330,
            ["se_e2_a", "dpa4c", "dpa3", "dpa4"],
            "1",
            compiled,
            "270",
        ),
        speed("compiled-3", 330, ["se_atten, 2 layers", "dpa2"], "8", compiled, "270"),
        speed("compiled-4", 330, ["se_atten, 2 layers", "dpa2"], "1", compiled, "270"),
        measured(
            "growth-2",
            "time and memory against atoms",
            150,
            "gpu_water",
            "growth",
            "--part",
            "growth",
            "--kinds",
            "dpa3",
            "dpa4",
            "se_atten, 2 layers",
            "dpa2",
        ),
        pytest_part(
            "hessians",
            "Hessians beside the CPU",
            ["_models"],
            "hessians",
            90,
            beside=True,
        ),
        pytest_part(
            "infer",
            "inference, tests and averages beside the CPU",
            ["_infer"],
            "not pt2",
            90,
            beside=True,
        ),
        pytest_part(
            "runs",
            "losses, averages, tasks",
            ["_runs", "_faults"],
            "not optimizer",
            180,
        ),
        pytest_part(
            "compiled",
            "compiled steps have the numbers of eager ones",
            [""],
            "compiled",
            300,
            beside=True,
        ),
        pytest_part(
            "pt2",
            "a .pt2 for CUDA has the results of its checkpoint",
            ["_infer"],
            "pt2",
            300,
        ),
        pytest_part(
            "ranks", "two GPUs: numbers, restarts, other stages", ["_ranks"], "", 180
        ),
    ]


def run_parts(parts, folder, minutes):
    """Run the parts within ``minutes``, those beside others at once, and write the page after
    each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    results = Results(folder / FILE_NAME, "parts")
    running = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for part in parts:
                if results.has([part.name]):
                    continue
                left = end - time.monotonic()
                if left > MIN_SECONDS:
                    running.append(
                        start(part, folder, Path(logs), min(left, part.limit))
                    )
                if not part.beside or left <= MIN_SECONDS:
                    wait_for(running, folder, results)
                    running = []
            wait_for(running, folder, results)
        finally:  # also if this process is interrupted
            for run in running:
                kill(run.process.pid)
    gpu_page.write(results, folder / "page.md")


def start(part, folder, logs, limit):
    """Start a part with its output in a file of ``logs``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, *part.words]
    if part.adds_rows:
        words += ["--results", str(folder / FILE_NAME)]
    log = logs / f"{part.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    return Running(part, process, log, time.monotonic() + limit)


def wait_for(running, folder, results):
    """Wait for all parts that run, kill those that do not end, and add a row for each."""
    for run in running:
        limit = max(0.0, run.until - time.monotonic())
        try:
            code = run.process.wait(limit)
            error = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"no end after {time.monotonic() - run.began:.0f} s"
            kill(run.process.pid)
            run.process.wait()
        output = run.log.read_text(errors="replace").strip()
        seconds = round(time.monotonic() - run.began, 1)
        command = shlex.join(["python", *run.part.words])
        with (folder / "log.txt").open("a") as log:
            log.write(
                f"\n===== {run.part.name}: {error or 'ended'}, {seconds} s: {command}\n{output}\n"
            )
        lines = output.splitlines()
        summary = (
            re.sub(r"^=+ | =+$", "", lines[-1])
            if lines and not run.part.adds_rows
            else ""
        )
        values = {
            "title": run.part.title,
            "seconds": seconds,
            "command": command,
            "summary": summary[:200],
        }
        if error:
            values |= {"error": error, "output": "\n".join(lines[-MAX_LINES:])[-3000:]}
        results.add([run.part.name], **values)
        gpu_page.write(results, folder / "page.md")


def kill(pid):
    """End a process and what it has started, also in sessions of their own, as ranks are."""
    children = [
        int(c)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for c in file.read_text().split()
    ]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill(child)


def main():
    """Run the chosen parts; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("gpu_first_contact"),
        help="folder of results and page",
    )
    parser.add_argument(
        "--peer",
        help="python of an environment with DeePMD-kit; without it only dp-ema is measured",
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="for all parts of this call"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[part.name for part in parts_of()],
        help="all if not given",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder of compiled code, for a further call; removed if not given",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="of the speed in turns",
    )
    args = parser.parse_args()
    output, cache = args.output.resolve(), args.cache and str(args.cache.resolve())
    with tempfile.TemporaryDirectory() as work:
        parts = parts_of(args.peer, work, cache, args.device)
        chosen = [
            part for part in parts if args.parts is None or part.name in args.parts
        ]
        if args.parts:
            chosen.sort(key=lambda part: args.parts.index(part.name))
        run_parts(chosen, output, args.minutes)
    rows = Results(output / FILE_NAME).rows().values()
    failed = [
        row["key"][0] for row in rows if row["part"] == "parts" and row.get("error")
    ]
    missing = [
        part.name
        for part in chosen
        if ("parts", part.name) not in Results(output / FILE_NAME).rows()
    ]
    print(
        f"{output / 'page.md'}. Failed: {' '.join(failed) or 'none'}. Not run: "
        f"{' '.join(missing) or 'none'}."
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
