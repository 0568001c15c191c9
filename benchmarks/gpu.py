"""Everything that needs a GPU, in one call: tests, NCCL, times of steps, host and kernel time, the largest batch.

usage: python benchmarks/gpu.py [--peer DIR] [--parts tests zero table batch] [--output PAGE]

- ``tests``: the tests of the suite that are marked ``gpu``.
- ``zero``: torchrun with one process at every ``zero_stage``, through NCCL; the largest difference of the weights to
  those of stage 0.
- ``table``: speed.py on the GPU, eager and compiled, beside DeePMD-kit if it is there.
- ``batch``: steps with 1, 2, 4, ... frames until the memory is full: seconds of a step, those in which the host
  launches it, those of its kernels, and memory.

Each part runs in processes of its own; one that fails is named on the page and does not stop the others. With
--device cpu all of it runs on a small scale where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import common
import speed_cases

PARTS = ("tests", "zero", "table", "batch")
STEPS = 20  # of a run of the part zero
HOURS = 3600.0
KINDS = ["se_e2_a, 1.0 M parameters", "se_atten, 2 layers", "dpa2", "dpa3"]  # of the part batch


def main() -> None:
    """Run the parts, and print the page."""
    args = _arguments()
    args.work = args.work.resolve() / "gpu"
    args.work.mkdir(parents=True, exist_ok=True)
    texts = {}
    for part in args.parts:
        start = time.perf_counter()
        try:
            text = {"tests": _tests, "zero": _zero, "table": _table, "batch": _batch}[part](args)
        except Exception as error:  # the other parts are to run all the same
            text = f"Failed: {type(error).__name__}: {error}"
        texts[part] = f"## {part.capitalize()}\n\n{text}\n\n{time.perf_counter() - start:.0f} s."
        print(texts[part], flush=True)
    where = common.machine(common.programs(args.peer), args.threads, args.device)
    common.publish("\n\n".join([f"# GPU, {common.today()}", *texts.values(), f"On {where}."]), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--kinds", nargs="+", help="models of the parts table and batch")
    parser.add_argument("--largest", type=int, help="frames per step with which the part batch ends")
    parser.set_defaults(device="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        args.kinds, args.largest = args.kinds or ["se_e2_a, 96 atoms"], args.largest or 2
    return args


def _run(args: argparse.Namespace, words: list[object], log: str, hours: float = 1.0) -> str:
    """Return the output of a command, which is also kept in a file.

    Raises:
        RuntimeError: with the end of it, if it fails.
    """
    env = common.environment(args.threads, args.device)
    file = args.work / f"{log}.log"
    with file.open("w") as out:
        done = subprocess.run(
            list(map(str, words)), cwd=common.ROOT, env=env, stdout=out, stderr=subprocess.STDOUT,
            timeout=hours * HOURS, check=False,
        )  # fmt: skip
    text = file.read_text()
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}, {file}:\n\n```\n{text[-3000:]}\n```")
    return text


def _tests(args: argparse.Namespace) -> str:
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "-p", "no:cacheprovider", "tests"]
    lines = _run(args, words, "tests").splitlines()
    results = [line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))]
    return "\n".join(f"- {line}" for line in [*results, lines[-1]])


def _zero(args: argparse.Namespace) -> str:
    """Train at every stage with one process, and compare the weights."""
    import torch

    config = common.bare(common.with_numeric_sel(common.read_input(args.input, args.data)))
    rows, weights = [], {}
    for stage in range(4):
        folder = args.work / f"zero-{stage}"
        own = {"numb_steps": STEPS, "disp_freq": STEPS, "enable_ema": True, "zero_stage": stage}
        common.write_input(folder, config | {"training": config["training"] | own})
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
        child = f"import os, sys; os.chdir({str(folder)!r}); from deepmd_ema.cli import main; sys.exit(main())"
        file = folder / "run.py"
        file.write_text(child + "\n")
        _run(args, [sys.executable, *launch, file, "train", "input.json"], f"zero-{stage}")
        loaded = [torch.load(folder / f"{name}-{STEPS}.pt", map_location="cpu", weights_only=True)["model"]
                  for name in ("model.ckpt", "model_ema.ckpt")]  # fmt: skip
        weights[stage] = [tensor.double() for model in loaded for tensor in model.values()]
        difference = max(float((a - b).abs().max()) for a, b in zip(weights[0], weights[stage]) if a.numel())
        rows.append([str(stage), f"{difference:.1e}"])
    return common.table(["zero_stage", "largest difference of live and averaged weights to stage 0"], rows)


def _table(args: argparse.Namespace) -> str:
    words = [sys.executable, "benchmarks/speed.py", "--device", args.device, "--threads", args.threads, "--work",
             args.work, "--output", args.work / "table.md"]  # fmt: skip
    words += ["--peer", args.peer] * (args.peer is not None)
    if args.device == "cpu":
        words += ["--quick", "--stage", "step", "bound"]
    else:
        programs = ["eager", "compiled", *["pt", "pt_expt"] * (args.peer is not None)]
        words += ["--programs", *programs, "--stage", "step", "bound", "start", "validation", "checkpoint"]
        words += ["--kinds", *args.kinds] if args.kinds else []
    _run(args, words, "table", hours=4.0)
    return (args.work / "table.md").read_text().replace("\n## ", "\n### ").replace("# Speed", "### Speed", 1)


def _batch(args: argparse.Namespace) -> str:
    """Take steps with more and more frames, until a process fails."""
    options = argparse.ArgumentParser()
    speed_cases.add_case_options(options)
    chosen = options.parse_args(["--kinds", *(args.kinds or KINDS), "--precision", "float32", "--batch", "1"])
    rows, ends = [], []
    for case in speed_cases.cases_of(chosen):
        batch = 1
        while batch <= (args.largest or 2**20):
            config = speed_cases.input_of(replace(case, batch=batch), args)
            config["model"]["data_stat_nbatch"] = 1
            folder = args.work / "batch" / case.file_name / str(batch)
            common.write_input(folder, speed_cases.with_options(config, {"training.enable_ema": True}))
            words = [sys.executable, Path(__file__).with_name("speed_bound.py"), folder, "--device", args.device,
                     "--threads", args.threads]  # fmt: skip
            try:
                lines = _run(args, words, f"batch-{case.file_name}-{batch}").splitlines()
                found = json.loads(next(line for line in lines if line.startswith("{")))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                ends.append(f"- {case.name}, {batch} frames: {str(error).strip('` ').splitlines()[-1]}")
                break
            times = [f"{1000 * found[name]:.1f}" for name in ("step", "launch", "kernels")]
            memory = f"{found['memory'] / 1e9:.2f}"
            rows.append([case.name, str(batch), *times, f"{batch / found['step']:.1f}", memory])
            batch *= 2
    header = ["model, float32", "frames per step", "step, ms", "host, ms", "kernels, ms", "frames/s", "GB"]
    return "\n\n".join([common.table(header, rows), "\n".join(ends)])


if __name__ == "__main__":
    main()
