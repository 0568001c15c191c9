"""What many processes have to agree on; for one process, everything is already agreed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from deepmd_ema.runtime import Runtime


class Strategy:
    """How a model is spread over the processes of a run: here, over one process.

    Args:
        runtime: device, rank and number of processes.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def chief(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.runtime.chief

    def barrier(self) -> None:
        """Wait until every process is here. Every rank must call this."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over all processes. Every rank must call this."""
        return tensor

    def agree(self, ok: bool) -> bool:
        """Return whether ``ok`` holds on every process. Every rank must call this."""
        return ok


def make_strategy(runtime: Runtime, zero_stage: int) -> Strategy:
    """Return the strategy of this run.

    Raises:
        UserError: if ``zero_stage`` needs more processes than there are, or there are more than one.
    """
    if runtime.world_size > 1:
        raise UserError(
            f"started as {runtime.world_size} processes (WORLD_SIZE), but this version trains in one process. "
            "Start dp-ema train without torchrun."
        )
    if zero_stage > 0:
        raise UserError(
            f"training.zero_stage = {zero_stage}: sharding needs several processes, and this run has one. "
            "Use training.zero_stage 0."
        )
    return Strategy(runtime)
