"""The first ten minutes with a GPU, in one command: what was never run on one, part by part, each with a limit.

usage: python benchmarks/gpu.py [--parts models steps ...] [--peer DIR] [--output PAGE]

- ``models``: values, parameter gradients and Hessians of every model of the tests beside those of the CPU.
- ``tests``: the other tests that are marked ``gpu``: restarts, waits, averages, optimizers, TF32, late copies.
- ``nccl``: ranks that exchange through NCCL, at every ``zero_stage``, and restarts between stages.
- ``steps``: steps with 1 and 32 frames: their time, that in which the host launches them, that of kernels, memory.
- ``graphs``: steps as CUDA graphs (``training.cuda_graphs``) beside eager ones.
- ``compile``: compiled steps beside eager ones.
- ``repeat``: whether two runs of 20 steps end with the same bits.
- ``pt2``: a frozen `.pt2` for the GPU, read back.
- ``largest`` and ``speed``: only if named: steps with more and more frames until the memory is full; speed.py on the
  GPU, beside DeePMD-kit if it is there.

Each part runs in processes of its own, which are killed at its limit; the next part runs. The page names what
failed. `python tests/pretend_cuda benchmarks/gpu.py` tries the program without a GPU; its times mean nothing then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import speed_cases

STEPS = 20  # of a run of the part `repeat`
KINDS = ["se_e2_a, 1.0 M parameters", "se_atten, 2 layers", "dpa2", "dpa3"]
BATCHES = [1, 32]  # frames per step
LOG_CHARS = 3000  # of the log of a command that fails
GRAPHS = {"training.cuda_graphs": True}


def main() -> None:
    """Run the parts, and print the page."""
    args = _arguments()
    args.work = args.work.resolve() / "gpu"
    args.work.mkdir(parents=True, exist_ok=True)
    texts = [f"# GPU, {common.today()}", _versions()]
    for name in args.parts:
        limit, run = PARTS[name]
        start = time.perf_counter()
        args.until = start + (args.limit or limit)
        try:
            text = run(args)
        except Exception as error:  # the other parts run all the same
            text = f"Failed: {type(error).__name__}: {error}"
        texts.append(f"## {name}\n\n{text}\n\n{time.perf_counter() - start:.0f} s.")
        print(texts[-1], flush=True)
    where = common.machine(common.programs(args.peer), args.threads, args.device)
    common.publish("\n\n".join([*texts, f"On {where}."]), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    named = [name for name in PARTS if name not in ("largest", "speed")]
    parser.add_argument("--parts", nargs="+", default=named, choices=list(PARTS))
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="models of the parts with steps")
    parser.add_argument("--frames", nargs="+", type=int, default=BATCHES, help="frames per step of the part steps")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds of each part, instead of its own limit")
    parser.set_defaults(device="cuda")
    return parser.parse_args()


def _versions() -> str:
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.device_count()} x {name}."


def _run(args: argparse.Namespace, words: list[object], log: str) -> str:
    """Return the output of a command, which is also kept in a file; the time left of the part is its limit.

    Raises:
        RuntimeError: with the end of its output, if it fails or does not end in time.
    """
    file = args.work / f"{log}.log"
    with file.open("w") as out:
        process = subprocess.Popen(
            list(map(str, words)), cwd=common.ROOT, env=common.environment(args.threads, args.device), stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(max(1.0, args.until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it has started
            code = process.wait()
            code = "none, killed at the limit"
    text = file.read_text()
    if code != 0:
        raise RuntimeError(f"exit code {code}, {file}:\n\n```\n{text[-LOG_CHARS:]}\n```")
    return text


def _tests(*words: str) -> Callable[[argparse.Namespace], str]:
    def run(args: argparse.Namespace) -> str:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rA", "-p", "no:cacheprovider", *words]
        try:
            lines, end = _run(args, command, f"tests-{len(words)}-{words[-1].replace(' ', '_')}").splitlines(), ""
        except RuntimeError as error:  # what has passed before is worth knowing as well
            lines, end = str(error).splitlines(), f"\n\n{error}"
        shown = [line for line in lines if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED"))]
        return "\n".join(f"- {line}" for line in [*shown, lines[-1]]) + end

    return run


def _steps(args: argparse.Namespace) -> str:
    """Time eager steps."""
    rows = [_row(args, case) for case in _cases(args, args.frames)]
    return common.table(["model, float32", "frames per step", *_COLUMNS], rows)


def _graphs(args: argparse.Namespace) -> str:
    """Time steps as CUDA graphs beside eager ones."""
    rows = []
    for case in _cases(args, args.frames[:1]):
        rows += [_row(args, case, "eager"), _row(args, case, "CUDA graph", GRAPHS)]
    return common.table(["model, float32", "frames per step", "steps", *_COLUMNS], rows)


def _largest(args: argparse.Namespace) -> str:
    """Take steps with more and more frames, until a process fails."""
    rows, ends = [], []
    for case in _cases(args, [1]):
        batch = 1
        while True:
            try:
                rows.append(_row(args, replace(case, batch=batch)))
            except RuntimeError as error:
                ends.append(f"- {case.name}, {batch} frames: {str(error).strip('` ').splitlines()[-1]}")
                break
            batch *= 2
    return "\n\n".join([common.table(["model, float32", "frames per step", *_COLUMNS], rows), "\n".join(ends)])


_COLUMNS = ["step, ms", "host, ms", "kernels, ms", "frames/s", "GB"]


def _cases(args: argparse.Namespace, batches: list[int]) -> Iterator[speed_cases.Case]:
    options = argparse.ArgumentParser()
    speed_cases.add_case_options(options)
    for batch in batches:
        words = ["--kinds", *args.kinds, "--precision", "float32", "--batch", str(batch)]
        yield from speed_cases.cases_of(options.parse_args(words))


def _row(args: argparse.Namespace, case: speed_cases.Case, label: str = "", options: Any = None) -> list[str]:
    config = speed_cases.input_of(case, args)
    config["model"]["data_stat_nbatch"] = 1
    folder = args.work / "steps" / (case.file_name + label.replace(" ", "_"))
    common.write_input(folder, speed_cases.with_options(config, {"training.enable_ema": True}, options or {}))
    program = Path(__file__).with_name("speed_bound.py")
    words = [sys.executable, program, folder, "--device", args.device, "--threads", args.threads, "--times"]
    lines = _run(args, words, f"steps-{folder.name}").splitlines()
    found = json.loads(next(line for line in lines if line.startswith("{")))
    times = [f"{1000 * found[name]:.2f}" for name in ("step", "launch", "kernels")]
    rate, memory = f"{case.batch / found['step']:.1f}", f"{found['memory'] / 1e9:.2f}"
    return [case.name, str(case.batch), *[label] * bool(label), *times, rate, memory]


def _repeat(args: argparse.Namespace) -> str:
    """Train twice, and compare the bits of the weights."""
    rows = []
    own = {"training.numb_steps": STEPS, "training.disp_freq": STEPS, "training.enable_ema": True, "training.seed": 1}
    for case in _cases(argparse.Namespace(**vars(args) | {"kinds": ["se_atten, 2 layers", "dpa2"]}), [1]):
        config = speed_cases.with_options(speed_cases.input_of(case, args), own)
        digests = []
        for turn in ("first", "second"):
            folder = args.work / "repeat" / f"{case.file_name}-{turn}"
            common.write_input(folder, config)
            _run(args, _command(folder, "train", "input.json"), f"repeat-{folder.name}")
            digests.append(_digest(folder))
        rows.append([case.name, "equal" if digests[0] == digests[1] else "differ", digests[0][:12]])
    return common.table(["model, float32", f"weights after {STEPS} steps of two runs", "SHA-256"], rows)


def _pt2(args: argparse.Namespace) -> str:
    """Freeze a model for the GPU, and evaluate it on the training data beside the checkpoint."""
    case = next(_cases(args, [1]))
    own = {"training.numb_steps": 2, "training.disp_freq": 1}
    config = speed_cases.with_options(speed_cases.input_of(case, args), own)
    folder = args.work / "pt2"
    common.write_input(folder, config)
    system = config["training"]["training_data"]["systems"][0]
    _run(args, _command(folder, "train", "input.json"), "pt2-train")
    frozen = _run(args, _command(folder, "freeze", "-c", ".", "-o", "m.pt2", "--device", args.device), "pt2-freeze")
    shown = [frozen.strip().splitlines()[-1]]
    for model in ("model.ckpt.pt", "m.pt2"):
        text = _run(args, _command(folder, "test", "-m", model, "-s", system, "-n", "2"), f"pt2-test-{model}")
        shown.append(f"{model}: {common.read_errors(text)}")
    return "\n".join(f"- {line}" for line in shown)


def _speed(args: argparse.Namespace) -> str:
    words = [sys.executable, "benchmarks/speed.py", "--device", args.device, "--threads", args.threads, "--work",
             args.work, "--output", args.work / "table.md", "--kinds", *args.kinds]  # fmt: skip
    programs = ["eager", "compiled", *["pt", "pt_expt"] * (args.peer is not None)]
    words += ["--programs", *programs, "--stage", "step", "bound", "start", "validation", "checkpoint"]
    words += ["--peer", args.peer] * (args.peer is not None)
    _run(args, words, "table")
    return (args.work / "table.md").read_text().replace("\n## ", "\n### ").replace("# Speed", "### Speed", 1)


def _command(folder: Path, *words: object) -> list[object]:
    """Return a command line that runs `dp-ema` in ``folder``."""
    code = f"import os, sys; os.chdir({str(folder)!r}); from deepmd_ema.cli import main; sys.exit(main(sys.argv[1:]))"
    return [sys.executable, "-c", code, *words]


def _digest(folder: Path) -> str:
    """Return the SHA-256 of the live and the averaged weights after the last step."""
    import torch

    found = hashlib.sha256()
    for name in ("model.ckpt", "model_ema.ckpt"):
        model = torch.load(folder / f"{name}-{STEPS}.pt", map_location="cpu", weights_only=True)["model"]
        for key, tensor in sorted(model.items()):
            found.update(key.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


MODELS = "tests/test_gpu_models.py"
# by name: limit in seconds, and what returns the text
PARTS: dict[str, tuple[float, Callable[[argparse.Namespace], str]]] = {
    "models": (60.0, _tests(MODELS)),
    "tests": (180.0, _tests("tests", f"--ignore={MODELS}", "-k", "not nccl and not compiled")),
    "nccl": (90.0, _tests("tests", "-k", "nccl")),
    "steps": (120.0, _steps),
    "graphs": (60.0, _graphs),
    "compile": (120.0, _tests("tests", "-k", "compiled")),
    "repeat": (60.0, _repeat),
    "pt2": (60.0, _pt2),
    "largest": (1800.0, _largest),
    "speed": (4 * 3600.0, _speed),
}


if __name__ == "__main__":
    main()
