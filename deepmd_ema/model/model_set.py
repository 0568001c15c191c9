"""The models of a run as one module, by task."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from deepmd_ema.distributed.tensors import prefix_of

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.model.compiler import Compiler
    from deepmd_ema.model.energy import EnergyModel

T = TypeVar("T")


class ModelSet(nn.Module):
    """The models of a run: one module for the optimizer, for the ranks and for files.

    Tensors are called ``<task>.<name in the model>``; those of a single task without a name keep
    the names of the model, so a file of one model does not depend on this class. A tensor that
    tasks share is one parameter, under the name of the first task that has it; a state dict has it
    under all its names.

    Args:
        models: by name of the task.

    Attributes:
        by_task: the models. They are called through this set, which ranks may have sharded as a
            whole.
        compiler: evaluates the models, but for Hessians; None: they are evaluated eagerly.
    """

    def __init__(self, models: Mapping[str, EnergyModel]) -> None:
        super().__init__()
        self.by_task = dict(models)
        # numbered, because torch refuses modules with an empty name, as a single task has it, or
        # with a dot in it
        self._models = nn.ModuleList(models.values())
        self.compiler: Compiler | None = None

    def forward(
        self, task: str, batch: Batch, **wanted: bool | None
    ) -> dict[str, Tensor]:
        """Return the predictions of the model of ``task``.

        Args:
            task: name of the task.
            batch: as for :class:`~deepmd_ema.model.energy.EnergyModel`.
            wanted: further arguments of the model.
        """
        model = self.by_task[task]
        # graphs are made for the default arguments; Hessians are evaluated frame by frame, eagerly
        is_usual = wanted.get("create_graph") is None and not wanted.get("need_hessian")
        if self.compiler is not None and self.compiler.serves(model) and is_usual:
            return self.compiler(model, batch)
        prediction: dict[str, Tensor] = model(batch, **wanted)
        return prediction

    def of(self, task: str) -> TaskModel:
        """Return the model of ``task`` as a module that is called with batches only."""
        return TaskModel(self, task)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the names that files use; parameters and buffers follow them.

        torch builds the names of parameters, buffers, hooks and shards from this iterator. Without
        it, ``_models.0.`` would be a part of all of them.
        """
        # one memo for all tasks: a module that they share is yielded once, with the first of them
        memo = set() if memo is None else memo
        if remove_duplicate:
            # the set has no parameters of its own: tensors have the names in their models
            memo.add(self)
        yield prefix, self
        for task, model in self.by_task.items():
            yield from model.named_modules(
                memo, ".".join(filter(None, (prefix, task))), remove_duplicate
            )

    def first_names(self) -> dict[str, str]:
        """Return for each name of a parameter that of :meth:`named_parameters`.

        They differ for a parameter that tasks share: it has a name for each of them.
        """
        # from the identity of a parameter to the first of its names
        first: dict[int, str] = {}
        return {
            name: first.setdefault(id(p), name)
            for name, p in self.named_parameters(remove_duplicate=False)
        }

    def tasks_of_parameters(self) -> dict[str, list[str]]:
        """Return the tasks that have a parameter, by its name in :meth:`named_parameters`."""
        # by identity: a shared parameter is one object in all models that have it
        ids_by_task = {
            task: set(map(id, model.parameters()))
            for task, model in self.by_task.items()
        }
        return {
            name: [task for task in ids_by_task if id(p) in ids_by_task[task]]
            for name, p in self.named_parameters()
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all tensors under the names that files use."""
        states = {
            task: model.state_dict(*args, **kwargs)
            for task, model in self.by_task.items()
        }
        return {
            prefix_of(task) + name: tensor
            for task, state in states.items()
            for name, tensor in state.items()
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Load the tensors of a state dict with exactly these names.

        A shared tensor gets the value that the first task has for it.
        """
        # the first task comes last and its values remain: averages hold a shared tensor under its
        # first name only
        for task, model in reversed(self.by_task.items()):
            model.load_state_dict(of_task(state_dict, task), *args, **kwargs)


class TaskModel(nn.Module):
    """One model of a set, called through the set so that its sharding and its hooks take part.

    Attributes:
        models: the set.
        task: whose model this is.
    """

    def __init__(self, models: ModelSet, task: str) -> None:
        super().__init__()
        self.models = models
        self.task = task
        self.training = models.training

    @property
    def out_bias(self) -> Tensor:
        """(1, T, 1) eV, energy added for each atom of a type."""
        return self.models.by_task[self.task].out_bias

    def forward(self, batch: Batch, **wanted: bool | None) -> dict[str, Tensor]:
        """Return the predictions of the model, with the arguments of it."""
        prediction: dict[str, Tensor] = self.models(self.task, batch, **wanted)
        return prediction


def of_task(named: Mapping[str, T], task: str) -> dict[str, T]:
    """Return the entries with names of a task, under the names in its model."""
    prefix = prefix_of(task)
    return {
        name.removeprefix(prefix): value
        for name, value in named.items()
        if name.startswith(prefix)
    }


def unnested(by_task: Mapping[str, T]) -> T | dict[str, T]:
    """Return values by task as in files: the value itself where the only task has no name."""
    return by_task[""] if set(by_task) == {""} else dict(by_task)


def nested(value: Any, tasks: Collection[str]) -> dict[str, Any]:
    """Return the values by task of which :func:`unnested` made ``value``, without unknown tasks."""
    if tuple(tasks) == ("",):
        return {"": value}
    return {task: value[task] for task in tasks if task in value}
