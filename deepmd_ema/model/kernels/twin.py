"""Kernels written by hand beside the same function in plain torch, and the one place where one of both is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

KERNELS: dict[str, Kernel[..., Any]] = {}
_plain_only: ContextVar[bool] = ContextVar("plain_only", default=False)


class Kernel(Generic[P, R]):
    """A function with two implementations of equal values and parameter gradients.

    By hand it works in place, in portions, or with a backward pass of its own: what eager execution needs to be fast.
    The plain one has only operations that return new tensors, which ``torch.compile`` traces and fuses and
    ``torch.func.vjp`` differentiates. `torch.autograd.Function` cannot serve both: inside ``torch.func.vjp`` inside
    ``torch.compile`` its gradients are wrong without an error (torch 2.13), and ``torch.library.custom_op`` refuses
    ``torch.func`` altogether (decision 0010).

    Args:
        name: for the registry ``KERNELS``, over which the law that both agree is tested.
        by_hand: runs in eager mode.
        plain: runs under ``torch.compile`` and inside ``plain_kernels``.
    """

    def __init__(self, name: str, by_hand: Callable[P, R], plain: Callable[P, R]) -> None:
        assert name not in KERNELS, name
        self.by_hand, self.plain = by_hand, plain
        KERNELS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what both implementations return."""
        if torch.compiler.is_compiling() or _plain_only.get():
            return self.plain(*args, **kwargs)
        return self.by_hand(*args, **kwargs)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Make every kernel the plain one within it, in this thread: for ``torch.func`` over a whole model, and tests."""
    token = _plain_only.set(True)
    try:
        yield
    finally:
        _plain_only.reset(token)
