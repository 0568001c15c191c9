"""Helpers of the benchmarks: inputs, runs of both programs, times of rows of lcurve.out, markdown
tables.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "water"
RUNS = Path(tempfile.gettempdir()) / "dp-ema-benchmarks"
MEMORY_S = 10.0  # that a run has to say how much it has allocated
# a program that writes what torch has allocated on the GPU when it gets SIGUSR1
PRINTING_MEMORY = """
import os, signal, sys
from importlib import import_module
def report(*_):
    import torch
    with open("memory.part", "w") as file:
        file.write(str(torch.cuda.max_memory_allocated()))
    os.replace("memory.part", "memory.txt")
signal.signal(signal.SIGUSR1, report)
sys.exit(import_module(sys.argv[1]).main(sys.argv[2:]))
"""
POLL_S = 0.002  # how closely lcurve.out is watched
ERROR_LINES = {
    "energy": r"Energy RMSE/Natoms\s*:\s*(\S+)",
    "force": r"Force\s+RMSE\s*:\s*(\S+)",
}


@dataclass(frozen=True)
class Program:
    """One of the two programs: its name in tables, its command, and its python."""

    name: str
    command: tuple[str, ...]
    python: str


@dataclass(frozen=True)
class Watched:
    """A training run: when it began, when each row of lcurve.out appeared, and when it ended, in
    seconds.
    """

    start: float
    rows: dict[int, float]
    end: float


@dataclass
class HaltedRun:
    """A training run that is halted but for its turns, so that several share a core without slowing
    each other.

    Attributes:
        folder: where it runs.
        process: leader of a group of its own.
        rows: step to the time at which its row of lcurve.out was seen.
    """

    folder: Path
    process: subprocess.Popen[bytes]
    rows: dict[int, float] = field(default_factory=dict)
    size: int = 0

    @classmethod
    def start(
        cls, command: list[str], folder: Path, config: dict, env: dict[str, str]
    ) -> HaltedRun:
        """Start ``command train`` on an input in a new folder; it runs until :meth:`halt`."""
        write_input(folder, config)
        with (folder / "train.log").open("w") as log:
            words = [*command, "train", "input.json", "--skip-neighbor-stat"]
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return cls(folder, process)

    def wait_for(self, step: int, until: float) -> int:
        """Return the first row after ``step``, waiting for it; its time is in ``rows``."""
        while max(self.rows, default=0) <= step:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"ended: {(self.folder / 'train.log').read_text()[-2000:]}"
                )
            if time.perf_counter() > until:
                raise TimeoutError
            self.size = note_rows(self.folder / "lcurve.out", self.size, self.rows)
            time.sleep(POLL_S)
        return max(self.rows)

    def halt(self) -> None:
        """Stop until :meth:`turn`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self, seconds: float, wait: float, clock: str = "wall") -> float:
        """Continue for about ``seconds``, and return the seconds of a step by the ``clock``, wall
        or processor.
        """
        # the clock of a process, as clock_getcpuclockid(3) of Linux returns it
        clock_id = (
            (~self.process.pid << 3) | 2
            if clock == "processor"
            else time.CLOCK_MONOTONIC
        )
        os.killpg(self.process.pid, signal.SIGCONT)
        until = time.perf_counter() + wait
        last = first = self.wait_for(max(self.rows, default=0), until)
        began = time.clock_gettime(clock_id)
        while last == first or self.rows[last] < self.rows[first] + seconds:
            last = self.wait_for(last, until)
        spent = time.clock_gettime(clock_id) - began
        self.halt()
        return spent / (last - first)

    def peak_memory(self, device: str = "cpu") -> int:
        """Return the most bytes that the process has held, its child processes not counted.

        On a CPU that is resident memory, on a GPU what torch has allocated; the run is started with
        :func:`printing_memory` there.
        """
        if device == "cuda":
            os.killpg(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGUSR1)
            file, until = self.folder / "memory.txt", time.perf_counter() + MEMORY_S
            while not file.exists() and time.perf_counter() < until:
                time.sleep(0.1)
            return int(file.read_text()) if file.exists() else 0
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])

    def end(self) -> None:
        """Kill it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def programs(peer: str | None) -> dict[str, Program]:
    """Return ``ours`` and, given the peer's environment, ``peer``."""
    found = {
        "ours": Program("dp-ema", (sys.executable, "-m", "deepmd_ema"), sys.executable)
    }
    if peer is not None:
        folder = Path(peer).resolve()
        found["peer"] = Program(
            "dp --pt",
            (str(folder / "bin" / "dp"), "--pt"),
            str(folder / "bin" / "python"),
        )
    return found


def printing_memory(program: Program, backend: str) -> list[str]:
    """Return the command of a program that answers :meth:`HaltedRun.peak_memory` on a GPU."""
    words = ["deepmd.main", backend] if backend else ["deepmd_ema.cli"]
    return [program.python, "-c", PRINTING_MEMORY, *words]


def environment(threads: int, device: str) -> dict[str, str]:
    """Return the environment of a run: both programs get the same number of threads and the same
    device.
    """
    settings = {
        "OMP_NUM_THREADS": threads,
        "DP_INTRA_OP_PARALLELISM_THREADS": threads,
        "DP_INTER_OP_PARALLELISM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    if device == "cpu":
        settings |= {"CUDA_VISIBLE_DEVICES": "", "DEVICE": "cpu"}
    return os.environ | {name: str(value) for name, value in settings.items()}


def add_common_options(parser) -> None:
    """Add the options of every benchmark."""
    parser.add_argument(
        "--peer",
        metavar="DIR",
        help="virtual environment of DeePMD-kit; without it only we run",
    )
    parser.add_argument(
        "--input", type=Path, default=EXAMPLE / "input.json", help="input to start from"
    )
    parser.add_argument(
        "--data", nargs="+", help="training systems instead of those of the input"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads of each program",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where both programs run",
    )
    parser.add_argument("--work", type=Path, default=RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")


def read_input(file: Path, data: list[str] | None) -> dict:
    """Return an input with absolute paths of its systems; ``data`` replaces the training
    systems.
    """
    config = json.loads(file.read_text())
    training = config["training"]
    if data:
        training["training_data"]["systems"] = data
    for section in ("training_data", "validation_data"):
        if section in training:
            base = (
                Path.cwd()
                if data and section == "training_data"
                else file.resolve().parent
            )
            systems = training[section]["systems"]
            systems = [systems] if isinstance(systems, str) else systems
            training[section]["systems"] = [str((base / s).resolve()) for s in systems]
    return config


def bare(config: dict) -> dict:
    """Return a copy without validation and averages, which writes no checkpoint on the way."""
    config = copy.deepcopy(config)
    training = config["training"]
    for key in (
        "validation_data",
        "enable_ema",
        "ema_decay",
        "ema_ckpt_keep",
        "ema_warmup",
        "averaging",
    ):
        training.pop(key, None)
    config.pop("validating", None)
    training["save_freq"] = 10**8
    return config


def with_precision(config: dict, precision: str) -> dict:
    """Return a copy whose descriptor and fitting net have ``precision``."""
    config = copy.deepcopy(config)
    for part in _networks(config):
        part["precision"] = precision
    return config


def with_seed(config: dict, seed: int) -> dict:
    """Return a copy that draws its first parameters and its frames by ``seed``."""
    config = copy.deepcopy(config)
    for part in _networks(config):
        part["seed"] = seed
    config["training"]["seed"] = seed
    return config


def with_numeric_sel(config: dict) -> dict:
    """Return a copy with ``sel: auto`` replaced by its numbers, so that both programs train the
    same model.
    """
    from deepmd_ema.config.schema.common import auto_sel
    from deepmd_ema.geometry import neighbor_statistics

    descriptor = config["model"]["descriptor"]
    if not isinstance(descriptor["sel"], str):
        return copy.deepcopy(config)
    type_map = config["model"]["type_map"]
    frames = (
        (c, b, t)
        for s in config["training"]["training_data"]["systems"]
        for c, b, t in _frames(s, type_map)
    )
    found = neighbor_statistics(frames, descriptor["rcut"], len(type_map))
    config = copy.deepcopy(config)
    sel = auto_sel(found.max_neighbors, descriptor["sel"])
    config["model"]["descriptor"]["sel"] = [int(n) for n in np.atleast_1d(sel)]
    return config


def count_frames(config: dict) -> int:
    """Return the number of training frames."""
    type_map = config["model"]["type_map"]
    return sum(
        1
        for system in config["training"]["training_data"]["systems"]
        for _ in _frames(system, type_map)
    )


def write_input(folder: Path, config: dict) -> None:
    """Make ``folder`` anew with an ``input.json``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "input.json").write_text(json.dumps(config, indent=2))


def train(
    program: Program, folder: Path, env: dict[str, str], *options: str
) -> Watched:
    """Train in ``folder`` and watch lcurve.out, which both programs write row by row in the same
    format.

    Raises:
        SystemExit: if the run fails; its log is shown.
    """
    lcurve, log = folder / "lcurve.out", folder / "train.log"
    lcurve.unlink(missing_ok=True)
    rows: dict[int, float] = {}
    start = time.perf_counter()
    with log.open("w") as out:
        run = subprocess.Popen(
            [*program.command, "train", "input.json", *options],
            cwd=folder,
            env=env,
            stdout=out,
            stderr=out,
        )
        size = 0
        while run.poll() is None:
            size = note_rows(lcurve, size, rows)
            time.sleep(POLL_S)
    end = time.perf_counter()
    note_rows(lcurve, size, rows)
    if run.returncode:
        raise SystemExit(
            f"{program.name} failed in {folder}:\n{log.read_text()[-3000:]}"
        )
    return Watched(start, rows, end)


def note_rows(lcurve: Path, size: int, rows: dict[int, float]) -> int:
    """Enter the time of rows of lcurve.out that were not there when it had ``size``; return its
    size.
    """
    try:
        now_size = lcurve.stat().st_size
    except FileNotFoundError:
        return size
    if now_size == size:
        return size
    now = time.perf_counter()
    for line in lcurve.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            rows.setdefault(int(line.split()[0]), now)
    return now_size


def write_system(
    folder: Path, types: np.ndarray, names: list[str], arrays: dict[str, np.ndarray]
) -> None:
    """Write frames of one system; without the array ``box`` it is open."""
    (folder / "set.000").mkdir(parents=True)
    np.savetxt(folder / "type.raw", types, fmt="%d")
    (folder / "type_map.raw").write_text("\n".join(names) + "\n")
    if "box" not in arrays:
        (folder / "nopbc").touch()
    for name, values in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", values.reshape(len(values), -1))


def write_repeated(
    system: Path, folder: Path, times: tuple[int, int, int], most: int | None = None
) -> None:
    """Write the frames of a periodic system with each cell several times, and what follows for
    labels.

    Args:
        system: in standard layout, with one set.
        folder: to be made.
        times: how often the cell is repeated along its three vectors.
        most: take no more frames than this.
    """
    arrays = {
        file.stem: np.load(file)[:most]
        for file in sorted((system / "set.000").glob("*.npy"))
    }
    kinds, names = (
        np.loadtxt(system / "type.raw", dtype=int),
        (system / "type_map.raw").read_text().split(),
    )
    coord, box = (
        arrays["coord"].reshape(-1, len(kinds), 3),
        arrays["box"].reshape(-1, 3, 3),
    )
    number = int(np.prod(times))
    shifts = np.array(list(np.ndindex(*times)))
    images = coord[:, None] + (shifts @ box)[:, :, None]  # frames, copies, atoms, 3
    more = {
        "coord": images,
        "box": box * np.array(times)[:, None],
        "force": np.tile(arrays["force"], number),
    }
    more |= {name: number * arrays[name] for name in ("energy", "virial")}
    write_system(folder, np.tile(kinds, number), names, more)


def read_errors(text: str) -> dict[str, float]:
    """Return the RMSE printed by `test` of either program: energy, eV/atom, and force,
    eV/angstrom.
    """
    # the last of several lines is the weighted average over systems
    return {
        name: float(re.findall(pattern, text)[-1])
        for name, pattern in ERROR_LINES.items()
    }


def run_text(
    program: Program, folder: Path, env: dict[str, str], *arguments: str
) -> str:
    """Run a sub-command in ``folder`` and return what it printed; a failure ends the benchmark and
    shows it.
    """
    done = subprocess.run(
        [*program.command, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(
            f"{program.name} {' '.join(arguments)} failed in {folder}:\n{text[-3000:]}"
        )
    return text


def machine(found: dict[str, Program], threads: int, device: str) -> str:
    """Return one line about what the numbers were measured on and with."""
    versions = [f"{p.name}: torch {_torch_version(p.python)}" for p in found.values()]
    where = f"{os.cpu_count()} cores, {threads} threads each"
    if device == "cuda":
        import torch

        where += f", {torch.cuda.get_device_name()}"
    return f"{where}; {'; '.join(versions)}; load {os.getloadavg()[0]:.1f} at the end"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def median_and_each(values: Sequence[float]) -> str:
    """Return a cell with the median and each value."""
    return f"{statistics.median(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})"


def format_ratio(one: list[float], other: list[float]) -> str:
    """Return the median of the ratios of pairs, with the least and the largest."""
    ratios = [a / b for a, b in zip(one, other)]
    return (
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        if ratios
        else ""
    )


def publish(page: str, output: Path | None) -> None:
    """Print a page and write it to ``output`` when given."""
    print(page)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page + "\n")


def today() -> str:
    """Return the date of a page."""
    return time.strftime("%Y-%m-%d")


def _end_with_parent() -> None:
    """Have this process killed when the one that has started it ends, however that ends: it may be
    halted then.
    """
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _networks(config: dict) -> list[dict]:
    """Return the sections that have a precision and a seed: each descriptor of a hybrid, and the
    fitting net.
    """
    descriptor = config["model"]["descriptor"]
    return [*descriptor.get("list", [descriptor]), config["model"]["fitting_net"]]


def _torch_version(python: str) -> str:
    code = "import torch; print(torch.__version__)"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _frames(system: str, type_map: list[str]):
    folder = Path(system)
    kinds = np.loadtxt(folder / "type.raw", dtype=int, ndmin=1)
    names = folder / "type_map.raw"
    if names.exists():
        kinds = np.array([type_map.index(name) for name in names.read_text().split()])[
            kinds
        ]
    for part in sorted(folder.glob("set.*")):
        coords = np.load(part / "coord.npy").reshape(-1, len(kinds), 3)
        open_system = (folder / "nopbc").exists()
        boxes = (
            [None] * len(coords)
            if open_system
            else np.load(part / "box.npy").reshape(-1, 3, 3)
        )
        yield from ((coord, box, kinds) for coord, box in zip(coords, boxes))
