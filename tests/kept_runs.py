"""The files of a run that keeps snapshots of averages, made from a random walk of weights instead
of training.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from helpers import tiny_input, training_parts
from infer_models import random_model

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.training.saver import StateBuilder, narrowed

AVERAGING = [
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True},
    {"name": "p10", "type": "power", "sigma_rel": 0.10, "snapshots": True},
    {"name": "p07", "type": "power", "sigma_rel": 0.07},
    {"name": "fast", "type": "ema", "decay": 0.9},
]
KEPT = ("p05", "p10")


def profiles(**common):
    """Return the averages of ``AVERAGING``, one of equal weights, and one that does not begin in
    the run.
    """
    powers = [
        PowerProfile.from_sigma_rel(f"p{s:02d}", s / 100, **common) for s in (5, 10, 7)
    ]
    return [
        *powers,
        EmaProfile("fast", decay=0.9),
        SwaProfile("flat"),
        SwaProfile("late", start_step=10**6),
    ]


def write_kept_run(
    folder,
    validation,
    *,
    steps=400,
    every=20,
    run="run-1",
    seed=0,
    size=0.002,
    training=None,
    **common,
):
    """Write the training checkpoint and the snapshots of a run into ``folder`` and return the
    folder.

    The bias of the output moves too, though nothing averages it. ``training`` is merged into the
    training checkpoint.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    relative = [os.path.relpath(system, folder) for system in validation or ()]
    values = tiny_input(
        ["train"],
        relative or None,
        training__averaging=AVERAGING,
        training__numb_steps=steps,
    )
    config = config_from_dict(values)
    (folder / "input.json").write_text(json.dumps(values))
    model, generator = random_model(config, seed), torch.Generator().manual_seed(seed)
    bank = AverageBank(model, profiles(**common))
    payloads = StateBuilder(model, bank, to_dict(config), 0.9, run, steps)
    for step in range(1, steps + 1):
        with torch.no_grad():
            for tensor in model.parameters():
                tensor += size * torch.randn(
                    tensor.shape, generator=generator, dtype=torch.float64
                )
            model.out_bias.copy_(torch.full_like(model.out_bias, -0.001 * step))
        bank.update()
        for name in KEPT if step % every == 0 else ():
            if bank.info(name)["updates"]:
                path = folder / "snapshots" / f"model_{name}.ckpt-{step}.pt"
                checkpoint.save(
                    path,
                    narrowed(
                        payloads.snapshot(name, step), dict(model.named_buffers())
                    ),
                )
    more = {**training_parts(), **(training or {})}
    checkpoint.save(
        folder / f"model.ckpt-{steps}.pt", payloads.training(steps, lambda *_: more)
    )
    (folder / "checkpoint").write_text(f"model.ckpt-{steps}.pt\n")
    return folder


def shares_of(profile):
    """Return the share of the weights at each update in an average, (updates,)."""
    return profile.shares_at(
        np.arange(1, profile.updates + 1, dtype=np.float64), profile.updates
    )
