"""The least time that the matrix products of a training step need on this machine, and where the rest of a step goes.

usage: python benchmarks/speed_bound.py FOLDER --steps N --threads N --device cpu|cuda [--times]

FOLDER holds an ``input.json`` of dp-ema. The run is assembled as `dp-ema train` does it, and steps are taken here. What
is found is printed as JSON; :mod:`speed` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import resource
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# positions of the two factors among the arguments
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, 1), "addmm": (1, 2),
            "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "mkldnn::_linear_pointwise": (0, 1)}  # fmt: skip
CLASSES = {
    "matmul": {*PRODUCTS, "matmul", "einsum", "tensordot", "_scaled_dot_product_flash_attention_for_cpu"},
    "index, scatter": {
        "gather", "index", "index_select", "index_put", "_index_put_impl", "index_add", "index_copy", "scatter",
        "scatter_add", "take", "take_along_dim", "sort", "argsort", "searchsorted", "bucketize", "embedding",
        "embedding_dense_backward", "nonzero", "masked_select", "masked_fill", "masked_scatter", "repeat_interleave",
        "segment_reduce", "where",
    },
    "reduction": {"sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "prod", "cumsum", "var",
                  "_foreach_norm", "all", "any", "_softmax", "_softmax_backward_data", "native_layer_norm"},
    "copy": {"copy", "clone", "contiguous", "cat", "stack", "to", "_to_copy", "empty", "empty_like", "empty_strided",
             "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "zero", "fill", "new_zeros", "new_empty",
             "slice_backward", "select_backward", "resize", "_foreach_copy", "repeat", "constant_pad_nd"},
    "view": {"view", "_unsafe_view", "reshape", "slice", "select", "transpose", "t", "permute", "expand", "expand_as",
             "as_strided", "unsqueeze", "squeeze", "detach", "alias", "split", "split_with_sizes", "narrow", "unbind",
             "chunk", "flatten", "unflatten", "view_as", "lift_fresh", "_reshape_alias"},
}  # fmt: skip
CLASS_OF = {name: kind for kind, names in CLASSES.items() for name in names}
POINTWISE, INTERPRETER = "pointwise", "python and autograd"
REGIONS = {"part: data": "loader", "part: averages": "averaging"}
SHOWN = [*CLASSES, POINTWISE, "optimizer", "averaging", "loader", INTERPRETER]
SQUARE = {"cpu": 1024, "cuda": 8192}  # size of the square product that gives the rate
STREAMED = 2**25  # numbers of each array by which the bandwidth is measured
TIMED_S = 0.005  # seconds for which a product is repeated
TURNS = 3


class Operations(TorchDispatchMode):
    """Counts the matrix products that torch carries out within it, and the bytes that all other operations touch.

    It is below autograd, so that the operations inside an ``autograd.Function`` are counted as well.

    Attributes:
        products: (batches, m, k, n), shapes and strides of the factors and their precision -> how often.
        num_bytes: read and written by operations that are neither products nor views.
        number: operations that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[Any, ...]] = Counter()
        self.num_bytes = self.number = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of all products; a multiplication and an addition are two."""
        return sum(2 * number * b * m * k * n for ((b, m, k, n), *_), number in self.products.items())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = _plain_name(function._schema.name)
        if name in PRODUCTS:
            first, second = (args[position] for position in PRODUCTS[name])
            self.products[_size(name, first, second), _layout(first), _layout(second), first.dtype] += 1
            self.number += 1
            return out
        given = {t.data_ptr(): t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}
        owned = {t.untyped_storage().data_ptr() for t in given.values()}
        fresh = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in fresh if t.untyped_storage().data_ptr() not in owned]
        if fresh or function._schema.is_mutable:
            self.number += 1
            self.num_bytes += sum(map(_bytes, (*given.values(), *fresh)))
        return out


def measure(folder: Path, steps: int, device: str, only_times: bool = False) -> dict[str, Any]:
    """Return the parts of a step of the run in ``folder``, and their times.

    Args:
        folder: with ``input.json``.
        steps: that are timed.
        device: on which they are taken.
        only_times: return ``step``, ``least``, ``launch``, ``kernels`` and ``memory`` alone, in less time.

    Returns:
        Seconds of a ``step``, of its products ``at_square_rate`` and, each shape measured alone, ``at_own_rates``;
        ``flops``, ``bytes``, ``operations``; ``shares`` of the time by class; ``top`` operations as (name, class,
        calls, seconds) of a step; ``kernels`` seconds on the device; ``memory`` in bytes.
    """
    from deepmd_ema.config import load_config
    from deepmd_ema.dist.launch import find_launch
    from deepmd_ema.dist.world import open_world
    from deepmd_ema.training.prepare import prepare
    from deepmd_ema.training.trainer import Trainer
    from deepmd_ema.training.weights import Start

    with working_in(folder):
        config, start = load_config("input.json"), Start()
        with open_world(device, find_launch()) as world:
            trainer = Trainer(prepare(config, start, world, skip_neighbor_stat=True), start, world)
            try:
                return _measured(trainer, steps, world.device, only_times)
            finally:
                trainer.tasks.close()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make ``folder`` the working directory, as ``contextlib.chdir`` of Python 3.11 does."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _measured(trainer: Any, steps: int, device: torch.device, only_times: bool) -> dict[str, Any]:
    for _ in range(3 + math.ceil(trainer.prepared.length.steps_per["epochs"])):
        trainer.advance()  # all neighbors are found, and kept from then on
    seconds, launch = zip(*(_timed(trainer.advance, device) for _ in range(max(3, steps))))
    times = {"step": statistics.median(seconds), "least": min(seconds), "launch": statistics.median(launch)}
    if only_times:
        has_kernels = ProfilerActivity.CUDA in torch.profiler.supported_activities()
        kernels = _profiled(trainer, steps, device)["kernels"] if has_kernels else math.nan
        return times | {"kernels": kernels, "memory": _peak_memory(device)}
    with Operations() as seen:
        if trainer.validator.models.compiler is None:  # compiled code does not show its operations
            trainer.advance()
    found = {
        **times,
        "flops": seen.flops,
        "bytes": seen.num_bytes,
        "operations": seen.number,
        **_profiled(trainer, steps, device),
    }
    found["memory"] = _peak_memory(device)  # before the arrays of the next lines
    precision = next(trainer.validator.models.parameters()).dtype
    rate, bandwidth = square_rate(precision, device), _bandwidth(precision, device)
    own = sum(number * _product_seconds(*product[1:], device) for product, number in seen.products.items())
    return found | {
        "rate": rate,
        "bandwidth": bandwidth,
        "at_square_rate": seen.flops / rate,
        "at_own_rates": own,
        "at_bandwidth": seen.num_bytes / bandwidth,
        "products": len(seen.products),
    }


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return the seconds of a call, with what it has launched, and without."""
    _wait(device)
    began = time.perf_counter()
    call()
    launched = time.perf_counter() - began
    _wait(device)
    return time.perf_counter() - began, launched


def _profiled(trainer: Any, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the shares of a step's time by class of operation, and the operations that take most of it."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    times, update = trainer.times, trainer.bank.update
    trainer.times = _Regions()
    trainer.bank.update = record_function("part: averages")(update)
    try:
        with profile(activities=activities) as profiled:
            began = time.perf_counter()
            for _ in range(steps):
                trainer.advance()
            _wait(device)
            wall = time.perf_counter() - began
    finally:
        trainer.times, trainer.bank.update = times, update
    spent: dict[str, float] = defaultdict(float)
    top: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    kernels = 0.0
    for event in profiled.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            kernels += event.self_device_time_total / 1e6
            continue
        kind, own = _class_of(event), event.self_cpu_time_total / 1e6
        spent[kind] += own
        entry = top[event.name.removeprefix("aten::"), kind]
        entry[0], entry[1] = entry[0] + 1 / steps, entry[1] + own / steps
    # the interpreter between the regions is in no event
    spent[INTERPRETER] += max(0.0, wall - sum(spent.values()))
    largest = sorted(top.items(), key=lambda item: -item[1][1])[:25]
    return {
        "profiled_step": wall / steps,
        "shares": {kind: spent[kind] / sum(spent.values()) for kind in SHOWN},
        "top": [[name, kind, round(calls, 1), seconds] for (name, kind), (calls, seconds) in largest],
        "kernels": kernels / steps,
    }


class _Regions:
    """Replaces the stopwatch of a trainer, and names the regions in the profile."""

    def of(self, name: str) -> record_function:
        return record_function(f"part: {name}")


def _class_of(event: Any) -> str:
    above = event
    while above is not None:
        if above.name in REGIONS:
            return REGIONS[above.name]
        if above.name.startswith("Optimizer."):
            return "optimizer"
        above = above.cpu_parent
    return CLASS_OF.get(_plain_name(event.name), POINTWISE if event.name.startswith("aten::") else INTERPRETER)


def _plain_name(name: str) -> str:
    """Return ``addmm`` for ``aten::addmm_``."""
    return name.removeprefix("aten::").removesuffix("_")


def _size(name: str, first: torch.Tensor, second: torch.Tensor) -> tuple[int, int, int, int]:
    """Return (b, m, k, n) of b products of (m, k) and (k, n)."""
    k = first.shape[-1]
    if name == "dot":
        return 1, 1, k, 1
    if name in ("mv", "addmv"):
        return 1, first.shape[0], k, 1
    if name in ("linear", "mkldnn::_linear_pointwise"):
        return 1, first.numel() // max(1, k), k, second.shape[0]
    return (first.shape[0] if first.ndim == 3 else 1), first.shape[-2], k, second.shape[-1]


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tuple(tensor.stride())


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def square_rate(precision: torch.dtype, device: torch.device) -> float:
    """Return the floating-point operations per second of a large square product."""
    size = SQUARE[device.type]
    return 2 * size**3 / _product_seconds(*[((size, size), (size, 1))] * 2, precision, device)


def _product_seconds(first: Any, second: Any, precision: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a product of factors with these shapes and strides."""
    a, b = (_made(*layout, precision, device) for layout in (first, second))
    if not a.numel() or not b.numel():
        return 0.0
    if b.ndim == 2 and a.shape[-1] != b.shape[0]:
        b = b.T  # `linear` has the weights the other way round

    def several(number: int) -> float:
        _wait(device)
        began = time.perf_counter()
        for _ in range(number):
            torch.matmul(a, b)
        _wait(device)
        return (time.perf_counter() - began) / number

    several(1)
    number = max(1, round(TIMED_S / max(several(1), 1e-7)))
    return min(several(number) for _ in range(TURNS))


def _made(shape: tuple[int, ...], stride: tuple[int, ...], precision: torch.dtype, device: torch.device) -> Any:
    length = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
    return torch.ones(length, dtype=precision, device=device).as_strided(shape, stride)


def _bandwidth(precision: torch.dtype, device: torch.device) -> float:
    """Return the bytes per second that an addition of arrays larger than the caches reads and writes."""
    a, b, c = (torch.ones(STREAMED, dtype=precision, device=device) for _ in range(3))
    seconds = min(_timed(lambda: torch.add(a, b, out=c), device)[0] for _ in range(TURNS + 1))
    return 3 * STREAMED * a.element_size() / seconds


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure the run of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--times", action="store_true", help="times and memory alone")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(args.threads)
    print(json.dumps(measure(args.folder, args.steps, args.device, args.times) | {"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
