"""A pretended CUDA device: code for GPUs runs on a machine without one, and what a GPU does not
forgive is an error.

    # any module or script, and all processes it starts
    python tests/pretend_cuda -m pytest -m gpu
    python tests/pretend_cuda -m deepmd_ema train input.json

It needs a torch without CUDA and g++. ``device.cpp`` registers for the dispatch key CUDA an
allocator, a device guard, page-locked memory, and for every operation the kernel of the CPU on the
same memory; ``collectives.cpp`` is NCCL by gloo. So ``torch.device("cuda")``,
``torch.cuda.is_available()`` and the threads in which autograd runs the backward pass of a device
are as on a GPU, with real numbers. Errors are:

- operations that mix devices (numbers of the host are allowed where torch allows them);
- a copy to page-locked memory that is read before its event was waited for: until then it holds
  nan;
- uninitialised memory of the device: it holds nan;
- tensors of the host in a collective of NCCL;
- waits within ``torch.cuda.set_sync_debug_mode("error")``.

:func:`counted_waits` counts waits with the line that waited. What it cannot show: rounding and
atomic additions of CUDA kernels, TF32, streams and races between them, Triton, CUDA graphs,
AOTInductor, NCCL itself.

The environment variable PRETEND_CUDA_DEVICES is the number of devices, 2 by default; with 1 it is
as if a launcher shows each process one GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LIBRARY = "PRETEND_CUDA_LIBRARY"  # environment variable that names the built extension
DEVICES = "PRETEND_CUDA_DEVICES"
MODULE = "pretend_cuda_device"
TOTAL_MEMORY = 80 << 30

device: Any = None  # the extension, once it is loaded
_places: Counter[tuple[str, str]] = Counter()


def is_active() -> bool:
    """Whether CUDA of this process is the pretended one."""
    return device is not None


@contextmanager
def counted_waits():
    """Count the waits within; gives an object with ``waits`` by operation and ``places`` by
    (operation, lines).
    """
    found = SimpleNamespace(waits={}, places={})
    _places.clear()
    device.count_waits(True, _note_wait)
    try:
        yield found
    finally:
        device.count_waits(False, None)
        found.waits, found.places = device.waits(), dict(_places)


def _note_wait(name: str) -> None:
    own = [
        f
        for f in traceback.extract_stack()
        if f"{os.sep}deepmd_ema{os.sep}" in f.filename
    ]
    lines = " < ".join(
        f"{Path(f.filename).name}:{f.lineno}" for f in reversed(own[-3:])
    )
    _places[name, lines or "a thread of autograd or of torch"] += 1


def install() -> None:
    """Have torch start with the pretended device when it is imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch" or is_active():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads torch, which looks once, while it is imported, whether there is CUDA."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        folder = Path(module.__spec__.origin).parent / "lib"
        for library in ("c10", "torch_cpu", "torch", "torch_python"):
            ctypes.CDLL(str(folder / f"lib{library}.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(os.environ[LIBRARY])
        self._inner.exec_module(module)
        _activate(module)

    def __getattr__(
        self, name: str
    ) -> Any:  # of the loader of source files, for tracebacks
        return getattr(self._inner, name)


def _activate(torch: ModuleType) -> None:
    global device
    spec = importlib.util.spec_from_file_location(MODULE, os.environ[LIBRARY])
    loaded = importlib.util.module_from_spec(spec)
    before = os.dup(
        2
    )  # torch warns of each kernel that is registered a second time, in C++
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        spec.loader.exec_module(loaded)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
    device = loaded
    number = int(os.environ.get(DEVICES, "2"))
    device.set_num_devices(number)
    _replace_functions(torch, number)
    _replace_nccl(torch)


def _index(of: Any = None) -> int:
    import torch

    if isinstance(of, int):
        return of
    index = None if of is None else torch.device(of).index
    return device.current_device() if index is None else index


class Event:
    """An event of the only stream; waiting for it completes the copies that were enqueued
    before.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._enqueued: int | None = None

    def record(self, stream: Any = None) -> None:
        self._enqueued = device.enqueued_copies()

    def synchronize(self) -> None:
        if self._enqueued is not None:
            device.complete_copies(self._enqueued)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    """The only stream of a device."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        import torch

        self.device = torch.device("cuda", _index(device))
        self.device_index, self.stream_id, self.cuda_stream = self.device.index, 0, 0

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        device.synchronize()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device == self.device

    def __hash__(self) -> int:
        return hash(self.device)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _DeviceContext:
    def __init__(self, of: Any) -> None:
        self.idx = _index(of)

    def __enter__(self) -> None:
        self._before = _exchange(self.idx)

    def __exit__(self, *_: object) -> None:
        device.set_device(self._before)


def _exchange(index: int) -> int:
    before = device.current_device()
    device.set_device(index)
    return before


def _replace_functions(torch: ModuleType, number: int) -> None:
    """Replace the functions of ``torch.cuda`` that call a driver."""
    mode = {"sync": "default"}

    def set_sync_debug_mode(name: str | int) -> None:
        mode["sync"] = name
        device.make_waits_errors(name in ("error", 2))

    @contextmanager
    def stream_context(stream: Stream):
        yield stream

    properties = SimpleNamespace(
        name="pretended GPU",
        major=9,
        minor=0,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
        L2_cache_size=50 << 20,
    )
    functions = {
        "is_available": lambda: True,
        "device_count": lambda: number,
        "current_device": lambda: device.current_device(),
        "set_device": lambda of: device.set_device(_index(of)),
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "synchronize": lambda of=None: device.synchronize(),
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda of=None: Stream(of),
        "default_stream": lambda of=None: Stream(of),
        "stream": stream_context,
        "set_stream": lambda stream: None,
        "device": _DeviceContext,
        # torch.compile takes a function of its own for each
        "_exchange_device": _exchange,
        "_maybe_exchange_device": lambda index: _exchange(index),
        "empty_cache": lambda: None,
        "get_device_name": lambda of=None: properties.name,
        "get_device_properties": lambda of=None: properties,
        "get_device_capability": lambda of=None: (9, 0),
        "memory_stats": lambda of=None: {},
        "memory_allocated": lambda of=None: device.allocated(),
        "memory_reserved": lambda of=None: device.allocated(),
        "max_memory_allocated": lambda of=None: device.most_allocated(),
        "reset_peak_memory_stats": lambda of=None: device.reset_most_allocated(),
        "mem_get_info": lambda of=None: (
            TOTAL_MEMORY - device.allocated(),
            TOTAL_MEMORY,
        ),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: mode["sync"],
        "_is_in_bad_fork": lambda: False,
        "_is_compiled": lambda: True,
        "manual_seed_all": lambda seed: None,
        "manual_seed": lambda seed: None,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda of=None: torch.get_rng_state(),
        "set_rng_state": lambda state, of=None: None,
        "get_rng_state_all": list,
        "set_rng_state_all": lambda states: None,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.accelerator.current_stream = lambda of=None: Stream(
        of
    )  # FSDP has it wait for an event
    torch.cuda.memory.max_memory_allocated = functions["max_memory_allocated"]
    torch._C._cuda_getCurrentRawStream = lambda of: 0
    torch._C._nccl_version, torch._C._nccl_version_suffix = lambda: 22907, lambda: b""
    resize = torch.UntypedStorage.resize_  # FSDP frees gathered weights with it

    def resize_storage(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(self, size)
        return self

    torch.UntypedStorage.resize_ = resize_storage


def _replace_nccl(torch: ModuleType) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    class Kind(type):
        def __instancecheck__(cls, found: Any) -> bool:
            return getattr(found, "name", lambda: "")() == "nccl"

    class ProcessGroupNCCL(metaclass=Kind):
        class Options:
            def __init__(self, *_: Any, **__: Any) -> None:
                self._timeout, self.is_high_priority_stream = (
                    c10d.default_pg_timeout,
                    False,
                )
                self.global_ranks_in_group, self.group_name = [], ""

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
            return device.nccl(
                dist.ProcessGroupGloo(dist.PrefixStore("pretended", store), rank, size)
            )

    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
