"""A bank of averages of the weights: updated together after each step, swapped in to validate, saved and restored."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.averaging.average import Average
from deepmd_ema.averaging.slots import Slot, canonical, find_slots, prefix_of, unwrap
from deepmd_ema.checkpoint import check_weights, snapshot
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deepmd_ema.averaging.profile import AverageProfile

logger = logging.getLogger(__name__)

_requires_grad = attrgetter("requires_grad")


class AverageBank:
    """Averages of the trained parameters of one or several modules, all updated by one call after each step.

    Build it after the weights are loaded: every average starts as the live weights. Parameters with ``requires_grad``
    off are not averaged and cost nothing; when one is switched on later, its average starts from its live value.
    Buffers are never averaged. A tensor shared by several modules or names has one average. Averages are held in
    float32 or wider. Nothing here waits for the device, except what reads numbers: :meth:`info`, :meth:`state_dict`.

    Args:
        modules: the module whose parameters are averaged, or several by task name. Names of tensors are those of the
            bare module, whatever wraps it (``module.``, ``_orig_mod.``), after ``<task>.`` when there are tasks.
        profiles: one per average, names all different.

    Raises:
        ConfigError: if no parameter is trained.
    """

    def __init__(self, modules: nn.Module | Mapping[str, nn.Module], profiles: Sequence[AverageProfile]) -> None:
        self._modules = {"": modules} if isinstance(modules, nn.Module) else dict(modules)
        self._profiles = tuple(profiles)
        assert len({p.name for p in self._profiles}) == len(self._profiles), "names of averages must differ"
        self._steps = 0
        self._slots: list[Slot] = []
        self._averages: dict[str, Average] = {}
        self._active: Average | None = None
        self.rebind()
        if not self._slots:
            raise ConfigError(
                "training.enable_ema: the model has no trained parameter to average. Set `trainable` of the descriptor "
                "or the fitting net, or switch averaging off."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the averages."""
        return tuple(self._averages)

    @torch.no_grad()
    def update(self, ok: Tensor | None = None) -> None:
        """Move every average towards the live weights; call once after each optimizer step.

        Args:
            ok: scalar on the device of the weights, 1 for a good step. After a bad one (0) nothing changes and nothing
                is counted, even if the live weights are not finite; the device decides and the host does not wait.
        """
        assert self._active is None, "update() while an average is swapped in"
        if tuple(map(_requires_grad, self._watched)) != self._trained:
            self.rebind()
        self._steps += 1
        if ok is not None and ok.device.type == "cpu":
            if not bool(ok):
                return
            ok = None
        for average in self._averages.values():
            if average.profile.is_due(self._steps):
                average.update(ok)

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Run the body with the average in the modules, then put the live weights back, whatever happens.

        The exchange is in place, tensor by tensor: it needs extra memory for the largest tensor only (for all live
        weights if they are narrower than float32), and compiled modules see it. SIGINT and SIGTERM wait until an
        exchange is complete. Every rank must call this when weights are sharded.
        """
        average = self._averages[name]
        if self._active is not None:
            raise RuntimeError(f"average {name!r} cannot be swapped in: {self._active.profile.name!r} is already")
        try:
            with _signals_wait():
                _reshard(self._modules.values())
                self._active = average
                average.swap_in()
            yield
        finally:
            with _signals_wait():
                _reshard(self._modules.values())
                average.swap_out()
                self._active = None

    def weights(self, name: str, copy: bool = True) -> dict[str, Tensor]:
        """Return the model under the average ``name``: averaged parameters, everything else live.

        Names and order are those of the state dict. Every rank must call this when weights are sharded.

        Args:
            name: of the average.
            copy: whether the tensors are copies on the CPU, or may share memory with the averages and the model.
        """
        return self._state(self._averages[name], copy)

    def live_weights(self, copy: bool = True) -> dict[str, Tensor]:
        """Return the model under its raw weights, also while an average is swapped in."""
        return self._state(None, copy)

    @torch.no_grad()
    def copy_to(self, name: str, module: nn.Module, task: str = "") -> None:
        """Copy the average and the live buffers into ``module``, an unsharded one of the same structure.

        Raises:
            CheckpointError: if names or shapes differ.
        """
        prefix = prefix_of(task)
        found = {n.removeprefix(prefix): t for n, t in self.weights(name, copy=False).items() if n.startswith(prefix)}
        target = {canonical(n): t for n, t in unwrap(module).state_dict(keep_vars=True).items()}
        check_weights({n: tuple(t.shape) for n, t in target.items()}, found, f"average {name!r}")
        for n, tensor in target.items():
            tensor.copy_(found[n])

    def info(self, name: str) -> dict[str, Any]:
        """Return ``decay`` (as configured), ``effective_decay`` (last used), ``updates`` and ``mean_age`` in steps."""
        average = self._averages[name]
        updates, mean_age = average.counts()
        return {
            "decay": average.profile.decay,
            "effective_decay": average.profile.decay_at(max(0, updates - 1)),
            "updates": max(0, updates),
            "mean_age": mean_age,
        }

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return all averages by parameter name with their counters, as copies on the CPU.

        It is right also while an average is swapped in. Every rank must call this when weights are sharded.
        """
        profiles = {}
        for name, average in self._averages.items():
            updates, mean_age = average.counts()
            tensors: dict[str, Tensor] = {}
            for i, slot in enumerate(self._slots):
                tensors |= dict.fromkeys(slot.names, self._tensor(average, i))
            settings = {k: v for k, v in vars(average.profile).items() if k != "name"}
            profiles[name] = {**settings, "updates": updates, "mean_age": mean_age, "weights": tensors}
        state = {"steps": self._steps, "tasks": list(self._modules), "frozen": self._frozen, "profiles": profiles}
        return snapshot(state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None, step: int = 0) -> None:
        """Continue the averages of a checkpoint; call it after the live weights are loaded.

        What the checkpoint does not have (an average or a task that is new in this run, a parameter that was frozen)
        starts from the live weights, and the log says so. A decay that was changed is used from now on, with a
        warning. Every rank must call this with the same ``state``.

        Args:
            state: from :meth:`state_dict`, or None when the checkpoint has no averages.
            step: optimizer steps behind the live weights, used when ``state`` is None.

        Raises:
            CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
        """
        saved_profiles: Mapping[str, Any] = state["profiles"] if state is not None else {}
        self._steps = state["steps"] if state is not None else step
        for name in saved_profiles:
            if name not in self._averages:
                logger.info("the average %s of the checkpoint is not tracked any more in this run", name)
        for name, average in self._averages.items():
            saved = saved_profiles.get(name)
            if state is None or saved is None:
                average.seed(self._steps)
                logger.info("the checkpoint has no average %s: it starts from the loaded weights", name)
                continue
            _warn_changes(average.profile, saved)
            found = {n: t for n, t in saved["weights"].items() if n not in self._frozen}
            _check_names(self._slots, self._modules, state, found, name)
            for i, slot in enumerate(self._slots):
                known = next((n for n in slot.names if n in found), None)
                average.tensors[i].copy_(slot.part(found[known]) if known else slot.live)
            average.set_counts(saved["updates"], saved["mean_age"])

    @torch.no_grad()
    def reseed(self) -> None:
        """Start every average again from the live weights, at step 0."""
        self._steps = 0
        for average in self._averages.values():
            average.seed(0)

    @torch.no_grad()
    def rebind(self) -> None:
        """Look again at which parameters are trained and where they stand.

        :meth:`update` does this by itself when ``requires_grad`` of a parameter has changed; call it after parameters
        were moved to another device or replaced.
        """
        assert self._active is None, "rebind() while an average is swapped in"
        before = {name: i for i, slot in enumerate(self._slots) for name in slot.names}
        named = [
            (prefix_of(task) + canonical(name), p)
            for task, module in self._modules.items()
            for name, p in unwrap(module).named_parameters(remove_duplicate=False)
            if p.is_floating_point()
        ]
        self._watched = tuple(p for _, p in named)
        self._trained = tuple(map(_requires_grad, self._watched))
        self._slots = find_slots(named)
        averaged = {name for slot in self._slots for name in slot.names}
        self._frozen = [name for name, _ in named if name not in averaged]
        places = [next((before[n] for n in s.names if n in before), None) for s in self._slots]
        self._averages = {p.name: Average(p, self._slots, self._averages.get(p.name), places) for p in self._profiles}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._modules, self._profiles, self.state_dict())

    @torch.no_grad()
    def _state(self, average: Average | None, copy: bool) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for task, module in self._modules.items():
            for name, value in unwrap(module).state_dict().items():
                if isinstance(value, torch.Tensor):
                    tensors[prefix_of(task) + canonical(name)] = value
        for i, slot in enumerate(self._slots):
            tensors |= dict.fromkeys(slot.names, self._tensor(average, i))
        return snapshot(tensors) if copy else tensors

    def _tensor(self, average: Average | None, i: int) -> Tensor:
        """Return slot ``i``, whole, under ``average`` (None: live), whatever is swapped in now."""
        if average is not None and average.started:
            return average.averaged(i)
        return self._active.raw(i) if self._active is not None else self._slots[i].whole(self._slots[i].live)


def note_unused(state: Mapping[str, Any] | None) -> None:
    """Say that averaging is off in this run if the checkpoint it goes on from has averages."""
    if state is not None and state["profiles"]:
        logger.info(
            "training.enable_ema is off: the raw weights are trained on and the average %s of the checkpoint is left "
            "behind",
            ", ".join(state["profiles"]),
        )


def _warn_changes(profile: AverageProfile, saved: Mapping[str, Any]) -> None:
    for key in ("decay", "warmup", "start_step", "update_every"):
        now, before = getattr(profile, key), saved[key]
        if now != before:
            logger.warning(
                "average %s: %s was %s in the checkpoint and is %s from now on", profile.name, key, before, now
            )


def _rebuild(
    modules: dict[str, nn.Module], profiles: tuple[AverageProfile, ...], state: Mapping[str, Any]
) -> AverageBank:
    bank = AverageBank(modules, profiles)
    bank.load_state_dict(state)
    return bank


def _check_names(
    slots: Sequence[Slot], tasks: Iterable[str], state: Mapping[str, Any], weights: Mapping[str, Tensor], name: str
) -> None:
    """Check that every tensor of the average ``name`` has its place in this run, or a good reason to have none."""
    new_tasks, old_tasks = set(tasks) - set(state["tasks"]), set(state["tasks"]) - set(tasks)
    expected: dict[str, tuple[int, ...]] = {}
    seeded = []
    for slot in slots:
        if any(n in weights for n in slot.names):
            expected |= {n: slot.shape for n in slot.names if n in weights}
        elif any(n in state["frozen"] or _of_task(n, new_tasks) for n in slot.names):
            seeded.append(slot.names[0])
        else:
            expected[slot.names[0]] = slot.shape
    found = {n: t for n, t in weights.items() if not _of_task(n, old_tasks)}
    check_weights(expected, found, f"average {name!r} of the checkpoint")
    if seeded:
        logger.info("average %s: %s was not averaged before and starts from its live value", name, ", ".join(seeded))


def _reshard(modules: Iterable[nn.Module]) -> None:
    # weights that stay gathered after a forward would hide what is copied into the shards
    for module in modules:
        for part in module.modules():
            reshard = getattr(part, "reshard", None)  # an FSDPModule
            if callable(reshard):
                reshard()


def _of_task(name: str, tasks: set[str]) -> bool:
    return any(task and name.startswith(f"{task}.") for task in tasks)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the body is done, then deliver them as they would have been."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    arrived: list[int] = []
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    held = {s: h for s, h in handlers.items() if callable(h)}
    for s in held:
        signal.signal(s, lambda number, _frame: arrived.append(number))
    try:
        yield
    finally:
        for s, handler in held.items():
            signal.signal(s, handler)
        for number in arrived:
            signal.raise_signal(number)
