"""Model files with random weights, as a run would write them, without a run."""

import pytest
import torch
from helpers import tiny_input, training_parts

from deepmd_ema import __version__, checkpoint
from deepmd_ema.config import config_from_dict, to_dict
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.build import build_model

STEP = 7
FACTS = {"decay": 0.99, "updates": 7, "mean_age": 4.5}


def random_model(config, seed=0):
    """Return the model of ``config.model`` with statistics and biases that a wrong formula cannot
    hide behind.
    """
    model = build_model(config.model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            draw = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "mean":
                tensor[..., 0] = 0.05 * draw[:, :1, 0]
            elif leaf == "stddev":
                tensor[..., 0] = 0.1 + 0.2 * draw[:, :1, 0]
                tensor[..., 1:] = 0.2 + 0.3 * draw[:, :1, 1:2]
            elif leaf == "out_bias":
                tensor.copy_(draw - 4)
            elif name in dict(model.named_parameters()):
                tensor += 0.1 * (draw - 0.5)
    return model.eval()


@torch.no_grad()
def let_slots_differ(model, seed=11):
    """Give each slot of the environment matrix its own mean and spread, as files of DeePMD-kit may
    have them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_buffers():
        draw = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(
            tensor
        )
        if name.endswith(".mean"):
            tensor[..., 0] = 0.1 + 0.05 * draw[..., 0]
        elif name.endswith(".stddev"):
            tensor.copy_(0.15 + 0.1 * draw)


def tiny_config(**changes):
    """Return the config of a tiny run; no file has to exist."""
    return config_from_dict(
        tiny_input(["train"], ["valid"], **{"training__enable_ema": True, **changes})
    )


def write_run(folder, *, averages=True, seed=0, **changes):
    """Write the checkpoint and the averaged file of step 7 of a run, with link and pointer; return
    the two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    live, shadow = random_model(config, seed), random_model(config, seed + 100)
    weights = dict(live.state_dict())
    averaged = {name: p.detach() for name, p in shadow.named_parameters()}
    head = {
        "format": checkpoint.FORMAT,
        "version": __version__,
        "step": STEP,
        "config": to_dict(config),
        "min_nbor_dist": 0.9,
    }
    training = {
        **head,
        **training_parts(),
        "kind": "training",
        "weights": "live",
        "model": weights,
        "best": {"live": {"metric": "E:MAE", "records": [[0.0123, 5]]}},
    }
    if averages:
        training["averages"] = {
            "steps": STEP,
            "tasks": [""],
            "frozen": [],
            "profiles": {"ema": {**FACTS, "warmup": True, "weights": averaged}},
        }
    path, path_ema = (
        folder / f"model.ckpt-{STEP}.pt",
        folder / f"model_ema.ckpt-{STEP}.pt",
    )
    checkpoint.save(path, training)
    (folder / "model.ckpt.pt").symlink_to(path.name)
    (folder / "checkpoint").write_text(f"{path.name}\n")
    average = {"profile": "ema", "effective_decay": 0.5, **FACTS}
    checkpoint.save(
        path_ema,
        {
            **head,
            "kind": "average",
            "weights": "ema",
            "average": average,
            "model": {**weights, **averaged},
        },
    )
    return path, path_ema


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A live and an averaged file of one run."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def potential(run):
    return Potential(run[0], device="cpu")
