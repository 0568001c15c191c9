"""Loading torch, which takes most of the time until a command begins its work."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# Libraries that `import torch` loads first, in this order. No library that uses Python is here,
# because the lock of Python is not held.
_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_GLOBAL),
    ("libtorch.so", os.RTLD_LOCAL),
)


@contextmanager
def loading() -> Iterator[None]:
    """Import in the body without garbage collection, a sixth of the time of importing torch.

    Later collections skip the imported objects too, so that those during training and at the end of
    the process take less time. Does nothing where torch is loaded already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def libraries_of_torch() -> Iterator[None]:
    """Load the libraries of torch in a thread while the body runs, and wait for them at its end.

    They take a fifth of the time of importing torch, and need no Python. Where they are not found,
    importing torch says so in its own words.
    """
    thread = threading.Thread(target=_load, name="dp-ema-libraries", daemon=True)
    if sys.platform == "linux" and "torch" not in sys.modules:
        thread.start()
    try:
        yield
    finally:
        if thread.ident is not None:
            thread.join()


def _load() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    # unlike the constructor of CDLL, dlopen is called without the lock of Python
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    dlopen.restype = ctypes.c_void_p
    for name, scope in _LIBRARIES:
        path = os.path.join(os.path.dirname(spec.origin), "lib", name)
        if not dlopen(os.fsencode(path), os.RTLD_NOW | scope):
            return
