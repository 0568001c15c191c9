"""Physics of the validated weights, as ``dp-ema test --physics`` measures it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from deepmd_ema.config.schema.training import PhysicsConfig
from deepmd_ema.data.source import Frame
from deepmd_ema.dist.dtensor import full_tensor
from deepmd_ema.dist.world import World
from deepmd_ema.errors import UserError
from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.infer.potential import Potential
from deepmd_ema.labels import PHYSICS
from deepmd_ema.model.build import build_models
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.physics.report import PhysicsOptions, physics_of, spread_frames
from deepmd_ema.training.start.prepare import PreparedRun

logger = logging.getLogger(__name__)


class PhysicsOfWeights:
    """Measures the physics of the weights that are in the models of a run.

    Rank 0 computes with a copy of whole weights, and the others wait: energies of an atom more or less are not worth a
    collective each.

    Args:
        prepared: models and data of the run.
        options: of the dynamics.
        world: the processes of the run.
    """

    def __init__(self, prepared: PreparedRun, options: PhysicsConfig, world: World) -> None:
        self._config, self._world = prepared.config, world
        self._tasks = {name: task for name, task in prepared.tasks.items() if task.valid}
        self._options = PhysicsOptions(options.temperature, options.time_step, options.md_steps)

    @cached_property
    def _frames(self) -> dict[str, list[Frame]]:
        return {name: spread_frames(task.valid) for name, task in self._tasks.items()}

    @cached_property
    def _models(self) -> ModelSet:
        sections = {name: task.model for name, task in self._config.tasks.items()}
        return build_models(sections, self._config.links).to(self._world.device)

    def measure(self, models: ModelSet, weights: str) -> dict[str, dict[str, float]]:
        """Return the values of ``labels.PHYSICS`` by task. Must be called by every rank.

        Args:
            models: of the run, with these weights.
            weights: their name, for messages.
        """
        whole = {name: full_tensor(tensor) for name, tensor in models.state_dict().items()}
        return self._world.broadcast_from_rank0(partial(self._measured, whole, weights))

    def _measured(self, whole: Mapping[str, Tensor], weights: str) -> dict[str, dict[str, float]]:
        self._models.load_state_dict(whole)
        return {name: self._of_task(name, weights) for name in self._tasks}

    def _of_task(self, name: str, weights: str) -> dict[str, float]:
        origin = Provenance(Path(f"weights {weights}"), "training", weights)
        loaded = LoadedModel(self._models.by_task[name], self._config.tasks[name].model, origin)
        try:
            potential = Potential(loaded, str(self._world.device))
            return dict(physics_of(potential, self._frames[name], self._options).metrics)
        except UserError as error:  # no finite energy: the run continues, and may get better
            logger.warning("physics of the weights %s: nothing measured. %s", f"{name} {weights}".strip(), error)
            return dict.fromkeys(PHYSICS, math.inf)
