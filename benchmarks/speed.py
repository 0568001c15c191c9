"""Speed beside DeePMD-kit: steps, memory, growth with the atoms, start-up, validation, checkpoints,
MD.

usage: python benchmarks/speed.py [--peer DIR] [--stage step growth ...] [--kinds "dpa3" ...]
                                  [--output PAGE]

The models are those of models.json and speed.json, the data frames of water, with 192 atoms if a
case says nothing else. Both programs get the same input, precision, batch size and threads, and
take turns; a ratio is the median of the ratios of the turns. Results are kept in --work and not
measured again, so each stage may be run at another time:

- ``step``: training runs are started and halted with SIGSTOP; they then run in turns, one at a
  time. The time of a step is that between rows of lcurve.out: loader, forward, backward, optimizer.
  Turns of dp-ema begin after its first epoch, in which it finds the neighbors of each frame, to
  keep them: DeePMD-kit does so in every step. Peak memory is that of these runs.
- ``growth``: time and memory of steps against the --atoms of a frame, with the first batch size;
  without --kinds, of GROWING. Each turn is a run of its own, since two may not fit into memory. On
  a CPU a program may take --memory GB; what fails is shown with its error, and not tried with more
  atoms. Statistics are those of one batch: of several DeePMD-kit makes one list of neighbors, which
  is larger than that of a step.
- ``start``: seconds to the first row, and those of the statistics before it: of all, of none that a
  file has.
- ``validation``, ``checkpoint``: the time that a step takes longer when all validation frames are
  evaluated or a checkpoint with an average is written after it.
- ``md``: steps per second in ASE with a ``.dp`` and a ``.pt2`` here and the ``.pth`` that
  `dp convert-backend` makes of the ``.dp``, of models that were trained for a few steps.

--set adds ways to run dp-ema, which stand beside the others in all stages: --set
always:model.descriptor.KEY=VALUE.
"""

from __future__ import annotations

import argparse
import compileall
import copy
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import speed_cases
import speed_page
from speed_cases import Case, Runner

STAGES = ("step", "growth", "start", "validation", "checkpoint", "md")
ROW_S = 0.3  # between two rows of lcurve.out, about
ROW_ATOMS = (
    1536  # between two rows of lcurve.out, while the time of a step is not known
)
MEMORY_SHARE = 0.8  # of the available memory, which other programs use too
# steps between two validations or checkpoints: the files of one are written before the next
PERIOD = 24
MD_TRAINING = 200  # steps
QUICK = {
    "kinds": ["se_e2_a, 96 atoms"],
    "precision": ["float64"],
    "batch": [1],
    "atoms": [96, 192],
    "turns": 2,
    "seconds": 0.5,
    "repeats": 1,
}
Measure = Callable[[Case, list[Runner], argparse.Namespace], dict[str, Any]]


def main() -> None:
    """Measure the chosen stages, and print the page of all results."""
    args = _arguments()
    runners, found = speed_cases.runners_of(args), {}
    cases = speed_cases.cases_of(args)
    stages: dict[str, tuple[Measure, list[Case]]] = {
        "step": (_steps, cases),
        "growth": (_growth, speed_cases.growth_cases(args)),
        "start": (_starts, cases[:1]),
        "validation": (_validation, _once(cases)),
        "checkpoint": (_checkpoint, _once(cases)),
        "md": (_md, _once(cases)),
    }
    for stage, (measure, its_cases) in stages.items():
        for case in its_cases:
            smaller = [
                r
                for (s, c), r in found.items()
                if (s, c.name, c.precision) == ("growth", case.name, case.precision)
            ]
            able = [
                r
                for r in runners
                if stage != "growth"
                or not any(r.name in one["failed"] for one in smaller)
            ]
            result = _result(stage, case, able, measure, args)
            if result is not None:
                found[stage, case] = result
    common.publish(speed_page.page(found, runners, args), args.output)
    if args.output is not None and any(stage == "growth" for stage, _ in found):
        speed_page.plot_growth(
            found, runners, args.output.with_name(f"{args.output.stem}-growth.png")
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    speed_cases.add_case_options(parser)
    parser.add_argument(
        "--stage",
        nargs="*",
        default=list(STAGES),
        choices=STAGES,
        help="what is measured now",
    )
    parser.add_argument("--turns", type=int, default=5, help="of each program")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a turn, after one row to wake up"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="of steps and growth: processor for a CPU that other programs use too",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="pairs of whole runs: start, validation, checkpoint",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="that each may take on a CPU; 4/5 of what is available",
    )
    parser.add_argument(
        "--wait", type=float, default=1500.0, help="seconds that a program has to begin"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small model, few turns: about two minutes",
    )
    parser.set_defaults(
        threads=1,
        stat_batches=10,
        memory=round(MEMORY_SHARE * _available_memory() / 1e9, 1),
    )
    args = parser.parse_args()
    if args.quick:
        for name, value in QUICK.items():
            setattr(args, name, value)
    return args


def _once(cases: list[Case]) -> list[Case]:
    """Return the cases with the first batch size alone, for what does not depend on it."""
    return [case for case in cases if case.batch == cases[0].batch]


def _result(
    stage: str,
    case: Case,
    runners: list[Runner],
    measure: Measure,
    args: argparse.Namespace,
) -> dict[str, Any] | None:
    """Return the result of a case, which is measured if the stage is chosen and a program has no
    result.
    """
    name = "input" if stage == "start" else case.file_name
    folder = (
        args.work.resolve() / "speed" / f"{args.device}-{args.threads}" / stage / name
    )
    file, wanted = folder / "result.json", {runner.name for runner in runners}
    known = json.loads(file.read_text()) if file.exists() else None
    if stage in args.stage and not (known and wanted <= set(known["programs"])):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # those of an earlier call are measured again: only what took turns can be compared
        before = set(known["programs"]) if known else set()
        again = [
            runner for runner in speed_cases.RUNNERS if runner.name in before - wanted
        ]
        known = measure(case, [*runners, *again], _in_folder(args, folder))
        known |= {
            "programs": sorted(wanted | before),
            "load": os.getloadavg()[0],
            "clock": args.clock,
        }
        file.write_text(json.dumps(known))
        print(
            stage,
            *case.words,
            {k: v for k, v in known.items() if k != "times"},
            flush=True,
        )
    return known


def _in_folder(args: argparse.Namespace, folder: Path) -> argparse.Namespace:
    args = copy.copy(args)
    args.folder, args.caches = (
        folder,
        args.work.resolve() / "speed" / "caches" / folder.name,
    )
    return args


def _write(
    case: Case,
    runner: Runner,
    args: argparse.Namespace,
    config: dict[str, Any],
    name: str = "",
) -> Path:
    folder = args.folder / (runner.name + name)
    common.write_input(
        folder, speed_cases.runner_input(config, case, runner, args.caches)
    )
    return folder


# --- training steps that take turns


def _steps(
    case: Case,
    runners: list[Runner],
    args: argparse.Namespace,
    interval: int | None = None,
) -> dict[str, Any]:
    """Return seconds per step in the turns of each program, seconds that each took to begin, and
    its peak memory.
    """
    runs: dict[str, common.HaltedRun] = {}
    times: dict[str, list[float]] = {}
    begin, failed, memory = {}, {}, {}
    interval = interval or _interval(case, runners[0], args)
    epoch = math.ceil(
        common.count_frames(speed_cases.input_of(case, args)) / case.batch
    )
    try:
        for turn in range(-1, args.turns + 1):
            for runner in runners if turn % 2 else runners[::-1]:
                name, start = runner.name, time.perf_counter()
                try:
                    if turn < 0:
                        runs[name] = _start(case, runner, args, interval)
                        runs[name].wait_for(0, start + args.wait)
                        begin[name] = time.perf_counter() - start
                        runs[name].wait_for(
                            epoch if runner.ours else 0, start + args.wait
                        )
                        runs[name].halt()
                    elif name not in failed:
                        seconds = runs[name].turn(
                            args.seconds if turn else 0.0, args.wait, args.clock
                        )
                        times.setdefault(name, []).extend(
                            [seconds] if turn else []
                        )  # the first one wakes up
                except (RuntimeError, TimeoutError) as error:
                    failed[name] = str(error) or f"no step within {args.wait:.0f} s"
                    times.pop(name, None)
                    runs[name].end()
        memory = {name: runs[name].peak_memory(args.device) for name in times}
    finally:
        for run in runs.values():
            run.end()
    return {"times": times, "begin": begin, "failed": failed, "memory": memory}


def _growth(
    case: Case, runners: list[Runner], args: argparse.Namespace
) -> dict[str, Any]:
    """Return times, errors and memory as :func:`_steps`, each turn in a run of its own, and the
    limit in GB.
    """
    found: dict[str, Any] = {
        "times": {},
        "failed": {},
        "memory": {},
        "limit": args.memory,
    }
    once = copy.copy(args)
    once.turns, once.stat_batches = 1, 1
    for turn in range(args.turns):
        for runner in runners if turn % 2 else runners[::-1]:
            if runner.name not in found["failed"]:
                one = _steps(
                    case, [runner], once, max(1, ROW_ATOMS // (case.atoms * case.batch))
                )
                found["times"].setdefault(runner.name, []).extend(
                    one["times"].get(runner.name, [])
                )
                found["failed"] |= one["failed"]
                found["memory"] |= one["memory"]
    return found


def _available_memory() -> int:
    """Return the bytes that programs can take without swapping."""
    lines = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text().splitlines()
    )
    return 1024 * int(lines["MemAvailable"].split()[0])


def _start(
    case: Case, runner: Runner, args: argparse.Namespace, interval: int
) -> common.HaltedRun:
    config = speed_cases.input_of(case, args, disp_freq=interval)
    config["model"]["data_stat_nbatch"] = args.stat_batches
    config = speed_cases.runner_input(config, case, runner, args.caches)
    env = speed_cases.runner_environment(args, runner, args.caches)
    program = common.programs(args.peer)["ours" if runner.ours else "peer"]
    command = runner.command(common.programs(args.peer))
    if args.device == "cuda":
        command = common.printing_memory(
            program, runner.backend
        )  # the device is full before the host is
    else:
        command = ["prlimit", f"--data={round(1e9 * args.memory)}", *command]
    return common.HaltedRun.start(command, args.folder / runner.name, config, env)


def _interval(case: Case, runner: Runner, args: argparse.Namespace) -> int:
    """Return the number of steps of a program that take about ``ROW_S``."""
    run = _start(case, runner, args, 1)
    try:
        run.wait_for(4, time.perf_counter() + args.wait)
    except RuntimeError as error:
        raise SystemExit(f"{case.name}, {runner.title} {error}") from None
    finally:
        run.end()
    first, *_, last = sorted(run.rows)[1:]
    return max(1, round(ROW_S * (last - first) / (run.rows[last] - run.rows[first])))


# --- whole runs in pairs


def _starts(
    _case: Case, runners: list[Runner], args: argparse.Namespace
) -> dict[str, Any]:
    """Return seconds to the first row, with all statistics, with those of the neighbors given, and
    with all given.
    """
    config = common.bare(common.read_input(args.input, args.data))
    config["training"] |= {"numb_steps": 1, "disp_freq": 1}
    compileall.compile_dir(
        common.ROOT / "deepmd_ema", quiet=2
    )  # as an installation does, that of the peer too
    everything = copy.deepcopy(config)
    everything["model"]["descriptor"]["sel"] = "auto"
    numeric = common.with_numeric_sel(everything)
    cached = speed_cases.with_options(numeric, {"training.stat_file": "../stat.hdf5"})
    kinds = (
        {"numbers": numeric}
        if args.quick
        else {"all": everything, "numbers": numeric, "stored": cached}
    )
    found, times = common.programs(args.peer), {}
    # one process of each program: what a run is started with makes no difference
    chosen = {runner.ours: runner for runner in reversed(runners)}.values()
    for repeat in range(args.repeats):
        for kind, value in kinds.items():
            for runner in chosen if repeat % 2 else reversed(list(chosen)):
                folder = args.folder / runner.name / kind
                options = [] if kind == "all" else ["--skip-neighbor-stat"]
                command, env = (
                    runner.command(found),
                    common.environment(args.threads, args.device),
                )
                program = common.Program(
                    runner.title,
                    tuple(command),
                    found["ours" if runner.ours else "peer"].python,
                )
                common.write_input(folder, value)
                if kind == "stored" and not (folder.parent / "stat.hdf5").exists():
                    common.train(program, folder, env, *options)
                watched = common.train(program, folder, env, *options)
                times.setdefault(runner.name, {}).setdefault(kind, []).append(
                    min(watched.rows.values()) - watched.start
                )
    return {"times": times, "frames": common.count_frames(config)}


def _validation(
    case: Case, runners: list[Runner], args: argparse.Namespace
) -> dict[str, Any]:
    """Return seconds of an evaluation of all validation frames, of which there are ``frames``."""
    source = common.read_input(args.input, None)["training"]["validation_data"][
        "systems"
    ][0]
    system = speed_cases.system_of(source, case.times, args.work)
    more = {
        "training.validation_data": {
            "systems": [str(system)],
            "batch_size": 1,
            "numb_btch": 1,
        },
        "validating": {
            "full_validation": True,
            "validation_freq": PERIOD,
            "save_best": False,
            "full_val_start": 0.0,
        },
    }
    frames = common.count_frames(
        {
            "model": {"type_map": ["O", "H"]},
            "training": {"training_data": {"systems": [str(system)]}},
        }
    )
    return _more_of_a_step(case, runners, args, more) | {"frames": frames}


def _checkpoint(
    case: Case, runners: list[Runner], args: argparse.Namespace
) -> dict[str, Any]:
    """Return seconds by which a checkpoint with an average makes a step longer."""
    return _more_of_a_step(
        case, runners, args, {"training.save_freq": PERIOD, "training.enable_ema": True}
    )


def _more_of_a_step(
    case: Case, runners: list[Runner], args: argparse.Namespace, options: dict[str, Any]
) -> dict[str, Any]:
    """Return by how many seconds a step takes longer every ``PERIOD`` steps, and the seconds of a
    plain one.
    """
    found, failed = common.programs(args.peer), {}
    times: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    config = speed_cases.input_of(case, args, disp_freq=1, numb_steps=3 * PERIOD + 2)
    for repeat in range(args.repeats):
        for runner in runners if repeat % 2 else runners[::-1]:
            if runner.name in failed:
                continue
            folder = _write(
                case, runner, args, speed_cases.with_options(config, options)
            )
            env = speed_cases.runner_environment(args, runner, args.caches)
            program = common.Program(runner.title, tuple(runner.command(found)), "")
            try:
                watched = common.train(program, folder, env, "--skip-neighbor-stat")
            except SystemExit as error:
                failed[runner.name] = str(error)
                continue
            extra, usual = _extra(watched.rows, PERIOD)
            times.setdefault(runner.name, []).append(extra)
            plain.setdefault(runner.name, []).append(usual)
    return {"times": times, "plain": plain, "failed": failed}


def _extra(rows: dict[int, float], period: int) -> tuple[float, float]:
    """Return by how much the steps at multiples of ``period`` take longer than the others, and the
    seconds of those.

    What is done after step n falls between the rows of n and n + 1 or, if a program writes the row
    after it, before that of n: both intervals count.
    """
    last = max(rows)
    spent = {
        step: rows[step + 1] - rows[step] for step in range(2, last)
    }  # the first step is slower
    due = [step for step in range(period, last, period) if step in spent]
    usual = statistics.median(
        spent[s] for s in spent if s not in due and s + 1 not in due
    )
    return statistics.median(spent[s] + spent[s - 1] - 2 * usual for s in due), usual


# --- molecular dynamics


def _md(case: Case, runners: list[Runner], args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of an MD step of 192 atoms in blocks that take turns, by program, or program
    and form of file.
    """
    from md import OURS, PEER, MdRun

    jobs, failed = {}, {}
    for runner in runners:
        if not runner.ours or "training.enable_compile" in runner.options:
            continue
        folder = _trained_shortly(case, runner, args)
        for suffix in (".dp", ".pt2"):
            file = args.folder / f"{runner.name}{suffix}"
            said = _command("ours", args, "freeze", "-c", str(folder), "-o", str(file))
            if said is not None:  # what cannot be frozen is an answer too
                failed[runner.name + suffix] = said
            else:
                jobs[runner.name + suffix.replace(".dp", "")] = (
                    OURS,
                    file,
                    sys.executable,
                )
    plain = args.folder / f"{runners[0].name}.dp"
    if args.peer is not None and plain.exists():
        said = _command(
            "peer", args, "convert-backend", str(plain), str(plain.with_suffix(".pth"))
        )
        if said is not None:
            failed["pt"] = said
        else:
            jobs["pt"] = (
                PEER,
                plain.with_suffix(".pth"),
                common.programs(args.peer)["peer"].python,
            )
    runs = {
        name: MdRun(
            *job, args.folder / f"{name}.log", args.threads, args.device, again=True
        )
        for name, job in jobs.items()
    }
    steps = {
        name: 1 + int(args.seconds / 2 / run.block(2).wall)
        for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.turns):
        for name in list(runs) if turn % 2 else list(runs)[::-1]:
            times[name].append(runs[name].block(steps[name]).wall)
    for run in runs.values():
        run.end()
    return {"times": times, "failed": failed}


def _trained_shortly(case: Case, runner: Runner, args: argparse.Namespace) -> Path:
    """Return a run of a few steps, after which atoms do not fall into each other, as with random
    weights they do.
    """
    config = speed_cases.input_of(
        case, args, disp_freq=MD_TRAINING, numb_steps=MD_TRAINING
    )
    config["learning_rate"] = {
        "type": "exp",
        "start_lr": 1e-3,
        "stop_lr": 1e-4,
        "decay_steps": MD_TRAINING // 10,
    }
    folder = _write(case, runner, args, config, "-run")
    program = common.Program(
        runner.title, tuple(runner.command(common.programs(args.peer))), ""
    )
    common.train(
        program,
        folder,
        speed_cases.runner_environment(args, runner, args.caches),
        "--skip-neighbor-stat",
    )
    return folder


def _command(program: str, args: argparse.Namespace, *words: str) -> str | None:
    """Run a command of a program, and return the end of what it says if it fails."""
    env = common.environment(args.threads, args.device)
    found = common.programs(args.peer)
    command = [
        *(found["ours"].command if program == "ours" else found["peer"].command[:1]),
        *words,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stderr[-2000:] if done.returncode else None


if __name__ == "__main__":
    main()
