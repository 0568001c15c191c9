"""Optimizers by name, steps that a flag on the device can call off, and optimizer state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.errors import CheckpointError
from deepmd_ema.optim.hybrid_muon import HybridMuon, routed
from deepmd_ema.optim.muon import AdaMuon

if TYPE_CHECKING:
    from deepmd_ema import config as sections

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = 1e-8
SHOWN = 8


def build_optimizer(
    config: sections.Adam | sections.AdamW | sections.AdaMuon | sections.HybridMuon,
    named_parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` describes, over the parameters that are trained.

    Its state stands from the start, so that a step called off leaves all of it as it was, and the learning rate is 0
    until the caller sets it in ``param_groups``. Adam and AdamW run as one fused kernel.

    Args:
        config: the section ``optimizer``.
        named_parameters: parameters by name; those with ``requires_grad`` off are left out.
        device: where the parameters are; the step counters stay there as well, so that no step waits.
    """
    trained = {name: p for name, p in _items(named_parameters) if p.requires_grad}
    kind, parameters, settings = KINDS[config.type](config, trained)
    optimizer: torch.optim.Optimizer = kind(parameters, lr=0.0, **settings)
    if settings.get("fused"):
        for p in trained.values():
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                **{name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in MOMENTS},
            }
    return optimizer


def guarded_step(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
    """Take an optimizer step, unless ``found_inf`` is 1: then weights, moments and counters stay as they are.

    The device decides, the host does not wait for it.

    Args:
        optimizer: one from :func:`build_optimizer`.
        found_inf: scalar on the device of the parameters, 1 to call the step off, else 0.
    """
    # the fused kernels of torch look for this attribute, which is how torch.amp.GradScaler calls a step off
    assert optimizer.defaults.get("fused") or getattr(optimizer, "knows_found_inf", False), "it would not be called off"
    optimizer.found_inf = found_inf.detach().to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer,
    named_parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> dict[str, Any]:
    """Return a copy in host memory of the whole state: ``{"type": name, "state": {parameter: {key: tensor}}}``.

    Hyperparameters and the learning rate are not in it: they follow from the config and the step.
    """
    state = {
        name: {key: value.detach().to("cpu", copy=True) for key, value in optimizer.state[p].items()}
        for name, p in _items(named_parameters)
        if p in optimizer.state
    }
    return {"type": type(optimizer).__name__, "state": state}


def load_optimizer_state_by_name(
    optimizer: torch.optim.Optimizer,
    named_parameters: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
    state: Mapping[str, Any],
) -> None:
    """Copy a state made by :func:`optimizer_state_by_name` into an optimizer over parameters of the same names.

    Raises:
        CheckpointError: if the state is of another optimizer or other parameters; nothing is changed then.
    """
    own = {name: optimizer.state[p] for name, p in _items(named_parameters) if p in optimizer.state}
    problems = _differences(type(optimizer).__name__, own, state)
    if problems:
        raise CheckpointError([f"optimizer state of the checkpoint: {problem}" for problem in problems])
    for name, tensors in own.items():
        for key, tensor in tensors.items():
            tensor.copy_(state["state"][name][key])


Recipe = tuple[type[Any], list[Any], dict[str, Any]]
"""Class of an optimizer, its parameters or groups of them, and its options."""


def _fused(config: sections.Adam | sections.AdamW, trained: Mapping[str, nn.Parameter]) -> Recipe:
    settings = {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": EPS,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    return getattr(torch.optim, config.type), list(trained.values()), settings


def _adamuon(config: sections.AdaMuon, trained: Mapping[str, nn.Parameter]) -> Recipe:
    return AdaMuon, list(trained.values()), _muon_settings(config)


def _hybrid_muon(config: sections.HybridMuon, trained: Mapping[str, nn.Parameter]) -> Recipe:
    more = {"mode": config.muon_mode, "gram": config.enable_gram, "magma": config.magma_muon}
    return HybridMuon, routed(trained, config.muon_mode), {**_muon_settings(config), **more}


def _muon_settings(config: sections.AdaMuon | sections.HybridMuon) -> dict[str, Any]:
    return {
        "momentum": config.momentum,
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.weight_decay,
        "lr_adjust": config.lr_adjust,
        "lr_adjust_coeff": config.lr_adjust_coeff,
    }


KINDS: dict[str, Callable[..., Recipe]] = {
    "Adam": _fused,
    "AdamW": _fused,
    "AdaMuon": _adamuon,
    "HybridMuon": _hybrid_muon,
}


def _differences(kind: str, own: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> list[str]:
    if state.get("type") != kind:
        return [
            f"it is of {state.get('type', 'an unknown optimizer')}, optimizer.type is {kind}. Set it back, or start "
            "anew from the weights with --init-model."
        ]
    given = {f"{name}.{key}": value for name, tensors in state["state"].items() for key, value in tensors.items()}
    wanted = {f"{name}.{key}": value for name, tensors in own.items() for key, value in tensors.items()}
    reshaped = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted.keys() & given.keys()
        if given[name].shape != wanted[name].shape
    ]
    lists = {
        "missing": sorted(wanted.keys() - given.keys()),
        "not in this model": sorted(given.keys() - wanted.keys()),
        "of another shape": sorted(reshaped),
    }
    return [f"{_shorten(names)} {what}." for what, names in lists.items() if names]


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _items(
    named: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
) -> Iterable[tuple[str, nn.Parameter]]:
    return named.items() if isinstance(named, Mapping) else named
