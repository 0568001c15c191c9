"""A run that starts from its seed, and the methods in which runs that start from a file differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from deepmd_ema.config import RunConfig, to_dict
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.version import __version__


class Start:
    """A new run: weights come from the seed, statistics from the data.

    Subclasses start from a file. All differences between the ways to start are methods here.
    """

    validates_before: ClassVar[bool] = False  # whether errors are measured before the first step: of weights of a file

    @property
    def step(self) -> int:
        """Optimizer steps done before the start."""
        return 0

    @property
    def interpolation(self) -> Mapping[str, Any] | None:
        """State of the interpolated networks of the run that is continued, or None."""
        return None

    def model_section(self, given: Any) -> Any:
        """Return the section ``model`` of the file, in place of that of the input.

        Args:
            given: the section in the input, right or wrong.

        Raises:
            ConfigError: if the run does not start from a file.
        """
        raise ConfigError(
            "--use-pretrain-script: takes the section `model` from a file, and none is given. Name it with --finetune, "
            "--init-model or --restart, or leave the option out."
        )

    def adopt_from_checkpoint(self, config: RunConfig) -> RunConfig:
        """Return ``config`` with what it leaves open as it is in the file.

        Raises:
            CheckpointError: if the file holds a model of other elements.
        """
        return config

    def needs_statistics(self, config: RunConfig) -> bool:
        """Whether means, spreads and biases of the data are needed, because the file does not have all of them."""
        return True

    def fits_bias(self, task: str) -> bool:
        """Whether the output bias of a task is moved to the data before the first step."""
        return False

    def check_resumable(self, config: RunConfig, allow_change: bool) -> None:
        """Compare the config with that of the checkpoint that is continued.

        Raises:
            ConfigError: if an option differs that the continuation depends on, unless ``allow_change``.
        """

    def run_id(self, config: RunConfig) -> str:
        """Return the identifier of this trajectory of weights: the same config and start always give the same."""
        return digest(to_dict(config), "")

    def min_nbor_dist(self, task: str, in_data: float | None) -> float | None:
        """Return the nearest pair that the model records, angstrom: that in the data, or that of the file."""
        return in_data

    def load_weights(self, models: ModelSet) -> None:
        """Put the weights of the file into ``models``.

        Raises:
            CheckpointError: naming every missing, extra or reshaped tensor.
        """

    def loads_after_sharding(self, config: RunConfig) -> bool:
        """Whether each rank reads its shards of the weights when the models are sharded, in place of all weights."""
        return False

    def load_shards(self, models: ModelSet) -> None:
        """Put this rank's shards of the weights of the file into ``models``, which are sharded."""

    def state(self, models: ModelSet, streams: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the state of the run that is continued, or None for a new run.

        Args:
            models: of this run.
            streams: of this run before anything is loaded, for tasks that the continued run does not have.
        """
        return None


def digest(config: Mapping[str, Any], start: str) -> str:
    """Return the identifier of a run: the same config and ``start`` always give the same."""
    text = json.dumps([__version__, config, start], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
