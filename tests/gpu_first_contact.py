"""The first minutes with a GPU: correctness, launches, speed and memory on one page of Markdown.

    python tests/gpu_first_contact.py [--output page.md] [--peer DIR] [--minutes 10] [--parts NAME ...]

Each part is a process of its own with a limit, and the next one follows if it fails or does not end. The page is
written before and after each part; complete outputs are in the folder ``page.logs``. The last line names the parts that
failed with their commands, and those for which no time was left. DIR is a virtual environment with DeePMD-kit.

On a bare machine with a driver, in the root of the repository; nothing has to be installed where the dependencies are::

    python3 -m venv venv && . venv/bin/activate
    pip install -c constraints.txt -e '.[test]'  # torch for CUDA is 3 GB; with a torch that is installed already:
    # python3 -m venv --system-site-packages venv && . venv/bin/activate && pip install -e '.[test]'
    python3 -m venv peer && peer/bin/pip install torch deepmd-kit==3.2.0
    python tests/gpu_first_contact.py --peer peer

``python tests/pretend_cuda tests/gpu_first_contact.py --minutes 60`` tries all parts on the pretended device.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORKERS, MAX_LINES = 12, 60  # tests at once; lines of an output on the page
MEANT_MINUTES, MIN_SECONDS = 10.0, 5.0  # for which the limits are meant; left for a part to be started


@dataclass
class Part:
    """A process that shows something on the device: ``words`` follow ``python``; a limit in s, for ten minutes.

    ``state`` is passed, failed, skipped, running or not run, with the reason; it took ``seconds``.
    """

    name: str
    title: str
    words: tuple[str, ...]
    limit: float
    state: str = "not run: no time was left"
    seconds: float = 0.0
    output: str = ""

    @property
    def command(self):
        """Return the command line that repeats the part."""
        return shlex.join(["python", *self.words])


def tests(name, title, files, chosen, limit):
    """Return a part of tests; warnings of other packages, which only a GPU shows, are no failures."""
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2)
    words = ["-m", "pytest", "-rfEs", "--tb=short", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu"]
    words += ["-n", str(workers)] * (workers > 1) + [f"tests/test_gpu{file}.py" for file in files]
    return Part(name, title, (*words, *(["-k", chosen] if chosen else [])), limit)


def speed(name, kind, frames, others, where, limit):
    """Return a part that measures training steps in float32 beside DeePMD-kit; ``others``: ways to run dp-ema."""
    words = ["benchmarks/speed.py", "--device", "cuda", "--stage", "step", "--kinds", kind, "--precision", "float32"]
    words += ["--batch", str(frames), "--turns", "3", "--seconds", "0.7", "--wait", "60"]
    title = f"steps and memory of {kind} with {frames} frames of 192 atoms beside DeePMD-kit"
    return Part(name, title, (*words, *others, *where), limit)


def parts_of(peer=None, work=None):
    """Return all parts, those that matter most first."""
    water, peer_words = "tests/gpu_water.py", ["--peer", peer] if peer else []
    numbers = "copies_of_a_step or numbers_and_gradients or parameters_of"
    where = [*peer_words, *(["--work", work] if work else [])]
    without_graphs = ["--set", "launched:training.cuda_graphs=false"]
    return [
        Part("device", "the device and the versions", (water, "versions", *peer_words), 40),
        tests("numbers", "values, gradients and training beside the CPU", ["", "_models"], numbers, 80),
        tests("restart", "restarts to the last bit", ["", "_runs"], "restart", 60),
        Part("steps", "time, launches, waits and memory of training steps", (water, "steps"), 150),
        tests("waits", "bounds of kernels, no wait in a step", ["", "_counts"], "wait or kernels", 60),
        speed("speed", "se_e2_a", 1, without_graphs, where, 120),
        tests("nccl", "ranks through NCCL at stages 0 to 3", [""], "nccl", 60),
        tests("graphs", "CUDA graphs have the bits of eager steps", ["_graphs"], "", 60),
        tests("tf32", "products in TF32", [""], "tf32", 30),
        speed("speed-8", "se_e2_a", 8, without_graphs, where, 120),
        speed("speed-dpa3", "dpa3", 8, without_graphs, where, 120),
        tests("hessians", "Hessians beside the CPU", ["_models"], "hessians", 60),
        tests("inference", "inference, tests and posthoc averages beside the CPU", ["_infer"], "not pt2", 60),
        tests("ranks", "two GPUs: numbers, restarts, other stages", ["_ranks"], "", 120),
        tests("runs", "losses, averages, tasks", ["_runs", "_faults"], "not optimizer", 120),
        tests("compiled", "compiled steps", [""], "compiled", 240),
        tests("pt2", "a .pt2 for CUDA that is frozen and read back", ["_infer"], "pt2", 180),
        speed("speed-compiled", "se_e2_a", 8, ["--programs", "eager", "compiled", "pt"], where, 150),
    ]


def run_parts(parts, page, minutes=MEANT_MINUTES):
    """Run the parts one after another within ``minutes``, and write ``page`` before and after each."""
    logs, end, scale = page.with_suffix(".logs"), time.monotonic() + 60 * minutes, minutes / MEANT_MINUTES
    logs.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left = end - time.monotonic()
        if left > MIN_SECONDS * scale:
            part.state = "running"
            write_page(parts, page)
            _run(part, min(left, part.limit * scale), logs / f"{part.name}.log")
            print(f"{part.name}: {part.state}, {part.seconds:.0f} s", flush=True)
        write_page(parts, page)


def _run(part, limit, log):
    """Run a part, with its output in the file ``log``; after ``limit`` seconds it is killed with all it has started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    start, errors = time.monotonic(), log.with_suffix(".err")
    with log.open("w") as out, errors.open("w") as err:
        words = [sys.executable, *part.words]
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            part.state = f"failed: exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            part.state = f"failed: no end after {limit:.0f} s"
        finally:  # also if this process is interrupted
            if process.poll() is None:
                _kill(process.pid)
                process.wait()
    part.seconds, part.output = time.monotonic() - start, log.read_text(errors="replace").strip()
    if process.returncode == 0:
        part.state = "skipped" if re.search(r"^\d+ skipped.*\Z", part.output, re.MULTILINE) else "passed"
    else:
        part.output += "\n" + errors.read_text(errors="replace").strip()


def write_page(parts, page):
    """Write the page: the first part, a table of all, the others, and the line of what failed."""
    rows = [f"| {part.name} | {part.title} | {part.state} | {part.seconds:.0f} |" for part in parts]
    table = "\n".join(["| part | content | result | seconds |", "| --- | --- | --- | ---: |", *rows])
    sections = []
    for part in parts:
        lines = part.output.splitlines()[-MAX_LINES:]
        shown = ["```text", *lines, "```"]
        if part.state == "passed" and part.words[0] != "-m":  # tables and lists
            # the page of a benchmark begins after the lines that it prints while it measures
            first = next((k for k, line in enumerate(lines) if line.startswith("# ")), 0)
            shown = [re.sub("^##? ", "### ", line) for line in lines[first:]]
        head = [f"## {part.name}: {part.title}", "", f"`{part.command}`: {part.state}", ""]
        sections += ["\n".join([*head, *shown])] if lines else []
    failed = [f"{part.name}: `{part.command}`" for part in parts if part.state.startswith("failed")]
    left = [part.name for part in parts if part.state.startswith(("not run", "running"))]
    last = f"Failed: {'; '.join(failed)}." if failed else "Nothing failed."
    last += f" Not run: `python tests/gpu_first_contact.py --output rest.md --parts {' '.join(left)}`." if left else ""
    title = f"# First contact with a GPU, {time.strftime('%Y-%m-%d %H:%M')}"
    unfinished = page.with_suffix(".part")
    unfinished.write_text("\n\n".join([title, *sections[:1], table, *sections[1:], last]) + "\n")
    os.replace(unfinished, page)


def _kill(pid):
    """End a process and what it has started, also in sessions of their own, as ranks are."""
    children = [int(c) for file in Path(f"/proc/{pid}/task").glob("*/children") for c in file.read_text().split()]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill(child)


def main():
    """Run the chosen parts; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu_first_contact.md"), help="the page")
    parser.add_argument("--peer", help="virtual environment with DeePMD-kit; without it only dp-ema is measured")
    parser.add_argument("--minutes", type=float, default=MEANT_MINUTES, help="for all parts; limits grow with it")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in parts_of()], help="all if not given")
    args = parser.parse_args()
    peer = args.peer and str(Path(args.peer).resolve())
    with tempfile.TemporaryDirectory() as work:
        chosen = [part for part in parts_of(peer, work) if args.parts is None or part.name in args.parts]
        run_parts(chosen, args.output.resolve(), args.minutes)
    print(f"{args.output}\n{args.output.read_text().splitlines()[-1]}")
    return int(any(part.state.startswith("failed") for part in chosen))


if __name__ == "__main__":
    sys.exit(main())
