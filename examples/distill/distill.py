"""Distill a universal potential into a Deep Potential model of one system.

    python distill.py structure.cif --teacher chgnet --temperature 300 1200 --hours 1 -o out/

Dynamics with the teacher gives the first labels. In each round two students with different seeds
are trained, and the teacher labels frames of the dynamics of the first on which their forces
disagree. The end compares student and teacher. Every step leaves a file in the folder of -o: the
same command continues a run that was stopped.
"""

import argparse
import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
import zlib
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from functools import cache
from itertools import repeat
from multiprocessing import active_children, get_context
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import compare
import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.nptberendsen import NPTBerendsen
from ase.md.velocitydistribution import thermalize_momenta
from compare import EVERY, Runs, time_step

Source = tuple[str, str]  # of a calculator: module:Class, and its arguments as JSON

TEACHERS = {"chgnet": "chgnet.model.dynamics:CHGNetCalculator"}
STUDENT = "deepmd_ema.calculator:DP"
# strain tensors of the cells, relative to that at the end of the last dynamics at zero pressure,
# "npt"
CELLS = {
    "npt": 0 * np.eye(3),
    "small": -0.015 * np.eye(3),
    "same": 0 * np.eye(3),
    "large": 0.02 * np.eye(3),
}
CELLS["sheared"] = np.array(
    [[0.02, 0.02, 0.0], [0.02, 0.0, -0.03], [0.0, -0.03, -0.02]]
)
MIN_HEIGHT = 8.0  # angstrom: a smaller cell is repeated
MIN_FRAMES = 5  # of dynamics with the teacher
STOP = 10  # times the limit: dynamics ends where the students disagree by more
MAX_FORCE = 50  # eV/angstrom, of a label
MAX_LABELS = 120  # in a round, and of the end
MIN_TRAINING = 0.005  # h
MIN_HOURS = 0.05
# of an input, each with at least twice the time of the last; each measures some steps
MAX_TRIES = 3
MIN_STEPS = 100  # of a training, the fewest that `dp-ema init --hours` writes
PROGRESS_S = 60.0  # between two lines while students are trained
MAX_SLOWDOWN = 2.0  # a short training is mostly its start
# parts of the time: dynamics of the teacher, training and dynamics of a round, last training, end
TEACHER, TRAINING, DYNAMICS, LAST_TRAINING, END = 0.12, 0.06, 0.04, 0.25, 0.2


def start_process() -> None:
    """End this process when its parent is killed (Linux), ignore SIGINT, and hide warnings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@cache
def load(name: str, arguments: str) -> Any:
    """Return a calculator; each process loads it once."""
    try:
        return resolve_name(name)(**json.loads(arguments))
    except Exception as error:  # of any class
        raise RuntimeError(
            f"{name}, arguments {arguments}: {type(error).__name__}: {error}"
        ) from error


def evaluate(atoms: Atoms, source: Source) -> Atoms:
    """Return a copy with energy, forces and stress of a calculator, which may raise any
    exception.
    """
    frame = Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=True)
    results = {
        name: load(*source).get_property(name, frame)
        for name in ("energy", "forces", "stress")
    }
    frame.calc = SinglePointCalculator(
        frame, **{name: np.copy(value)[()] for name, value in results.items()}
    )
    if not all(np.isfinite(value).all() for value in results.values()):
        raise ValueError("energy, forces or stress are not finite")
    return frame


def label(atoms: Atoms, source: Source) -> Atoms | None:
    """Return the frame with labels, or None where the teacher fails or a force is too large to
    learn from.
    """
    try:
        frame = evaluate(atoms, source)
    except Exception:  # of any teacher
        return None
    return frame if np.abs(frame.get_forces()).max() < MAX_FORCE else None


def save(path: Path, frames: list[Atoms]) -> list[Atoms]:
    """Write a file, which is complete or absent; return the frames as they are read."""
    path.parent.mkdir(exist_ok=True)
    write(path.with_suffix(".part"), frames, format="extxyz")
    path.with_suffix(".part").replace(path)
    return read(path, ":", format="extxyz")


def simulate(
    path: Path,
    start: Atoms,
    sources: list[Source],
    kelvin: float,
    seconds: float,
    stop: float,
) -> list[Atoms]:
    """Return frames of dynamics with the first of the calculators; read them if the file exists.

    Langevin dynamics in a strained cell, or dynamics at zero pressure. ``disagreement`` of a frame
    is the largest deviation of the force on an atom among the calculators, as of
    `dp-ema model-devi`, ``seconds`` the time of the steps so far, ``failed`` whether the
    disagreement exceeds ``stop`` or a student cannot go on.

    Raises:
        RuntimeError: if the teacher fails.
    """
    if path.exists():
        return read(path, ":", format="extxyz")
    name, rng = (
        path.stem.rpartition("-")[2],
        np.random.default_rng([*map(ord, f"{path.parent.name}/{path.stem}")]),
    )
    atoms = Atoms(
        start.symbols,
        start.positions,
        cell=start.cell,
        pbc=True,
        calculator=load(*sources[0]),
    )
    atoms.set_cell(atoms.cell @ (np.eye(3) + CELLS[name]), scale_atoms=True)
    thermalize_momenta(atoms, temperature_K=kelvin, rng=rng)
    step = time_step(atoms) * units.fs
    dynamics = Langevin(
        atoms,
        step,
        temperature_K=kelvin,
        friction=0.01 / units.fs,
        rng=rng,
        fixcm=False,
    )
    if (
        name == "npt"
    ):  # the volume relaxes within 1 ps at a bulk modulus of 10 GPa, faster in stiffer crystals
        rates = {
            "taut": 100 * units.fs,
            "taup": 1000 * units.fs,
            "compressibility_au": 0.1 / units.GPa,
        }
        dynamics = NPTBerendsen(
            atoms, step, temperature_K=kelvin, pressure_au=0.0, **rates
        )
    frames, failed, used, end = [], False, 0.0, time.monotonic() + seconds
    least = (
        MIN_FRAMES if len(sources) == 1 else 0
    )  # a slow teacher gets the time that some labels need
    while not failed and (time.monotonic() < end or len(frames) <= least):
        begin = time.monotonic()
        try:
            dynamics.run(EVERY if frames else 0)
            used += time.monotonic() - begin
            frame, *others = (evaluate(atoms, source) for source in sources)
        except Exception as error:  # of any calculator
            if len(sources) == 1 or not frames:
                where = (
                    f"{sources[0][0]}, {atoms.get_chemical_formula()}, {path}, step "
                    f"{dynamics.nsteps}"
                )
                text = f"{where}: {type(error).__name__}: {error}"
                raise RuntimeError(" ".join(text.split())) from None
            failed = True
        else:
            deviation = np.std(
                [labels.get_forces() for labels in (frame, *others)], axis=0
            )
            frame.info |= {
                "disagreement": float(np.linalg.norm(deviation, axis=1).max()),
                "seconds": used,
            }
            failed = bool(frame.info["disagreement"] > stop)
            frames.append(frame)
        frames[-1].info["failed"] = failed
    return save(path, frames)


def command(folder: Path, *arguments: object) -> str:
    """Return the output of a command of `dp-ema` in a folder, whose messages are in log.txt there.

    Raises:
        RuntimeError: with the last of them, if it fails.
    """
    run = [sys.executable, "-m", "deepmd_ema", *map(str, arguments)]
    threads = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))
    }  # two students are trained at once
    options = {
        "cwd": folder,
        "env": os.environ | threads,
        "preexec_fn": start_process,
        "text": True,
    }
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run(
            run, stdout=subprocess.PIPE, stderr=log, check=False, **options
        )
    if done.returncode:
        raise RuntimeError(
            f"dp-ema {arguments[0]}: {Path(log.name).read_text().splitlines()[-1]} ({log.name})"
        )
    return done.stdout


def propose(folder: Path, hours: float) -> None:
    """Write the input that `dp-ema init` proposes for this time, or for more where it is too little
    for a training here.
    """
    words = ("init", "../frames.extxyz", "-o", "proposed.json")
    # of a run that was stopped before it took the input: init replaces no file
    (folder / "proposed.json").unlink(missing_ok=True)
    # on a busy machine a step may take many times as long as planned, and as long again when it is
    # measured the next time: a small student is better than no table
    for _ in range(MAX_TRIES):
        least = least_hours(folder, *words, "--hours", hours)
        if least is None:
            return
        hours = max(2 * hours, 1.2 * least)
    # a number of steps fits any load
    command(folder, *words, "--steps", MIN_STEPS)


def least_hours(folder: Path, *words: object) -> float | None:
    """Return the least time of a training, for which that of `dp-ema init` is too little; None if
    it has written the input.
    """
    try:
        command(folder, *words)
    except RuntimeError as error:
        least = re.search(r"and a run needs .*?\(--hours ([\d.]+)\)", str(error))
        if least is None:
            raise
        return float(least[1])
    return None


def train(folder: Path, seed: int, hours: float) -> Source:
    """Return a student, trained with the input of `dp-ema init`; go on if that was interrupted."""
    folder.mkdir(exist_ok=True)
    if not (folder / "input.json").exists():
        propose(folder, hours)
        text = (folder / "proposed.json").read_text()
        (folder / "proposed.json").write_text(
            text.replace('"seed": 1', f'"seed": {seed}')
        )
        (folder / "proposed.json").rename(folder / "input.json")
    restart = (
        ("--restart", "model.ckpt.pt")
        if (folder / "model.ckpt.pt").exists()
        else ("input.json",)
    )
    command(folder, "train", *restart)
    return (STUDENT, json.dumps({"model": str(folder / "model_ema.ckpt.pt")}))


def last_line(log: Path) -> str:
    """Return the last line of a log without its time, or that it has none yet."""
    lines = log.read_text().splitlines() if log.exists() else []
    return re.sub(r"^\[.*?\] ", "", lines[-1]) if lines else "they start"


class Distillation:
    """The run of a folder. Steps whose files exist are not repeated.

    Args:
        args: of the command line.
        pool: processes of one thread each.

    Raises:
        ValueError: if the structure has no cell, or the folder a run with other settings.
    """

    def __init__(self, args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
        self.args, self.pool, self.out = args, pool, args.output.resolve()
        self.teacher = (
            TEACHERS.get(args.teacher, args.teacher),
            json.dumps(args.arguments),
        )
        if ":" not in self.teacher[0]:
            known = ", ".join(TEACHERS)
            raise ValueError(
                f"--teacher {args.teacher}: expected {known}, or module:Class of an ASE "
                "calculator, such as ase.calculators.emt:EMT."
            )
        atoms = read(args.structure)
        if atoms.cell.rank < 3:
            raise ValueError(
                f"{args.structure}: expected a structure with a cell in three directions."
            )
        heights = 1 / np.linalg.norm(atoms.cell.reciprocal(), axis=1)
        atoms = atoms.repeat(np.ceil(MIN_HEIGHT / heights - 1e-6).astype(int))
        self.starts = dict.fromkeys(args.temperature, atoms)  # of dynamics
        self.out.mkdir(parents=True, exist_ok=True)
        record, crc = (
            self.out / "settings.json",
            zlib.crc32(Path(args.structure).read_bytes()),
        )
        settings = json.dumps([args.structure, crc, *self.teacher, args.temperature])
        if record.exists() and record.read_text() != settings:
            raise ValueError(
                f"{record}: {record.read_text()}, but now {settings}. Give another folder with -o."
            )
        record.write_text(settings)
        # time of a training over that planned by `dp-ema init`, which measures a few steps
        self.slowdown = 1.0
        self.progress = self.out / "progress.txt"
        spent = (
            self.progress.read_text().splitlines()[-1].split()[0]
            if self.progress.exists()
            else 0
        )
        self.begin = time.monotonic() - 60 * float(spent)

    def report(self, text: str) -> float:
        """Print a line, also to a file, after the minutes that are spent; return the part of the
        time.
        """
        minutes = (time.monotonic() - self.begin) / 60
        with self.progress.open("a") as file:
            for place in (sys.stdout, file):
                print(f"{minutes:5.1f} min  {text}", file=place, flush=True)
        return minutes / 60 / self.args.hours

    def report_delay(self, what: str, begin: float, hours: float) -> float:
        """Return the time since ``begin`` in hours; print a line if it is much longer than
        planned.
        """
        took = (time.monotonic() - begin) / 3600
        if took > 1.5 * hours:
            self.report(
                f"{what}: {60 * took:.1f} min in place of {60 * hours:.1f}, the least that it "
                "needs here"
            )
        return took

    def explore(
        self, folder: str, sources: list[Source], part: float, cells: list[str]
    ) -> Runs:
        """Return dynamics at each temperature in each cell, in this part of the time."""
        keys = [(kelvin, cell) for kelvin in self.args.temperature for cell in cells]
        seconds = part * 3600 * self.args.hours * min(1, self.args.workers / len(keys))
        jobs = [
            (
                self.out / folder / f"{kelvin:g}K-{cell}.extxyz",
                self.starts[kelvin],
                sources,
                kelvin,
                seconds,
                STOP * self.args.limit,
            )
            for kelvin, cell in keys
        ]
        begin = time.monotonic()
        runs = dict(zip(keys, self.pool.map(simulate, *zip(*jobs))))
        self.report_delay(f"{folder}, dynamics", begin, part * self.args.hours)
        for (kelvin, cell), frames in runs.items():
            if cell == "npt" and not frames[-1].info["failed"]:
                self.starts[kelvin] = frames[-1]
        return runs

    def explore_all(
        self, folder: str, sources: list[Source], part: float
    ) -> list[list[Atoms]]:
        """Return dynamics at zero pressure, and after it in strained cells."""
        npt = self.explore(folder, sources, part / 3, ["npt"])
        return [
            *(
                npt
                | self.explore(
                    folder, sources, part * 2 / 3, ["small", "large", "sheared"]
                )
            ).values()
        ]

    def train(self, folder: str, frames: list[Atoms], part: float) -> list[Source]:
        """Return two students of these frames."""
        if not (self.out / folder / "frames.extxyz").exists():
            save(self.out / folder / "frames.extxyz", frames)
        folders, hours = (
            [self.out / folder / f"student-{seed}" for seed in (1, 2)],
            part * self.args.hours,
        )
        begin, planned = (
            time.monotonic(),
            max(MIN_TRAINING, hours * min(1, self.args.workers / 2) / self.slowdown),
        )
        jobs = [self.pool.submit(train, *job, planned) for job in zip(folders, (1, 2))]
        while True:
            done, not_done = wait(jobs, PROGRESS_S, FIRST_EXCEPTION)
            if not not_done or any(job.exception() for job in done):
                break
            self.report(
                f"{folder}, students are trained: {last_line(folders[0] / 'log.txt')}"
            )
        students = [job.result() for job in jobs]
        took = self.report_delay(f"{folder}, training", begin, hours)
        self.slowdown = min(
            MAX_SLOWDOWN, max(self.slowdown, self.slowdown * took / hours)
        )
        return students

    def label(self, name: str, frames: list[Atoms]) -> list[Atoms]:
        """Return frames with labels of the teacher, evenly chosen from these; report those that it
        cannot label.
        """
        even = frames[:: -(-len(frames) // MAX_LABELS) or 1]
        if frames and not (self.out / name).exists():
            save(
                self.out / name,
                [
                    frame
                    for frame in self.pool.map(label, even, repeat(self.teacher))
                    if frame
                ],
            )
        labelled = read(self.out / name, ":", format="extxyz") if frames else []
        if len(labelled) < len(even):
            missing = f"{len(even) - len(labelled)} of {len(even)} frames"
            self.report(f"{missing}: the teacher fails, or forces are too large")
        return labelled

    def rounds(self) -> list[Atoms]:
        """Return all labelled frames when the students agree, or no time is left for a round."""
        runs, limit = (
            self.explore_all("teacher", [self.teacher], TEACHER),
            self.args.limit,
        )
        labelled, number, is_last = (
            [frame for frames in runs for frame in frames[1:]],
            0,
            False,
        )
        self.report(
            f"{len(labelled)} frames of {labelled[0].get_chemical_formula()} from dynamics with "
            "the teacher"
        )
        while not is_last:
            number += 1
            students = self.train(f"round-{number}", labelled, TRAINING)
            runs = self.explore_all(f"round-{number}", students, DYNAMICS)
            frames = [frame for frames in runs for frame in frames]
            worst = np.percentile([frame.info["disagreement"] for frame in frames], 95)
            failed = sum(run[-1].info["failed"] for run in runs)
            uncertain = [
                frame for frame in frames if frame.info["disagreement"] > limit
            ]
            new = self.label(f"round-{number}/labels.extxyz", uncertain)
            what = f"{len(labelled)} frames trained, {failed} of {len(runs)} dynamics failed"
            part = self.report(
                f"round {number}: {what}, disagreement {worst:.3f} eV/Å, {len(new)} frames labelled"
            )
            labelled += new
            # a round may take a fifth longer than planned
            has_time = part + 1.2 * (TRAINING + DYNAMICS) + LAST_TRAINING + END < 1
            is_last = (worst < limit and not failed) or not (
                has_time or (self.out / f"round-{number + 1}").exists()
            )
        return labelled

    def end(self) -> str:
        """Return the comparison of the last student with the teacher, with all files of the end."""
        out, kelvins, result = self.out, self.args.temperature, self.out / "result.md"
        if result.exists():
            return (
                f"{result}, of a run that has ended. For another: -o FOLDER.\n\n"
                f"{result.read_text()}"
            )
        labelled = self.rounds()
        students = self.train("last", labelled, LAST_TRAINING)
        if not (out / "student.pt2").exists():
            command(
                out,
                "freeze",
                "-c",
                "last/student-1/model_ema.ckpt.pt",
                "-o",
                "student.pt2",
            )
        self.report(f"{len(labelled)} frames trained for student.pt2")
        students[0] = (STUDENT, json.dumps({"model": str(out / "student.pt2")}))
        self.explore("end", students, END / 10, ["npt"])
        ours = self.explore("end", students, END * 3 / 10, ["small", "same", "large"])
        theirs = self.explore(
            "end-teacher", [self.teacher], END / 2, ["small", "same", "large"]
        )
        tests = self.label(
            "test.extxyz",
            [frame for run in ours.values() for frame in run[len(run) // 5 :]],
        )
        self.report(f"dynamics with both, {len(tests)} test frames")
        predictions = [
            list(self.pool.map(evaluate, tests, repeat(source))) for source in students
        ]
        rows = compare.errors(tests, *predictions) + compare.averages(
            theirs, ours, out / "radial.svg"
        )
        hottest = (
            "-s",
            f"end/{max(kelvins):g}K-same.extxyz",
            "--physics",
            "--temperature",
            max(kelvins),
        )
        rows += compare.physics(
            json.loads(command(out, "test", "-m", "student.pt2", *hottest, "--json"))[
                "physics"
            ]
        )
        command(
            out, "report", "last/student-1", "-s", "test.extxyz", "-o", "report.html"
        )
        compare.write_lammps(out, self.starts[kelvins[0]], kelvins[0])
        (out / "result.part").write_text(compare.table(rows))
        return (out / "result.part").replace(result).read_text()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__.partition("\n")[0]
    )
    parser.add_argument("structure", help="file that ASE reads, with a cell")
    parser.add_argument(
        "--teacher",
        default="chgnet",
        help="chgnet, or module:Class of an ASE calculator",
    )
    parser.add_argument(
        "--arguments", type=json.loads, default={}, metavar="JSON", help="of the class"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[300.0],
        metavar="K",
        help="of dynamics (300)",
    )
    parser.add_argument("--hours", type=float, default=1.0, help="time of all (1)")
    parser.add_argument(
        "--limit",
        type=float,
        default=0.05,
        help="of the disagreement, in eV/angstrom (0.05)",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes (one per core)"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("out"), metavar="FOLDER"
    )
    args = parser.parse_args()
    try:
        if args.hours < MIN_HOURS:
            raise ValueError(
                f"--hours {args.hours:g}: expected at least {MIN_HOURS:g}, for two trainings."
            )
        with ProcessPoolExecutor(
            args.workers, get_context("spawn"), start_process
        ) as pool:
            try:
                # Processes are started before Ctrl-C is possible: one that is interrupted while it
                # starts is in no list of those to be killed, and would work on for minutes.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                started = [pool.submit(os.getpid) for _ in range(args.workers)]
                wait(started)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                print(Distillation(args, pool).end())
            except BaseException:
                # the pool would wait for what they do; without them it gives its semaphores back
                for process in active_children():
                    process.kill()
                raise
    except KeyboardInterrupt:
        print(
            "distill: stopped. The same command continues.", file=sys.stderr, flush=True
        )
        return 130
    except Exception as error:  # of files, the teacher or commands
        if args.debug:
            raise
        print(f"distill: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
