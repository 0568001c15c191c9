"""Optimizers by name, clipping, steps that the device can skip, and state by parameter name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepmd_ema.config.messages import Source, in_order, show
from deepmd_ema.config.schema.optim import GradientConfig, GroupConfig
from deepmd_ema.distributed.tensors import (
    Take,
    WholeTensors,
    check_weights,
    local_shard,
    shard_like,
)
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.findings import error
from deepmd_ema.optim.guarded import ADAM_EPS, GuardedOptimizer, adam_state
from deepmd_ema.optim.muon import AdaMuon, HybridMuon, routed
from deepmd_ema.optim.schedule_free import AdamWScheduleFree
from deepmd_ema.optim.soap import SOAP
from deepmd_ema.text import counted

MAX_NAMES = 8  # in a message
OF_CHECKPOINT = "optimizer state of the checkpoint"
OWN: dict[str, type[GuardedOptimizer]] = {
    kind.__name__: kind for kind in (AdamWScheduleFree, AdaMuon, HybridMuon, SOAP)
}
LR_SCALE = "lr_scale"  # key of a group of parameters: factor of its learning rate
NORM_GUARD = (
    1e-6  # as in torch.nn.utils.clip_grad_norm_ and DeePMD-kit: no division by zero
)
NamedParameters = Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]


def build_optimizer(
    config: GradientConfig,
    named_parameters: NamedParameters,
    shared: bool = False,
    names: Mapping[str, str] | None = None,
    warmup: tuple[int, float] = (0, 0.0),
) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` describes, over the parameters that are trained.

    State is allocated at construction, so that a skipped step leaves all of it as it was. The step
    counters are on the device of the parameters, so that no step waits. The learning rate is 0
    until the caller sets it in ``param_groups``. Adam and AdamW run as one fused kernel.

    Args:
        config: the section ``optimizer``.
        named_parameters: parameters by name; those with ``requires_grad`` off are left out.
        shared: whether each rank keeps the state of a part of the parameters only, updates these,
            and sends them to all others (ZeRO stage 1; Rajbhandari et al., arXiv:1910.02054).
        names: all names of parameters that ``groups`` may match, each with its name in
            ``named_parameters``; by default the names there.
        warmup: length of the warm-up of the learning rate, in steps, and its first rate over the
            last one.

    Raises:
        ConfigError: if a pattern of ``groups`` matches no parameter.
    """
    named = dict(named_parameters)
    trained = {name: p for name, p in named.items() if p.requires_grad}

    # Class and options. The optimizers of this package take the options of their section by name;
    # torch takes `betas`, and gets the `eps` of DeePMD-kit.
    kind: type[torch.optim.Optimizer]
    settings = asdict(config)
    del settings["groups"]
    if config.type in OWN:
        kind = OWN[config.type]
        if (
            kind is AdamWScheduleFree
        ):  # the weights of points in its average depend on the warm-up
            settings |= zip(("warmup_steps", "warmup_start_factor"), warmup)
    else:
        kind = getattr(torch.optim, config.type)
        betas = settings.pop("adam_beta1"), settings.pop("adam_beta2")
        settings |= {"betas": betas, "eps": ADAM_EPS, "fused": True}

    # groups of the input, and last the parameters of none; HybridMuon divides each of them again
    # into matrices and the rest
    parameters: list[dict[str, Any]] = []
    options_of_groups = [*map(asdict, config.groups), {}]
    names_of_groups = split_by_pattern(config.groups, names or dict(zip(named, named)))
    for options, group_names in zip(options_of_groups, names_of_groups):
        part = {name: trained[name] for name in group_names if name in trained}
        routes = (
            routed(part, settings["muon_mode"])
            if kind is HybridMuon
            else [{"params": list(part.values())}]
        )
        group_settings = {
            key: options[key]
            for key in (LR_SCALE, "weight_decay")
            if options.get(key) is not None
        }
        parameters += [
            {**route, **group_settings} for route in routes if route["params"]
        ]

    # lr=0.0: a step before set_learning_rate changes nothing
    if shared:
        with warnings.catch_warnings():
            # importing it uses parts of torch that are deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        # the parameters of a rank become views of one tensor, which is sent to the other ranks at
        # once
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            parameters,
            optimizer_class=kind,
            parameters_as_bucket_view=True,
            lr=0.0,
            **settings,
        )
    else:
        # torch wraps methods so that its compiler leaves them alone, and the first call of a
        # wrapper imports the compiler, which takes half a second; an optimizer is never compiled
        # here
        plain = {
            name: inspect.unwrap(getattr(kind, name))
            for name in ("add_param_group", "zero_grad", "step")
        }
        plain["step"] = torch.no_grad()(plain["step"])
        optimizer = type(kind.__name__, (kind,), plain)(parameters, lr=0.0, **settings)

    # torch makes moments in the first step; a first step that is skipped would leave none, and a
    # checkpoint of step 0 would have no state
    local = _local(optimizer)
    if not isinstance(local, GuardedOptimizer):
        for p in (p for group in local.param_groups for p in group["params"]):
            local.state[p] = adam_state(p, p.dtype)
    return optimizer


def split_by_pattern(
    groups: Sequence[GroupConfig],
    names: Mapping[str, str],
    source: Source | None = None,
) -> list[list[str]]:
    """Return the parameters of each group, and last those of no group.

    Args:
        groups: a parameter belongs to the first whose pattern matches one of its names.
        names: all names of parameters, those that tasks share under several, each with the name to
            return.
        source: the input, for messages.

    Raises:
        ConfigError: if a pattern matches no name.
    """
    source = source or Source()
    members: list[list[str]] = []  # by group
    problems = []
    left = dict.fromkeys(
        names.values()
    )  # an ordered set of what no group has taken so far
    for number, group in enumerate(groups):
        matched = dict.fromkeys(
            first for name, first in names.items() if fnmatchcase(name, group.pattern)
        )
        if not matched:
            # names from all parts of a model: every n-th, in place of the first few
            few = ", ".join(list(names)[:: -(-len(names) // MAX_NAMES)])
            text = (
                f" = {show(group.pattern)}: no parameter has such a name. Expected a pattern of a "
                f"whole name, in which * is any text. Some of the {len(names)} names: {few}."
            )
            problems.append(
                source.locate(error(f"optimizer.groups[{number}].pattern", text))
            )
        members.append([name for name in matched if name in left])
        left = {name: None for name in left if name not in matched}
    ConfigError.raise_if_any(in_order(problems))
    return [*members, list(left)]


def describe_groups(
    groups: Sequence[GroupConfig],
    names: Mapping[str, str],
    parameters: Mapping[str, Tensor],
    source: Source | None = None,
) -> list[str]:
    """Return for each group, and for the parameters of none, its size and what it has of its own.

    Args:
        groups: as for :func:`split_by_pattern`.
        names: as for :func:`split_by_pattern`.
        parameters: by name; those that are not trained do not count.
        source: as for :func:`split_by_pattern`.
    """
    lines = []
    members = split_by_pattern(groups, names, source)
    for group, group_names in zip((*groups, None), members):
        trained = [
            parameters[name] for name in group_names if parameters[name].requires_grad
        ]
        settings = [counted(sum(p.numel() for p in trained), "trained parameter")]
        if group is not None:
            settings.append(f"learning rate x {group.lr_scale:g}")
            if group.weight_decay is not None:
                settings.append(f"weight decay {group.weight_decay:g}")
        lines.append(
            f"{'others' if group is None else group.pattern}: {', '.join(settings)}"
        )
    return lines if groups else []


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Set the learning rate of the next steps, multiplied by the factor of each group.

    Args:
        optimizer: one from :func:`build_optimizer`.
        rate: a float; on a GPU also a scalar in float64 there, with which a step reads no number of
            the host. Both give the same bits there: rates are rounded to float32, in which the
            fused kernels of torch read a scalar.
    """
    on_host = optimizer.param_groups[0]["params"][0].is_cpu
    # by factor: groups of one factor share a scalar on the device, which is made once in a step
    rates: dict[float, float | Tensor] = {}
    for group in optimizer.param_groups:
        scale = group.get(LR_SCALE, 1.0)
        if scale not in rates:
            scaled = rate if scale == 1 else rate * scale
            if isinstance(scaled, Tensor):
                scaled = scaled.to(torch.float32)
            elif not on_host:
                scaled = torch.tensor(scaled, dtype=torch.float32).item()
            rates[scale] = scaled
        group["lr"] = rates[scale]


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    all_reduce_sum: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scale the gradients so that their global L2 norm is at most ``max_norm``.

    Parameters without a gradient are left out. Nothing waits for the device.

    Args:
        parameters: owners of the gradients, on one device, of any precisions.
        max_norm: largest norm, or None to leave the gradients as they are.
        all_reduce_sum: adds a scalar up over the ranks, when each holds a part of every gradient.

    Returns:
        The norm before clipping, a scalar; it is finite only if every gradient is.
    """
    # this process holds a part of a sharded gradient only
    gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients)  # few kernels, not one for each parameter
    # in float64: the norm decides whether a step is finite, and its square may exceed float32
    total = torch.linalg.vector_norm(
        torch.stack([norm.to(torch.float64) for norm in norms])
    )
    if all_reduce_sum is not None:
        total = all_reduce_sum(total.square()).sqrt()
    if max_norm is not None:
        # a factor of 1 is applied as well: a condition on it would make the host wait
        factor = (max_norm / (total + NORM_GUARD)).clamp(max=1.0)
        for dtype in {g.dtype for g in gradients}:
            torch._foreach_mul_(
                [g for g in gradients if g.dtype == dtype], factor.to(dtype)
            )
    return total


def guarded_step(
    optimizer: torch.optim.Optimizer, found_inf: Tensor, number: int | Tensor = 1
) -> None:
    """Take an optimizer step, unless ``found_inf`` is 1.

    Then weights, moments and counters stay as they are. The device decides, the host does not wait
    for it.

    Args:
        optimizer: one from :func:`build_optimizer`.
        found_inf: scalar on the device of the parameters, 1 to skip the step, else 0.
        number: of the step in the run, from 1, by which SOAP knows when its bases are due.
    """
    local = _local(optimizer)
    assert isinstance(local, GuardedOptimizer) or local.defaults["fused"], (
        "the step would not be skipped"
    )
    if isinstance(local, GuardedOptimizer):
        local.number = number
    elif found_inf.is_cuda:
        # torch refuses to capture fused steps without this mark, and warns of eager ones with it
        for group in local.param_groups:
            group["capturable"] = torch.cuda.is_current_stream_capturing()
    # The fused kernels of torch look for this attribute, which is how torch.amp.GradScaler skips a
    # step. It is removed afterwards, so that a step without this function is never skipped.
    local.found_inf = found_inf.detach().to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del local.found_inf  # type: ignore[attr-defined]


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    take: Take | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return a copy in host memory of the whole state.

    It is ``{"type": name, "state": {parameter: {key: tensor}}}``. Hyperparameters and the learning
    rate are not in it: they follow from the config and the step.
    When the state is sharded, every rank must call this; rank 0 gets all of it.

    Args:
        optimizer: one from :func:`build_optimizer`.
        named_parameters: those that it was made for.
        take: what this rank saves of each tensor; copies of whole ones if None.
        group: of all ranks, through whose host memory rank 0 gets a state that is sharded; the
            default group if None.
    """
    local, take = _local(optimizer), take or WholeTensors()
    # at ZeRO stage 1 a rank has the state of its own parameters only, and no other rank has it:
    # `owned` saves it from whichever rank that is
    shared = local is not optimizer
    read = take.owned if shared else take
    state: dict[str, Any] = {}
    for name, p in dict(named_parameters).items():
        for key, value in local.state.get(p, {}).items():
            copy = read(value)
            if copy is not None:  # None: another rank saves it
                state.setdefault(name, {})[key] = copy
    # a file is written by rank 0, which needs the parts of all ranks; shards are written by each
    if shared and isinstance(take, WholeTensors):
        parts: list[Any] | None = (
            [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        )
        dist.gather_object(state, parts, group=group)
        state = {
            name: tensors for part in parts or [] for name, tensors in part.items()
        }
    return {"type": type(local).__name__, "state": state}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    state: Mapping[str, Any],
) -> None:
    """Copy a state made by :func:`optimizer_state` into an optimizer.

    Its parameters have the same names. The state must be whole on every rank, however it was or
    will be sharded. Parameters that it names under ``new`` (of tasks that the checkpoint does not
    have) keep the state that the optimizer has.

    Raises:
        CheckpointError: if the state is of another optimizer or other parameters; nothing is
            changed then.
    """
    local, new = _local(optimizer), state.get("new", ())
    trained = {
        name: p
        for name, p in dict(named_parameters).items()
        if p.requires_grad and name not in new
    }
    check_state_type(state, type(local).__name__)
    # The shapes of the full state, of which this rank may hold a part, from a state that is built
    # anew on the meta device: it has shapes and no memory.
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    expected: dict[str, Sequence[int]] = {}
    for name, p in trained.items():
        like = torch.empty(p.shape, dtype=p.dtype, device="meta")
        if isinstance(local, GuardedOptimizer):
            first = local.first_state(like, group_of[p])
        else:
            first = adam_state(like, p.dtype)
        expected |= {
            f"{name}.{key}": tuple(value.shape) for key, value in first.items()
        }
    saved = {
        f"{name}.{key}": value
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    check_weights(expected, saved, OF_CHECKPOINT)
    # only then anything is changed; a rank takes its shard of what the checkpoint has whole
    for name, p in trained.items():
        for key, tensor in local.state.get(p, {}).items():
            local_shard(tensor).copy_(shard_like(state["state"][name][key], tensor))


def check_state_type(state: Mapping[str, Any], kind: str) -> None:
    """Check that ``state`` is of an optimizer of the type ``kind``.

    Raises:
        CheckpointError: if not.
    """
    if state.get("type") != kind:
        raise CheckpointError(
            f"{OF_CHECKPOINT}: it is of {state.get('type', 'an unknown optimizer')}, "
            f"optimizer.type is {kind}. Set it back, or start anew from the weights with "
            "--init-model."
        )


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that this rank updates itself."""
    return getattr(
        optimizer, "optim", optimizer
    )  # a ZeroRedundancyOptimizer has it as `optim`
