"""Chooses the series as which embedding nets are evaluated, and checks while training that they are long enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deepmd_ema.batch import Batch
from deepmd_ema.dist.world import World
from deepmd_ema.model.kernels.spline import Spline
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.splines import ROUNDS, choose, splines_of, terms_for, use, watched
from deepmd_ema.tensors import prefix_of

CHECK_EVERY = 100  # steps of a task


@dataclass
class SplineControl:
    """The splines of the models of a run.

    The number of terms follows from the weights and the frames alone, so that all ranks, and a restart, have the same.

    Attributes:
        models: of the run.
        world: the processes of the run.
        checked: step of the run at which each task was checked last.
    """

    models: ModelSet
    world: World
    checked: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_task = {
            task: {prefix_of(task) + name: spline for name, spline in splines_of(model).items()}
            for task, model in self.models.by_task.items()
        }

    def begin(self, batches: Mapping[str, Batch], saved: Mapping[str, Any] | None) -> None:
        """Choose the number of terms.

        Args:
            batches: one of each task, the same on all ranks, on the device of the models, which are not yet sharded.
            saved: what :meth:`state_dict` returned in the run that is continued.
        """
        known = dict(saved.get("terms", {})) if saved else {}  # none in a file of a version with splines
        wanted = dict(saved["wanted"]) if saved else {}
        self.checked = dict(saved["checked"]) if saved else {}
        done: set[Spline] = set()
        for task, batch in batches.items():
            for name, spline in self._by_task[task].items():
                if spline not in done and spline.wanted != "direct":
                    done.add(spline)
                    if name in known and wanted.get(name) == spline.wanted:  # not if a restart has changed the option
                        spline.use(known[name])
                    elif spline.wanted == "spline" or batch.vector.device.type == "cpu":
                        choose(name, spline, partial(self._evaluate, task, batch))

    def in_words(self) -> str:
        """Return how the embedding nets are evaluated; empty if there is no choice."""
        splines = self.state_dict()["terms"]
        used = {name: terms for name, terms in splines.items() if terms}
        if not used:
            return "at each pair" if splines else ""
        several = len(splines) > 1
        return "; ".join(f"{f'{name}: ' if several else ''}{n} terms of a series" for name, n in used.items())

    def is_due(self, task: str, step: int) -> bool:
        """Whether the splines of a task are checked before ``step``."""
        in_use = any(spline.terms for spline in self._by_task[task].values())
        return in_use and step >= self.checked.get(task, 0) + CHECK_EVERY

    def check(self, task: str, batch: Batch, step: int) -> None:
        """Measure the error with the weights of now, and change the number of terms where it asks for it.

        Every rank calls this, with its own batch.
        """
        self.checked[task] = step
        for _ in range(ROUNDS):
            used = {name: spline for name, spline in self._by_task[task].items() if spline.terms}
            before = sum(spline.terms for spline in used.values())
            seen = watched(used.values(), partial(self._evaluate, task, batch))
            for name, spline in used.items():
                watch = seen[spline]
                use(name, spline, self.world.all_reduce_max(terms_for(watch, spline)), watch.error)
            if sum(spline.terms for spline in used.values()) <= before:  # the same on all ranks
                return

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs to go on with the same series."""
        named = {name: spline.terms for splines in self._by_task.values() for name, spline in splines.items()}
        wanted = {name: spline.wanted for splines in self._by_task.values() for name, spline in splines.items()}
        return {"terms": named, "wanted": wanted, "checked": dict(self.checked)}

    def _evaluate(self, task: str, batch: Batch) -> None:
        self.models(task, batch, create_graph=False, need_virial=False)
