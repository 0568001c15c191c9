"""Writers of model files: gathered, each a file of rank 0, or sharded, each a folder of files of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepmd_ema.checkpoint import save, save_sharded
from deepmd_ema.config.outputs import GATHERED_SUFFIX, SHARDED_SUFFIX
from deepmd_ema.dist.world import World


@dataclass(frozen=True)
class Store:
    """Writes gathered files; called on one rank.

    Attributes:
        suffix: end of their names.
        world: the processes that write together.
    """

    suffix: str = GATHERED_SUFFIX
    world: World = field(default_factory=World)

    def save(self, path: Path, payload: Mapping[str, Any], fallback: Path | None = None) -> None:
        """Write one file whole, or leave what is there.

        Args:
            path: the file.
            payload: its content.
            fallback: an older checkpoint, named in the message when the writing fails.

        Raises:
            CheckpointError: if it cannot be written.
        """
        save(path, payload, fallback)

    def on_rank0(self, change: Callable[[], None]) -> None:
        """Have one rank change names of files, and end all that write together if it fails."""
        with self.world.all_ranks_ok():
            if self.world.is_main:
                change()


@dataclass(frozen=True)
class ShardedStore(Store):
    """Writes sharded checkpoints. Every rank must call each method, in one thread and in the same order.

    Attributes:
        suffix: end of their names.
        world: the processes that write together, from :meth:`World.for_writer`.
    """

    suffix: str = SHARDED_SUFFIX

    def save(self, path: Path, payload: Mapping[str, Any], fallback: Path | None = None) -> None:
        """Write one folder whole, or leave what is there."""
        save_sharded(path, payload, self.world, fallback)


GATHERED = Store()
