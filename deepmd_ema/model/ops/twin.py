"""Kernels written by hand beside the same function in plain torch, and the one place where one of both is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

KERNELS: dict[str, Kernel[..., Any]] = {}
_BY_HAND, _PLAIN, _EXPORTED = "by_hand", "plain", "exported"
_kind: ContextVar[str] = ContextVar("kind", default=_BY_HAND)


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
        exported: runs inside ``exported_kernels``, without gradients by parameters and without ``reverse`` slots; the
            plain one if not given.
    """

    def __init__(
        self, name: str, by_hand: Callable[P, R], plain: Callable[P, R], exported: Callable[P, R] | None = None
    ) -> None:
        assert name not in KERNELS, name
        self.by_hand, self.plain, self.exported = by_hand, plain, exported or plain
        KERNELS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what both implementations return."""
        if torch.compiler.is_dynamo_compiling():  # asked first, because dynamo cannot trace a ContextVar
            return self.plain(*args, **kwargs)
        kind = _kind.get()
        if kind == _EXPORTED:
            return self.exported(*args, **kwargs)
        if kind == _PLAIN or torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        return self.by_hand(*args, **kwargs)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply``, but ``function.forward`` where no gradient is asked for; it must take no ``ctx``.

    torch reads the signature of such a function at each ``apply``, which takes longer than many a kernel.
    """

    def call(*args: Any) -> Any:
        return function.apply(*args) if torch.is_grad_enabled() else function.forward(*args)

    return call


def backward_pass() -> int:
    """Return a number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())


def kernels_by_hand() -> bool:
    """Whether kernels are those by hand: a part of a model may then compute its gradient with them itself."""
    return not torch.compiler.is_dynamo_compiling() and _kind.get() == _BY_HAND and not torch.compiler.is_compiling()


def plain_kernels() -> AbstractContextManager[None]:
    """Make every kernel the plain one within it, in this thread: for ``torch.func`` over a whole model, and tests."""
    return _within(_PLAIN)


def exported_kernels() -> AbstractContextManager[None]:
    """Make every kernel the exported one within it, in this thread: for graphs that are written to a file."""
    return _within(_EXPORTED)


@contextmanager
def _within(kind: str) -> Iterator[None]:
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)
