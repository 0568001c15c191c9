"""Training steps of dp-ema and DeePMD-kit on one device, in turns.

    python tests/gpu_speed.py --peer PYTHON [--kinds NAME ...] [--frames N ...] [--ways NAME ...]

All runs of a call are started at once, to use all cores while they begin or compile, and halted one
by one as soon as they have taken their first steps. Then one of them runs at a time, in turns. A
row is written after each turn. What has a result already is not measured again.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import common
import speed_cases
from gpu_results import Results, add_arguments, describe_machine
from speed_cases import Runner

COMPILED = {"training.enable_compile": True, "validating.compiled_infer": False}
WAYS = [
    Runner("eager", "dp-ema", True, {"training.cuda_graphs": False}),
    Runner("graphs", "dp-ema, CUDA graphs", True, {}),
    Runner("pt", "`dp --pt`", False, {}, "--pt"),
    Runner("pt_expt", "`dp --pt-expt`", False, {}, "--pt-expt"),
    Runner("compiled", "dp-ema, compiled", True, COMPILED),
    Runner(
        "compiled_graphs",
        "dp-ema, compiled, CUDA graphs",
        True,
        COMPILED | {"training.cuda_graphs": True},
    ),
    Runner(
        "pt_compiled", "`dp --pt`, compiled", False, {"model.use_compile": True}, "--pt"
    ),
    Runner(
        "pt_expt_compiled",
        "`dp --pt-expt`, compiled",
        False,
        {"training.enable_compile": True},
        "--pt-expt",
    ),
]
# DeePMD-kit 3.2.0: dpa4c has no `pt`, and there only dpa4 is compiled
MISSING = {("dpa4c", "pt"), ("dpa4c", "pt_compiled")}
PT_COMPILES = {"dpa4"}
MODEL_TYPES = {
    ("dpa4", "--pt"): {"model.type": "dpa4"}
}  # which `pt` does not infer from the descriptor
KINDS = ("se_e2_a", "dpa4c", "dpa3", "dpa4", "se_atten, 2 layers", "dpa2")
ROW_STEPS = {1: 10, 8: 5}  # steps between two rows of lcurve.out, by frames
FIRST_STEPS = 40  # of DeePMD-kit, before the first turn
# processes in which torch compiles kernels, of each run; a dozen runs compile at once
COMPILE_THREADS = 3
POLL_S = 0.01
MAX_ERROR = 600  # characters of a log that a row keeps


@dataclass
class Run:
    """A run that takes turns.

    Attributes:
        key: model, precision, frames of a step, way.
        first: the row of lcurve.out after which it is ready.
    """

    key: list
    way: Runner
    first: int
    halted: common.HaltedRun
    began: float
    begin: float = 0.0
    times: list = field(default_factory=list)


def main():
    """Measure what is missing, and return 1 if a run failed."""
    args = parse_arguments()
    results = Results(args.results, args.part)
    runs = start_all(args, results)
    try:
        ready = wait_for_all(runs, args, results)
        take_turns(ready, args, results)
    finally:
        for run in runs:
            run.halted.end()
    return int(
        any(
            row.get("error")
            for row in results.rows().values()
            if row["part"] == args.part
        )
    )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "speed")
    parser.add_argument(
        "--peer",
        help="python of an environment with DeePMD-kit; without it only dp-ema is measured",
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument(
        "--frames", nargs="+", type=int, default=[8, 1], help="of 192 atoms, in a step"
    )
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[w.name for w in WAYS],
        choices=[w.name for w in WAYS],
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn")
    parser.add_argument(
        "--wait", type=float, default=90.0, help="seconds that all runs have to begin"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--threads", type=int, default=4, help="of each run")
    parser.add_argument("--stat-batches", type=int, default=10)
    parser.add_argument(
        "--work", type=Path, default=common.RUNS, help="folder of the runs"
    )
    parser.add_argument(
        "--cache", type=Path, help="folder of compiled code; in --work if not given"
    )
    args = parser.parse_args()
    args.batch, args.input, args.data = args.frames, common.EXAMPLE / "input.json", None
    args.cache = (args.cache or args.work / "compiled").resolve()
    return args


def start_all(args, results):
    """Start the runs that have no result."""
    runs = []
    for case in speed_cases.cases_of(args):
        for way in WAYS:
            key = [case.name, case.precision, case.batch, way.name]
            cannot_compile = way.name == "pt_compiled" and case.name not in PT_COMPILES
            if (
                way.name not in args.ways
                or (case.name, way.name) in MISSING
                or cannot_compile
                or results.has(key)
            ):
                continue
            if way.ours or args.peer:
                runs.append(start(case, way, key, args))
    return runs


def start(case, way, key, args):
    """Start one run."""
    interval = ROW_STEPS.get(case.batch, 5) if args.device == "cuda" else 1
    config = speed_cases.input_of(case, args, disp_freq=interval)
    config["model"]["data_stat_nbatch"] = args.stat_batches
    config = speed_cases.with_options(
        config, MODEL_TYPES.get((case.name, way.backend), {})
    )
    # each way has a folder of its own for compiled code, which all models share
    config = speed_cases.runner_input(config, case, way, args.cache / way.name)
    env = speed_cases.runner_environment(args, way, args.cache / way.name)
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(COMPILE_THREADS)
    # dp-ema finds the neighbors of each frame once, and captures a step when its shape occurs for
    # the third time
    first = max(
        FIRST_STEPS, 3 * speed_cases.MAX_FRAMES // case.batch if way.ours else 0
    )
    first = first if args.device == "cuda" else 1
    program = common.Program(way.title, (), sys.executable if way.ours else args.peer)
    folder = args.work / "runs" / f"{case.file_name}-{way.name}"
    command = common.printing_memory(program, way.backend)
    return Run(
        key,
        way,
        first,
        common.HaltedRun.start(command, folder, config, env),
        time.perf_counter(),
    )


def wait_for_all(runs, args, results):
    """Halt each run when it has taken its first steps, and return those that have within the
    limit.
    """
    until = time.perf_counter() + args.wait
    waiting, ready = list(runs), []
    while waiting and time.perf_counter() < until:
        for run in list(waiting):
            halted = run.halted
            halted.size = common.note_rows(
                halted.folder / "lcurve.out", halted.size, halted.rows
            )
            if halted.process.poll() is not None:
                waiting.remove(run)
                results.add(run.key, error=last_lines(run), machine=describe_machine())
            elif max(halted.rows, default=0) >= run.first:
                halted.halt()
                run.begin = time.perf_counter() - run.began
                waiting.remove(run)
                ready.append(run)
        time.sleep(POLL_S)
    for run in waiting:
        reached = max(run.halted.rows, default=0)
        run.halted.end()
        error = f"{reached} of {run.first} steps within {args.wait:.0f} s. {last_lines(run)}"
        results.add(run.key, error=error, machine=describe_machine())
    return ready


def take_turns(runs, args, results):
    """Let one run continue at a time, and write its times after each turn."""
    machine = describe_machine()
    for turn in range(args.turns):
        for run in runs if turn % 2 else runs[::-1]:
            if turn > 0 and not run.times:
                continue  # its first turn failed
            try:
                run.times.append(run.halted.turn(args.seconds, args.wait))
            except (RuntimeError, TimeoutError) as error:
                run.times.clear()
                run.halted.end()
                reason = f"in turn {turn + 1}: {error} {last_lines(run)}"
                results.add(run.key, error=reason[-MAX_ERROR:], machine=machine)
                continue
            is_last = turn == args.turns - 1
            memory = run.halted.peak_memory(args.device) if is_last else 0
            if is_last:
                run.halted.end()
            results.add(
                run.key,
                ms=round(1e3 * statistics.median(run.times), 3),
                turns=[round(1e3 * seconds, 3) for seconds in run.times],
                memory=memory,
                begin=round(run.begin, 1),
                load=os.getloadavg()[0],
                machine=machine,
                **({} if is_last else {"unfinished": True}),
            )


def last_lines(run):
    """Return the end of the log of a run."""
    text = (run.halted.folder / "train.log").read_text(errors="replace").strip()
    return text[-MAX_ERROR:]


if __name__ == "__main__":
    sys.exit(main())
