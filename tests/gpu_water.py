"""Training steps of the models of the benchmarks on a CUDA device, with 192 atoms of water in a frame.

    python tests/gpu_water.py versions [--peer DIR]  # of the device and the packages
    python tests/gpu_water.py steps [KIND ...]       # time, kernels, memory, calls of the CUDA runtime

KIND is a name in benchmarks/models.json.
"""

import argparse
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import common
import speed_cases

from deepmd_ema import __version__
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

KINDS = ("se_e2_a", "se_atten, 2 layers", "dpa2", "dpa3")
IS_PRETENDED = torch.version.cuda is None  # which is as slow as a CPU: only few steps are tried
MEASURED = (("float32", 1), ("float32", 8), ("float64", 8))[: 1 if IS_PRETENDED else 3]  # precision, frames of a step
TIMED, PROFILED = (2, 1) if IS_PRETENDED else (20, 3)
WAYS = {"eager": {"cuda_graphs": False}, "CUDA graphs": {"cuda_graphs": True}}
CAPTURING = 24  # steps at least, until the shapes of all batches have been captured
PEER = "import deepmd, torch; print('DeePMD-kit', deepmd.__version__, 'with torch', torch.__version__)"


class Profile(Callback):
    """Times ``TIMED`` steps after the first ``epoch``, in which neighbors are found, and profiles the next ones."""

    def __init__(self, epoch):
        self.epoch, self.began, self.seconds, self.memory = epoch, 0.0, 0.0, 0
        self.profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())

    def after_step(self, trainer):
        number = trainer.step - self.epoch
        if number not in (0, TIMED, TIMED + PROFILED):
            return
        torch.cuda.synchronize()
        if number == 0:
            self.began = time.perf_counter()
        elif number == TIMED:
            self.seconds = (time.perf_counter() - self.began) / TIMED
            self.memory = torch.cuda.max_memory_allocated()
            self.profiler.start()
        else:
            self.profiler.stop()

    def calls(self):
        """Return the calls of the CUDA runtime by function and the seconds of the kernels, both of one step."""
        calls, seconds = Counter(), 0.0
        for event in self.profiler.key_averages():
            if re.fullmatch(r"cu(da)?[A-Z]\w+", event.key):
                calls[event.key] += event.count
            elif event.device_type == DeviceType.CUDA:
                seconds += event.self_device_time_total / 1e6
        return {name: number / PROFILED for name, number in calls.most_common()}, seconds / PROFILED


def train(kind, precision, batch, num_steps, work, options=(), **how):
    """Train in a folder of ``work``."""
    words = argparse.Namespace(kinds=[kind], precision=[precision], batch=[batch])
    args = argparse.Namespace(input=common.EXAMPLE / "input.json", data=None, work=work)
    (case,) = speed_cases.cases_of(words)
    config = speed_cases.input_of(case, args, numb_steps=num_steps, disp_freq=10**6, **dict(options))
    folder, before = work / case.file_name, Path.cwd()
    common.write_input(folder, config)
    os.chdir(folder)
    run_training("input.json", device="cuda", skip_neighbor_stat=True, **how)
    os.chdir(before)


def print_versions(peer):
    """Print the versions of the packages and of the driver, and the device, which fails if torch sees none."""
    cores = len(os.sched_getaffinity(0))
    print(f"- dp-ema {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN", end=" ")
    print(f"{torch.backends.cudnn.version()}, Python {platform.python_version()}, {cores} cores")
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
    for command in (smi, ["g++", "-dumpfullversion"], *([[f"{peer}/bin/python", "-c", PEER]] if peer else [])):
        if shutil.which(command[0]) is None:
            print(f"- {command[0]}: not found")
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stderr.splitlines()[-1:] if done.returncode else done.stdout.splitlines()
        print(f"- {command[0]}: {'; '.join(lines)}", flush=True)
    device = torch.cuda.get_device_properties(0)
    print(f"- device 0 of {torch.cuda.device_count()}: {device.name}, {device.total_memory / 2**30:.0f} GiB,", end=" ")
    print(f"compute capability {device.major}.{device.minor}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def print_steps(kinds):
    """Print a line for each model, precision, number of frames and way to launch a step."""
    print("| model | precision | frames | launched | step, ms | kernels, ms | memory, MB | calls of a step |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | --- |")
    for kind, (precision, frames), way in itertools.product(kinds, MEASURED, list(WAYS)[: 1 if IS_PRETENDED else 2]):
        profile = Profile(2 if IS_PRETENDED else max(CAPTURING, speed_cases.MAX_FRAMES // frames))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as work:
            num_steps = profile.epoch + TIMED + PROFILED + 1
            train(kind, precision, frames, num_steps, Path(work), WAYS[way], callback=profile)
        calls, seconds = profile.calls()
        listed = ", ".join(f"{name} {number:.4g}" for name, number in calls.items()) or "not seen by the profiler"
        numbers = f"{1e3 * profile.seconds:.2f} | {1e3 * seconds:.2f} | {profile.memory / 1e6:.0f}"
        print(f"| {kind} | {precision} | {frames} | {way} | {numbers} | {listed} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("versions", "steps"))
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--peer", help="virtual environment with DeePMD-kit")
    args = parser.parse_args()
    if args.what == "versions":
        print_versions(args.peer)
    else:
        print_steps(args.kinds)


if __name__ == "__main__":
    main()
