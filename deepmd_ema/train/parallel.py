"""How many processes a run may have: one, so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepmd_ema.errors import UserError

if TYPE_CHECKING:
    from deepmd_ema.runtime import Runtime


def refuse_several_processes(runtime: Runtime, zero_stage: int) -> None:
    """Check that the run is one process that holds everything.

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
