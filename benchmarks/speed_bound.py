"""Matrix products of a training step of dp-ema, their time alone on this machine, and the number of operations.

usage: python benchmarks/speed_bound.py FOLDER --steps N --threads N --device cpu|cuda

FOLDER holds an ``input.json`` of dp-ema, which is trained. Its last steps are timed, and the operations of the one
before them are counted. Results are printed as JSON; :mod:`speed` makes a table of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepmd_ema.training.run import Callback, run_training

# positions of the two factors among the arguments
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, 1), "addmm": (1, 2),
            "baddbmm": (1, 2), "addmv": (1, 2), "addbmm": (1, 2), "mkldnn::_linear_pointwise": (0, 1)}  # fmt: skip
SQUARE = {"cpu": 1024, "cuda": 8192}  # size of the square product that gives the rate
TIMED_S = 0.005  # seconds for which a product is repeated
TURNS = 3


class Operations(TorchDispatchMode):
    """Counts the operations that torch carries out within it; below autograd, with those of the backward pass.

    Attributes:
        products: (batches, m, k, n), shapes and strides of the factors and their precision -> how often.
        number: operations that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[tuple[Any, ...]] = Counter()
        self.number = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of all products; a multiplication and an addition are two."""
        return sum(2 * number * b * m * k * n for ((b, m, k, n), *_), number in self.products.items())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::").removesuffix("_")
        if name in PRODUCTS:
            first, second = (args[position] for position in PRODUCTS[name])
            layouts = ((tuple(factor.shape), tuple(factor.stride())) for factor in (first, second))
            self.products[(_size(name, first, second), *layouts, first.dtype)] += 1
        tensors = (t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor))
        inputs = {t.untyped_storage().data_ptr() for t in tensors}
        outputs = (t.untyped_storage().data_ptr() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        self.number += function._schema.is_mutable or any(place not in inputs for place in outputs)
        return out


class Watch(Callback):
    """Counts the operations of a step and measures the seconds of the ``steps`` last ones."""

    def __init__(self, steps: int) -> None:
        self.steps, self.operations = steps, Operations()
        self.seconds: list[float] = []
        self.device, self.precision, self._began = torch.device("cpu"), torch.float64, 0.0

    def on_start(self, trainer: Any) -> None:
        """Note where the run computes."""
        self.device = trainer.world.device
        self.precision = next(trainer.prepared.models.parameters()).dtype

    def during(self, trainer: Any, phase: str) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        left = trainer.num_steps - trainer.step
        if phase != "step" or left > self.steps + 1:
            return nullcontext()
        return self.operations if left == self.steps + 1 else self._timed()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        _wait(self.device)
        self._began = time.perf_counter()
        yield

    def after_update(self, trainer: Any) -> None:
        """Note the time of a step before anything is shown or saved."""
        if self._began:
            _wait(self.device)
            self.seconds.append(time.perf_counter() - self._began)


def measure(folder: Path, steps: int, device: str) -> dict[str, Any]:
    """Return the parts of a step of the run in ``folder``, and their times.

    Returns:
        Seconds of a ``step``, of its products ``at_square_rate`` and, each shape measured alone, ``at_own_rates``;
        ``flops``, ``operations``; ``rate`` of a large square product, 1/s; ``memory`` in bytes.
    """
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_training("input.json", callback=(watch := Watch(steps)), device=device, skip_neighbor_stat=True)
    finally:
        os.chdir(before)
    where, size = watch.device, SQUARE[watch.device.type]
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = torch.cuda.max_memory_allocated() if where.type == "cuda" else memory
    square = ((size, size), (size, 1))
    rate = 2 * size**3 / _product_seconds(square, square, watch.precision, where)
    flops, products = watch.operations.flops, watch.operations.products
    own = sum(number * _product_seconds(*product[1:], where) for product, number in products.items())
    return {
        "step": statistics.median(watch.seconds),
        "flops": flops,
        "operations": watch.operations.number,
        "memory": memory,
        "rate": rate,
        "at_square_rate": flops / rate,
        "at_own_rates": own,
    }


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


def _product_seconds(first: Any, second: Any, precision: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a product of factors with these shapes and strides."""
    factors = []
    for shape, stride in (first, second):
        length = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
        if not length:
            return 0.0
        factors.append(torch.ones(length, dtype=precision, device=device).as_strided(shape, stride))
    a, b = factors
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
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(args.threads)
    print(json.dumps(measure(args.folder, args.steps, args.device) | {"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
