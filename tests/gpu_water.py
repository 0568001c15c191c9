"""Training steps of the models of the benchmarks on a CUDA device, with 192 atoms of water in a
frame.

    python tests/gpu_water.py versions [--peer PYTHON]  # of the device and the packages
    # of a step: time, number, limit of the card, by operation
    python tests/gpu_water.py kernels [--kinds KIND ...]
    python tests/gpu_water.py growth | inference | bits [--kinds KIND ...]

KIND is a name in benchmarks/models.json or speed.json. ``kernels`` compares the time of each
operation with what the card needs for it: the FLOPs of its products at the rate of the card in
their precision, or the bytes of its tensors at the bandwidth, whichever takes longer. Both are
measured first. ``growth`` continues until the memory is full. ``inference`` freezes a model to
.pt2, reads it back and compares it. ``bits``: TF32 and bfloat16.
"""

import argparse
import gc
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import common
import speed_cases
from gpu_results import Results, add_arguments, describe_machine

from deepmd_ema import __version__
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

KINDS = ("se_e2_a", "dpa4c", "dpa3", "dpa4", "se_atten, 2 layers", "dpa2")
IS_PRETENDED = (
    torch.version.cuda is None
)  # which is as slow as a CPU: only little is tried
TIMED, PROFILED = (2, 1) if IS_PRETENDED else (20, 3)
CAPTURING = 24  # steps at least, until the shapes of all batches have been captured
MAX_OPERATIONS = 12  # of a step, in a row
GROWING = (
    (192, 384)
    if IS_PRETENDED
    else (192, 768, 3072, 12288, 24576, 49152, 98304, 196608, 393216)
)
INFERRED = (192,) if IS_PRETENDED else (192, 1536, 12288)
SIDE = 256 if IS_PRETENDED else 8192  # of the matrices whose product is timed
COPIED = 1 << 20 if IS_PRETENDED else 1 << 30  # bytes
EAGER = {"training.cuda_graphs": False}
PRECISIONS = {  # ways to round the factors of products
    "float32": {},
    "TF32": {"training.enable_tf32": True},
    "bfloat16": {"model.descriptor.use_amp": True},  # of DPA-4 alone
}
PEER = (
    "import deepmd, torch; print('DeePMD-kit', deepmd.__version__, 'with "
    "torch', torch.__version__)"
)
# what the profiler calls operations by which others are done
SAME = dict.fromkeys(("_to_copy", "clone", "contiguous", "cat"), "copy_")
SAME |= dict.fromkeys(
    (
        "new_zeros",
        "zeros",
        "zeros_like",
        "zero_",
        "ones",
        "ones_like",
        "full",
        "full_like",
    ),
    "fill_",
)
SAME |= {"cat": "cat", "new_ones": "fill_", "scalar_tensor": "fill_"}
GATHERS = {
    "index",
    "index_select",
    "gather",
    "embedding",
}  # read no more than they write
NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
}


class Watch(Callback):
    """Times ``timed`` steps after the first ``epoch``, then profiles some, then counts FLOPs and
    bytes of one.

    Attributes:
        seconds: of a step.
        memory: the most bytes that torch had allocated.
        gradients: of the first step, float64 on the host, by name.
    """

    def __init__(self, epoch, timed=TIMED, profiled=0):
        self.epoch, self.timed, self.profiled = epoch, timed, profiled
        self.began = 0.0
        self.seconds = 0.0
        self.memory = 0
        self.gradients = {}
        self.limits = None
        self.profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities()
        )

    @property
    def num_steps(self):
        """Return the length of the run."""
        return self.epoch + self.timed + self.profiled + 2

    def after_update(self, trainer):
        if trainer.step == 1:
            named = trainer.prepared.models.named_parameters()
            self.gradients = {
                name: p.grad.double().cpu() for name, p in named if p.grad is not None
            }

    def after_step(self, trainer):
        number = trainer.step - self.epoch
        if number == 0:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        elif number == self.timed:
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - self.began) / self.timed
            self.memory = torch.cuda.max_memory_allocated()
            if self.profiled:
                self.profiler.start()
        elif self.profiled and number == self.timed + self.profiled:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.limits = Limits()
            self.limits.__enter__()
        elif self.profiled and number == self.timed + self.profiled + 1:
            self.limits.__exit__(None, None, None)

    def kernels(self):
        """Return the seconds of the kernels of a step, those by operation, their number, and the
        host's launches.
        """
        total, seconds, number, launches = 0.0, defaultdict(float), 0, 0
        for event in self.profiler.key_averages():
            if event.device_type == DeviceType.CUDA:
                number += event.count
                total += event.self_device_time_total / 1e6
            elif event.key in (
                "cudaLaunchKernel",
                "cuLaunchKernel",
                "cuLaunchKernelEx",
                "cudaLaunchKernelExC",
            ):
                launches += event.count
            elif event.self_device_time_total > 0:
                name = event.key.partition("::")[2] or event.key
                seconds[SAME.get(name, name)] += (
                    event.self_device_time_total / 1e6 / self.profiled
                )
        return (
            total / self.profiled,
            dict(seconds),
            number / self.profiled,
            launches / self.profiled,
        )


class Limits(TorchDispatchMode):
    """Adds up FLOPs of products and bytes of tensors of the operations below autograd, by operation
    and precision.
    """

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(list)  # name: (FLOPs, bytes, dtype) of each call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        name = schema.name.partition("::")[2]
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write
            for r in schema.returns
        )
        tensors = [
            t
            for t in torch.utils._pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.is_cuda
        ]
        if is_view or name in NO_KERNEL or not tensors:
            return result
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        inputs = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_cuda]
        if name in GATHERS:
            inputs = [*tensors[:1], *inputs[1:]]
        size = sum(
            min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
            for t in (*inputs, *tensors)
        )
        formula = flop_registry.get(function._overloadpacket)
        flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        self.calls[SAME.get(name, name)].append(
            (flops, size, str(tensors[0].dtype).removeprefix("torch."))
        )
        return result

    def seconds(self, ceilings):
        """Return the seconds that the card needs by operation."""
        found = {}
        for name, calls in self.calls.items():
            rates = (
                (flops / ceilings.get(dtype, ceilings["float32"]), size)
                for flops, size, dtype in calls
            )
            found[name] = sum(
                max(product, size / ceilings["bandwidth"]) for product, size in rates
            )
        return found


def case_of(kind, precision, frames, atoms=192):
    """Return a case of the benchmarks."""
    (case,) = speed_cases.cases_of(
        argparse.Namespace(kinds=[kind], precision=[precision], batch=[frames])
    )
    return case if atoms == 192 else replace(case, times=speed_cases.times_of(atoms))


def train(case, watch, options, work):
    """Train in a folder of ``work``, and return it."""
    args = argparse.Namespace(input=common.EXAMPLE / "input.json", data=None, work=work)
    num_steps = watch.num_steps if watch else 2
    config = speed_cases.input_of(case, args, numb_steps=num_steps, disp_freq=10**6)
    config["model"]["data_stat_nbatch"] = 1
    config = speed_cases.with_options(config, case.own, options)
    folder, before = work / "run", Path.cwd()
    common.write_input(folder, config)
    os.chdir(folder)
    try:
        run_training(
            "input.json",
            device="cuda",
            skip_neighbor_stat=True,
            **({"callback": watch} if watch else {}),
        )
    finally:
        os.chdir(before)
    return folder


def measure(results, key, function, again=False):
    """Add the row that ``function`` returns, or its error; return whether there is a result.

    Args:
        results: of all processes.
        key: of the row, which is not measured again unless ``again``.
        function: takes an empty folder.
        again: whether an older row is replaced.
    """
    if results.has(key) and not again:
        return True
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as work:
            values = function(Path(work))
    except Exception as error:  # the next one is measured
        values = {"error": f"{type(error).__name__}: {error}"[:600]}
    results.add(key, machine=describe_machine(), **values)
    return "error" not in values


def print_versions(args, results):
    """Print the versions of the packages and of the driver, and the device, which fails if torch
    sees none.
    """
    device = torch.cuda.get_device_properties(0)
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"device 0 of {torch.cuda.device_count()}: {device.name}, "
        f"{device.total_memory / 2**30:.0f} GiB, compute capability "
        f"{device.major}.{device.minor}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        f"dp-ema {__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
        f"{torch.backends.cudnn.version()}, Python {platform.python_version()}, {cores} cores",
    ]
    smi = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit",
        "--format=csv",
    ]
    for command in (
        smi,
        ["g++", "-dumpfullversion"],
        ["nvcc", "--version"],
        [args.peer or "", "-c", PEER],
    ):
        if shutil.which(command[0]) is None:
            lines.append(f"{command[0] or 'DeePMD-kit'}: not found")
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = (
            done.stderr.splitlines()[-1:]
            if done.returncode
            else done.stdout.splitlines()[-2:]
        )
        lines.append(f"{Path(command[0]).name}: {'; '.join(text)}")
    results.add(["versions"], lines=lines)


def measure_ceilings(results):
    """Return bytes/s of a copy and FLOP/s of products by precision."""
    if not results.has(["ceilings"]):
        source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        rates = {"bandwidth": 2 * COPIED / seconds_of(lambda: target.copy_(source))}
        del source, target
        for name in ("float32", "tf32", "float64", "bfloat16"):
            dtype = torch.float32 if name == "tf32" else getattr(torch, name)
            side = SIDE // 2 if name == "float64" else SIDE
            left, right = (
                torch.randn(side, side, device="cuda").to(dtype) for _ in range(2)
            )
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            rates[name] = (
                2 * side**3 / seconds_of(lambda left=left, right=right: left @ right)
            )
        torch.set_float32_matmul_precision("highest")
        results.add(["ceilings"], machine=describe_machine(), **rates)
    return results.rows()[(results.part, "ceilings")]


def seconds_of(function, repeats=10):
    """Return the seconds that a function takes on the device."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def measure_kernels(args, results):
    """Add the time of the kernels of a step, and what the card needs, for each model."""
    ceilings = measure_ceilings(results)

    def one(case, work):
        watch = Watch(
            2 if IS_PRETENDED else max(8, speed_cases.MAX_FRAMES // case.batch),
            profiled=PROFILED,
        )
        train(case, watch, EAGER, work)
        total, seconds, number, launches = watch.kernels()
        limits = watch.limits.seconds(ceilings)
        flops = sum(
            flops for calls in watch.limits.calls.values() for flops, _, _ in calls
        )
        size = sum(
            size for calls in watch.limits.calls.values() for _, size, _ in calls
        )
        order = sorted({*seconds, *limits}, key=lambda name: -seconds.get(name, 0.0))[
            :MAX_OPERATIONS
        ]
        operations = [
            [
                name,
                1e3 * seconds.get(name, 0.0),
                1e3 * limits.get(name, 0.0),
                len(watch.limits.calls.get(name, [])),
            ]
            for name in order
        ]
        return {
            "step_ms": 1e3 * watch.seconds,
            "kernels_ms": 1e3 * total,
            "limit_ms": 1e3 * sum(limits.values()),
            "kernels": number,
            "launches": launches,
            "gflops": flops / 1e9,
            "gbytes": size / 1e9,
            "memory": watch.memory,
            "operations": operations,  # name, ms of kernels, ms of the limit, calls
        }

    for kind, frames in itertools.product(args.kinds, (8,) if IS_PRETENDED else (8, 1)):
        measure(
            results,
            [kind, "float32", frames],
            lambda work, c=(kind, "float32", frames): one(case_of(*c), work),
        )


def measure_growth(args, results):
    """Add time and memory of a step against the atoms of a frame, until the memory is full."""

    def one(case, work):
        is_large = case.atoms > 3072
        watch = Watch(
            8 if is_large else CAPTURING, timed=3 if is_large or IS_PRETENDED else 10
        )
        try:
            train(case, watch, EAGER if is_large else {}, work)
        except torch.cuda.OutOfMemoryError as error:
            return {"full": str(error).splitlines()[0][:200]}
        way = "eager" if is_large else "CUDA graphs"
        size = watch.memory
        return {
            "ms": 1e3 * watch.seconds,
            "memory": size,
            "bytes_per_atom": size / case.atoms,
            "way": way,
        }

    for kind in args.kinds:
        for atoms in GROWING:
            key = [kind, "float32", atoms]
            measure(
                results,
                key,
                lambda work, kind=kind, n=atoms: one(
                    case_of(kind, "float32", 1, n), work
                ),
            )
            if "ms" not in results.rows()[("growth", *key)]:
                break


def measure_inference(args, results):
    """Add the time of energies and forces by a checkpoint and by the .pt2 that is frozen of it."""

    def one(kind, work):
        folder = train(case_of(kind, "float32", 1), None, EAGER, work)
        checkpoint, compiled = folder / "model.ckpt.pt", folder / "model.pt2"
        began = time.perf_counter()
        freeze(load_model(checkpoint), compiled, device="cuda")
        values = {
            "freeze_s": time.perf_counter() - began,
            "mb": compiled.stat().st_size / 1e6,
        }
        potentials = {
            name: Potential(file, device="cuda")
            for name, file in (("eager", checkpoint), ("pt2", compiled))
        }
        for atoms in INFERRED:
            frame = frame_of(atoms, work)
            found = {
                name: potential.evaluate(*frame)
                for name, potential in potentials.items()
            }
            error = abs(found["pt2"].force - found["eager"].force).max()
            values[f"force_error_{atoms}"] = float(
                error / abs(found["eager"].force).max()
            )
            for name, potential in potentials.items():
                seconds = seconds_of(
                    lambda potential=potential, frame=frame: potential.evaluate(*frame),
                    repeats=5,
                )
                values[f"{name}_ms_{atoms}"] = 1e3 * seconds
        return values

    for kind in args.kinds:
        measure(results, [kind, "float32"], lambda work, kind=kind: one(kind, work))


def frame_of(atoms, work):
    """Return coordinates, types and cell of a frame of water."""
    import numpy as np

    source = common.read_input(common.EXAMPLE / "input.json", None)["training"][
        "training_data"
    ]["systems"][0]
    system = speed_cases.system_of(source, speed_cases.times_of(atoms), work)
    coord, box = (
        np.load(system / "set.000" / f"{name}.npy")[0] for name in ("coord", "box")
    )
    return (
        coord.reshape(-1, 3),
        np.loadtxt(system / "type.raw", dtype=int),
        box.reshape(3, 3),
    )


def measure_bits(args, results):
    """Add the time of steps with products of fewer bits, and the error of their gradient beside
    float32's.
    """

    def one(case, options, exact, work):
        first = Watch(1, timed=1)
        train(case, first, EAGER | options, work)
        if not exact:
            exact.update(first.gradients)
        difference = sum(
            float((g - exact[name]).square().sum())
            for name, g in first.gradients.items()
        )
        norm = sum(float(g.square().sum()) for g in exact.values())
        timed = Watch(2 if IS_PRETENDED else CAPTURING)
        train(case, timed, options, work)
        error = (difference / norm) ** 0.5
        return {
            "ms": 1e3 * timed.seconds,
            "memory": timed.memory,
            "gradient_error": error,
        }

    for kind in args.kinds:
        names = [
            name for name in PRECISIONS if name != "bfloat16" or kind.startswith("dpa4")
        ]
        if all(results.has([kind, name]) for name in names):
            continue
        # gradients in float32, which the others are compared with: all rows are measured together
        exact = {}
        for name in names:
            options = dict(PRECISIONS[name])
            if kind == "dpa4":  # whose default is bfloat16
                options.setdefault("model.descriptor.use_amp", False)
            case = case_of(kind, "float32", 8)
            measure(
                results,
                [kind, name],
                lambda work, c=case, o=options, e=exact: one(c, o, e, work),
                again=True,
            )


WHAT = {
    "versions": print_versions,
    "kernels": measure_kernels,
    "growth": measure_growth,
    "inference": measure_inference,
    "bits": measure_bits,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--peer", help="python of an environment with DeePMD-kit")
    add_arguments(parser, None)
    args = parser.parse_args()
    results = Results(args.results, args.part or args.what)
    WHAT[args.what](args, results)
    return int(
        any(
            row.get("error")
            for row in results.rows().values()
            if row["part"] == results.part
        )
    )


if __name__ == "__main__":
    sys.exit(main())
