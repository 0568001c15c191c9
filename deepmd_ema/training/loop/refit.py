"""Fits output bias or output layer again after training, for each set of weights with these weights themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from deepmd_ema.averaging import AverageBank
from deepmd_ema.data.loader import atoms_at_once, prefetch, sequential_batches, shared_atoms_at_once
from deepmd_ema.dist.dtensor import full_tensor
from deepmd_ema.dist.world import World
from deepmd_ema.infer.solve import MAX_FRAMES, chosen_frames, fit_bias, loss_weights, solve_last_layer
from deepmd_ema.metrics import Errors, evaluate
from deepmd_ema.model.build import build_models
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.tabulated import tables_in
from deepmd_ema.tensors import prefix_of
from deepmd_ema.training.start.prepare import PreparedRun, PreparedTask
from deepmd_ema.weight_names import LIVE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refitted:
    """Tensors that readers of the last files use in place of those that a restart continues from.

    Attributes:
        tensors: by name of the weights, tensors by their names in the models.
        errors: on the validation frames with these tensors, by names as of a full validation; empty if not measured.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    errors: Mapping[str, Errors] = field(default_factory=dict)


def refit_bias(prepared: PreparedRun, bank: AverageBank | None) -> Refitted:
    """Return the output biases (1, T, 1) in eV that fit the data, by weights and by their names in the models.

    The weights are ``live`` and every average. With its bias the mean residual per atom over the training frames of a
    task is zero for the weights that it was fitted with. All frames take part up to 10,000, of more a sample in which
    every system has its share; it depends on the seed of the run only. Nothing in the models or the bank changes. A
    task without energies is left out, with a warning.

    Args:
        prepared: data and models of the run; it computes where the models are.
        bank: averages, or None.
    """
    fitted: dict[str, dict[str, Tensor]] = {}
    for weights in (LIVE, *(bank.names if bank is not None else ())):
        with bank.swapped_in(weights) if bank is not None and weights != LIVE else nullcontext():
            for name, task in prepared.tasks.items():
                model = prepared.models.of(name)
                chosen = chosen_frames(task.config, task.train, prepared.seed, MAX_FRAMES)
                most = atoms_at_once(model.out_bias.device)
                batches = sequential_batches(task.train, task.model.layout, task.cache, most, frames=chosen)
                found = fit_bias(model, task.config.model, batches)
                if found.tensors:
                    row = f"{name} {weights}" if name else weights
                    logger.info("output bias fitted again with the weights %s on %s", row, found.summary)
                    fitted.setdefault(weights, {}).update({prefix_of(name) + n: t for n, t in found.tensors.items()})
                elif weights == LIVE:
                    logger.warning(
                        "training.change_bias_after_training: no training frame%s has an energy, so there is nothing "
                        "to fit the bias to: it stays as it is",
                        f" of task {name}" if name else "",
                    )
    return Refitted(fitted)


def solve(prepared: PreparedRun, bank: AverageBank | None, num_steps: int, world: World, step: int) -> Refitted:
    """Return the output layers and biases that fit the training labels best, for all weights that the run has.

    All weights of a model are gathered on every rank, one set after the other, and the frames distributed over the
    ranks. Nothing in the models or the bank changes. Must be called by every rank.

    Args:
        prepared: data and models of the run.
        bank: averages, or None.
        num_steps: of the whole run, as planned.
        world: the processes of the run.
        step: the last one, which an early stop makes before ``num_steps``.
    """
    config, errors = prepared.config, {}
    tensors: dict[str, dict[str, Tensor]] = {}
    models = build_models({name: task.model for name, task in config.tasks.items()}, config.links).to(world.device)
    for weights in (LIVE, *(bank.names if bank is not None else ())):
        if bank is None or weights == LIVE:
            whole = {name: full_tensor(tensor) for name, tensor in prepared.models.state_dict().items()}
        else:
            whole = bank.weights(weights)
        models.load_state_dict(whole)
        for name, task in prepared.tasks.items():
            model, loss = models.by_task[name], task.config.loss
            frames = chosen_frames(task.config, task.train, prepared.seed, MAX_FRAMES)
            prefactors = loss_weights(loss, config.learning_rate, num_steps, step)
            intensive = loss.intensive_ener_virial
            found = solve_last_layer(model, task.train, frames, prefactors, intensive, task.cache, world)
            row = f"{name} {weights}" if name else weights
            logger.info("output layer solved for the weights %s: %s", row, found.summary)
            tensors.setdefault(weights, {}).update({prefix_of(name) + n: t for n, t in found.tensors.items()})
            model.load_state_dict(found.tensors, strict=False)
            if task.valid:
                errors[row] = _errors(model, task, world)
    return Refitted(tensors, errors)


def _errors(model: EnergyModel, task: PreparedTask, world: World) -> Errors:
    """Return the errors on the validation frames of a task, of a model that is whole on every rank."""
    most = shared_atoms_at_once(task.valid, world.device, world.size)
    batches = sequential_batches(task.valid, model.layout, task.cache, most, rank=world.rank, world_size=world.size)
    with tables_in([model]):
        return Errors(world.all_reduce_sum(evaluate(model, prefetch(batches, world.device), world.device).sums))
