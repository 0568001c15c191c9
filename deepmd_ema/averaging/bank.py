"""A bank of averages: updated together, swapped in to validate, saved and restored."""

from __future__ import annotations

import io
import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.averaging.average import Average, count_on_device, host_decay
from deepmd_ema.averaging.storage import (
    Binding,
    Shard,
    canonical,
    lerp,
    lerp_on_device,
    unwrap,
)
from deepmd_ema.config.schema.averaging import CustomAverage, ScheduleFreeProfile
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.distributed.launch import END_SIGNALS, handling
from deepmd_ema.distributed.tensors import (
    Take,
    WholeTensors,
    check_weights,
    prefix_of,
    settle_shards,
)
from deepmd_ema.errors import ConfigError
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)


class AverageBank:
    """Averages of the trained parameters of one or several modules, updated by one call a step.

    Build it after the weights are loaded: every average starts as the live weights. Parameters with
    ``requires_grad`` off are not averaged and cost nothing; when one is switched on later, its
    average starts from its live value. A tensor shared by several modules or names has one average.
    Nothing here waits for the device, except what reads numbers: :meth:`info`, :meth:`state_dict`,
    and everything that reads an average kept on the host.

    ``bank[name]`` is one average, with its ``profile``, ``tensor_names`` and ``tensors`` on this
    process.

    Attributes:
        num_bindings: how often the averaged tensors were looked up; after each time the averages
            are in other memory.

    Args:
        modules: the module whose parameters are averaged, or several by task name. Names of tensors
            are those of the bare module, whatever wraps it (``module.``, ``_orig_mod.``), after
            ``<task>.`` when there are tasks.
        profiles: one per average, names all different; maybe none.
        around: the module around them, if it may be what FSDP has sharded.

    Raises:
        ConfigError: if no parameter is trained, or two averages have one name.
    """

    def __init__(
        self,
        modules: nn.Module | Mapping[str, nn.Module],
        profiles: Sequence[Profile],
        around: nn.Module | None = None,
    ) -> None:
        self._modules = (
            {"": modules} if isinstance(modules, nn.Module) else dict(modules)
        )
        self._around = around
        problems = [problem for profile in profiles for problem in _problems(profile)]
        ConfigError.raise_if_any(problems)
        # Only a trainer knows how many steps an epoch has: its lengths are in steps already.
        try:
            self._profiles = tuple(
                profile.in_steps({"steps": 1.0}) for profile in profiles
            )
        except KeyError as unit:
            raise ConfigError(
                f"averaging: a length in {unit.args[0]}, which AverageBank cannot convert. Give it "
                "in steps, or use profile.in_steps()."
            ) from None
        names = [p.name for p in self._profiles]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"averages {', '.join(names)}: the names must differ, files are named after them."
            )
        self._steps = 0
        self._averages: dict[str, Average] = {}
        self.num_bindings = 0
        self._swapped: Average | None = None
        self._binding = Binding(
            {}, buffers=False
        )  # without averages nothing is looked up
        if self._profiles:
            # FSDP of torch before 2.10 moves shards to other memory in the first forward pass, and
            # an average that was bound before it would read the old memory for ever.
            for module in self._modules.values() if around is None else [around]:
                settle_shards(module)
            self.rebind()
        if self._profiles and not self._binding.shards:
            raise ConfigError(
                "averaging: the model has no trained parameter to average. Set `trainable` of the "
                "descriptor or the fitting net (`requires_grad` of a parameter), or switch "
                "averaging off."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the averages."""
        return tuple(self._averages)

    def __getitem__(self, name: str) -> Average:
        """Return the average ``name``."""
        return self._averages[name]

    def update(self, ok: Tensor | None = None, epoch: float | None = None) -> None:
        """Move every average towards the live weights; call once after each optimizer step.

        Args:
            ok: scalar on the device of the weights, 1 for a good step. After a bad one (0) nothing
                changes and nothing is counted, even if the live weights are not finite; the device
                decides and the host does not wait.
            epoch: handed to ``should_update`` of the profiles that have it.
        """
        due = self.begin(epoch)
        # A flag on the host is read at once, so that counters stay there: on the device they cost
        # kernels. `ok > 0` is False for NaN as well.
        if ok is not None and ok.is_cpu:
            if not bool(ok > 0):
                return
            ok = None
        self.apply(due, ok)

    def begin(self, epoch: float | None = None) -> tuple[str, ...]:
        """Count a step, on the host, and return the names of the averages that are due."""
        # the weights would be those of the average, which would then be averaged with itself
        assert self._swapped is None, "update() while an average is swapped in"
        if self._binding.is_stale():
            self.rebind()
        self._steps += 1
        return tuple(
            name
            for name, a in self._averages.items()
            if a.profile.is_due(self._steps, epoch)
        )

    def apply(
        self, due: Sequence[str], ok: Tensor | None, step: Tensor | None = None
    ) -> None:
        """Update averages that are due.

        Args:
            due: names from :meth:`begin`, or some of them.
            ok: not on the host, or None; as in :meth:`update`.
            step: number of the step on the device. For averages on the device of the weights, no
                number of the host is used then, and all memory that is kept is changed in place.
        """
        near = []  # averages on the device of their weights
        # takes 1 us less than torch.no_grad(), 1 % of an update of a small model
        with torch.set_grad_enabled(False):
            for average in (self._averages[name] for name in due):
                if average.staging is None:
                    near.append(average)
                else:
                    # The copy of the last update has had a step to arrive; this one is waited for
                    # at the next update. Counting waits with it, as it needs the flag.
                    average.flush()
                    average.staging.start(self._steps, ok)
            # Once a flag on the device has decided an update, only the device has the counters; the
            # averages change over together, so that their formulas share kernels.
            if ok is None and all(average.on_device is None for average in near):
                counted = [(average, average.count(self._steps)) for average in near]
                lerp(
                    [
                        (buffer, share)
                        for average, share in counted
                        for buffer in average.buffers
                    ]
                )
            elif near:
                good = None if ok is None else ok.detach() > 0
                # A captured graph would repeat a number of the host in every later step.
                number = self._steps if step is None else step
                shares = count_on_device(self._near, self._counts, near, number, good)
                moves = [
                    (buffer, share)
                    for average, share in zip(near, shares)
                    for buffer in average.buffers
                ]
                lerp_on_device(moves, good)

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Run the body with the average in the modules, then restore the live weights.

        They are restored also after an exception.
        Nothing is exchanged for ``live``. The exchange is in place, tensor by tensor, and compiled
        modules see it. It needs extra memory for the largest tensor only; for all live weights (of
        this process, where the average is kept) if the average is held in another precision or
        gathered. SIGINT and ``END_SIGNALS`` wait until an exchange is complete. Every rank must
        call this when weights are sharded.
        """
        if name == LIVE:
            yield
            return
        if self._swapped is not None:
            raise RuntimeError(
                f"average {name!r} cannot be swapped in: {self._swapped.profile.name!r} is already"
            )
        average = self._averages[name]
        modules = (
            list(self._modules.values()) if self._around is None else [self._around]
        )
        # A signal between two tensors would leave a model of live and averaged weights, which a
        # handler might save.
        try:
            with _signals_wait():
                reshard(modules)
                self._swapped = average
                average.swap_in()
            yield
        finally:
            with _signals_wait():
                # the body has gathered the averaged weights; training would use them
                reshard(modules)
                average.swap_out()
                self._swapped = None

    @torch.no_grad()
    def weights(self, name: str, take: Take | None = None) -> dict[str, Any]:
        """Return the model under the average ``name``: averaged tensors, everything else live.

        Names and order are those of the state dict. Every rank must call this when weights are
        sharded.

        Args:
            name: of the average; ``live`` for the raw weights, also while an average is swapped in.
            take: what this rank saves of each tensor, without those of which it saves nothing;
                None: copies of whole tensors on the CPU.
        """
        average = None if name == LIVE else self._averages[name]
        take = take or WholeTensors()
        averaged = self._taken(
            average, [*self._binding.shards, *self._binding.buffers], take
        )
        # in the order of the state dict, so that files of one model are the same under any average
        saved: dict[str, Any] = {}
        for task, module in self._modules.items():
            for name, value in unwrap(module).state_dict().items():
                # a module may have an extra state that is no tensor
                if isinstance(value, Tensor):
                    key = prefix_of(task) + canonical(name)
                    saved[key] = (
                        averaged.get(key) if key in self._binding.names else take(value)
                    )
        # None: this rank takes part in the collective and saves nothing of the tensor
        return {key: value for key, value in saved.items() if value is not None}

    @torch.no_grad()
    def copy_to(self, name: str, module: nn.Module, task: str = "") -> None:
        """Copy the average and the live buffers into ``module``, unsharded, of the same structure.

        Raises:
            CheckpointError: if names or shapes differ.
        """
        prefix = prefix_of(task)
        weights = {
            n.removeprefix(prefix): t
            for n, t in self.weights(name).items()
            if n.startswith(prefix)
        }
        target = {
            canonical(n): t
            for n, t in unwrap(module).state_dict(keep_vars=True).items()
        }
        shapes = {n: tuple(t.shape) for n, t in target.items()}
        check_weights(shapes, weights, f"average {name!r}")
        for n, tensor in target.items():
            tensor.copy_(weights[n])

    def info(self, name: str) -> dict[str, Any]:
        """Return settings, ``effective_decay`` (last used), ``updates``, ``mean_age`` in steps."""
        average = self._averages[name]
        updates, mean_step = average.counts()
        return {
            **average.profile.settings(),
            "effective_decay": host_decay(average.profile, max(0, updates - 1)),
            "updates": max(0, updates),
            "mean_age": self._steps - mean_step if updates >= 0 else 0.0,
        }

    @torch.no_grad()
    def state_dict(
        self, weights: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return all averages by parameter name with their counters, as copies on the CPU.

        It is right also while an average is swapped in. Every rank must call this when weights are
        sharded.

        Args:
            weights: what :meth:`weights` has returned for every average; it is taken as it is and
                not gathered again.
        """
        profiles, take = {}, WholeTensors()
        for name, average in self._averages.items():
            updates, mean_step = average.counts()
            profiles[name] = {
                **average.profile.settings(),
                "updates": updates,
                # Readers of the file show the age. A restart continues the mean step, because a
                # difference that is taken and added back is rounded.
                "mean_age": self._steps - mean_step if updates >= 0 else 0.0,
                "mean_step": mean_step,
                "weights": self._taken(average, average.shards, take)
                if weights is None
                else {
                    n: weights[name][n]
                    for n in average.tensor_names
                    if n in weights[name]
                },
            }
        tasks, frozen = list(self._modules), list(self._binding.frozen)
        return {
            "steps": self._steps,
            "tasks": tasks,
            "frozen": frozen,
            "profiles": profiles,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | None, step: int = 0) -> None:
        """Continue the averages of a checkpoint; call it after the live weights are loaded.

        What the checkpoint does not have (an average or a task that is new in this run, a parameter
        that was frozen) starts from the live weights, and the log says so. A decay that was changed
        is used from now on, with a warning. Every rank must call this with the same ``state``.

        Args:
            state: from :meth:`state_dict`, or None when the checkpoint has no averages.
            step: optimizer steps of the live weights, used when ``state`` is None.

        Raises:
            CheckpointError: naming tensors that are missing, extra, renamed or of another shape.
        """
        assert self._swapped is None, "load_state_dict() while an average is swapped in"
        saved_profiles: Mapping[str, Any] = (
            state["profiles"] if state is not None else {}
        )
        self._steps = state["steps"] if state is not None else step
        for name in saved_profiles:
            if name not in self._averages:
                logger.info(
                    "the average %s of the checkpoint is not tracked any more in this run",
                    name,
                )
        # The averaged point of a schedule-free optimizer is part of its state: there is one, under
        # any name. Starting it from the live weights, which are another point, would be another
        # optimization.
        kind = ScheduleFreeProfile.type
        point = next(
            (saved for saved in saved_profiles.values() if saved.get("type") == kind),
            None,
        )
        for name, average in self._averages.items():
            saved = saved_profiles.get(name)
            if average.profile.type == kind and (
                saved is None or saved.get("type") != kind
            ):
                saved = point
            if state is None or saved is None:
                average.seed(self._steps)
                logger.info(
                    "the checkpoint has no average %s: it starts from the loaded weights",
                    name,
                )
            else:
                average.load(state, saved, self._modules, self._binding)

    @torch.no_grad()
    def rebind(self) -> None:
        """Find the averaged tensors again.

        :meth:`update` does this by itself when ``requires_grad`` of a parameter has changed; call
        it after parameters were moved to another device or replaced.
        """
        assert self._swapped is None, "rebind() while an average is swapped in"
        averages_buffers = any(p.buffers == "average" for p in self._profiles)
        self._binding = Binding(self._modules, averages_buffers)
        averages = {}
        for profile in self._profiles:
            shards = [
                *self._binding.shards,
                *(self._binding.buffers if profile.buffers == "average" else []),
            ]
            average = averages[profile.name] = Average(profile, shards)
            if profile.name in self._averages:
                average.carry_over(self._averages[profile.name])
            else:
                average.seed(self._steps)
        self._averages = averages
        # graphs that were captured with the old memory are made again when this has changed
        self.num_bindings += 1
        self._near = [
            average for average in averages.values() if average.staging is None
        ]
        device = next(
            (shard.local.device for shard in self._binding.shards), torch.device("cpu")
        )
        # Numbers of updates and mean steps, (averages, 2), once they are counted on the device. All
        # in one tensor: 16 kernels in place of 25 for one average, 21 in place of 48 for two.
        self._counts = torch.zeros(
            len(self._near), 2, dtype=torch.float64, device=device
        )

    def _taken(
        self, average: Average | None, shards: Sequence[Shard], take: Take
    ) -> dict[str, Any]:
        """Return ``shards`` as this rank saves them, by every name of each.

        Tensors of which ``take`` keeps nothing are left out. Every rank must call this when weights
        are sharded.

        Args:
            average: whose weights; live ones for None, before it has started, and where it has
                none.
            shards: what is wanted.
            take: what is saved of a tensor.
        """
        # How each shard is read, by its first name; later entries take the place of earlier ones:
        # the module has the live weights, unless an average is swapped in, and the average has its
        # own tensors, if it has started. A function each, because reading may be a collective.
        reads: dict[str, Callable[[], Tensor]] = {
            s.names[0]: partial(s.as_tensor, s.local) for s in shards
        }
        if (swapped := self._swapped) is not None:
            reads |= {
                shard.names[0]: partial(swapped.live, i)
                for i, shard in enumerate(swapped.shards)
            }
        if average is not None and average.started:
            average.flush()
            reads |= {
                shard.names[0]: partial(average.as_tensor, i)
                for i, shard in enumerate(average.shards)
            }
        saved: dict[str, Any] = {}
        for shard in shards:
            value = take(reads[shard.names[0]]())
            if value is not None:
                saved |= dict.fromkeys(shard.names, value)
        return saved

    def __getstate__(self) -> tuple[Any, ...]:
        assert self._swapped is None, "a bank is pickled while an average is swapped in"
        # Bytes: tensors made here would be freed, and their shared memory closed, before a
        # spawned process opens it
        state = io.BytesIO()
        torch.save(self.state_dict(), state)
        return self._modules, self._profiles, self._around, state.getvalue()

    def __setstate__(self, saved: tuple[Any, ...]) -> None:
        *arguments, state = saved
        self.__init__(*arguments)  # type: ignore[misc]
        self.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))


def _problems(profile: Profile) -> Iterator[str]:
    """Yield settings that exclude each other, and impossible decays of another distribution."""
    for finding in profile.conflicts():
        yield f"average {profile.name!r}: {finding}"
    if isinstance(profile, CustomAverage):
        # A faulty formula of another package is found before training and not at step 100,000:
        # numbers of steps from a start to a long run.
        done = torch.tensor([0.0, 1.0, 2.0, 10.0, 1e3, 1e6], dtype=torch.float64)
        try:
            decays = profile.decay_at(done) + torch.zeros_like(done)
            # a formula must not read numbers, for which a GPU would be waited for in each step:
            # tensors of this device have none
            profile.decay_at(done.to("meta"))
        except Exception as error:  # code of another package may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield (
                f"decay_at of type {profile.type!r} fails for tensors of steps ({reason}). Use "
                "operations of tensors."
            )
            return
        wrong = [k for k, decay in enumerate(decays.tolist()) if not 0 <= decay <= 1]
        if wrong:
            n, decay = int(done[wrong[0]]), float(decays[wrong[0]])
            yield (
                f"decay_at of type {profile.type!r} is {decay:g} after {n:,} steps, expected a "
                "number from 0 to 1."
            )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Drop the gathered weights of sharded modules, which hide what is copied into the shards."""
    for part in (part for module in modules for part in module.modules()):
        if callable(
            drop := getattr(part, "reshard", None)
        ):  # only an FSDPModule has it
            drop()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Hold SIGINT and ``END_SIGNALS`` back until the body is done, then deliver them."""
    arrived: list[int] = []
    # a signal that is ignored, or left to the system, has no handler that could be called later
    held = [s for s in (signal.SIGINT, *END_SIGNALS) if callable(signal.getsignal(s))]
    try:
        with handling(held, lambda number, _frame: arrived.append(number)):
            yield
    finally:
        # Each one, also after one whose handler raises. The stack runs them from the last to the
        # first, so that they are entered in reverse.
        with ExitStack() as deliveries:
            for number in reversed(arrived):
                deliveries.callback(signal.raise_signal, number)
