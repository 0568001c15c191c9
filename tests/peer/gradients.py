"""Loss (energy, force and virial) of one batch and its gradients by each parameter, here and in
DeePMD-kit.

Both read the ``.dp`` files of tests/golden, take the same labels, and give gradients under the
names of the file's
tree: the model is serialized once more with each parameter replaced by its gradient. A name with
``+hessian`` is its model with second derivatives in the loss as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peer_side

if TYPE_CHECKING:
    import torch

    from deepmd_ema.config import ModelConfig
    from deepmd_ema.data.source import Frame

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = {
    "start_pref_e": 0.02,
    "limit_pref_e": 1.0,
    "start_pref_f": 1000.0,
    "limit_pref_f": 1.0,
    "start_pref_v": 0.02,
    "limit_pref_v": 1.0,
}
START_LR, LR = 1e-3, 4e-4
SECOND = {"start_pref_h": 10.0, "limit_pref_h": 1.0}
HESSIAN, WITH_HESSIAN = (
    "hessian",
    "+hessian",
)  # the label; the end of the name of a case whose loss has it
NOISE = {
    "energy": 0.5,
    "force": 0.3,
    "virial": 0.4,
}  # eV, eV/angstrom, eV: how far the labels are from the model
LOSS, MASKED = (
    "loss",
    "loss of the atoms that have energies",
)  # beside the names of the tree; the latter of the peer


def summary(gradients: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Return two numbers of each array: its length, and its sum weighted by cosines, which notices
    other orders.
    """
    return {
        path: [
            float(np.linalg.norm(value)),
            float(value.ravel() @ np.cos(np.arange(value.size))),
        ]
        for path, value in gradients.items()
    }


def parameter_leaves(
    model: torch.nn.Module, tree: Callable[[], dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Return the gradient of each array of a model's tree that holds parameters, by its path; it
    ruins the model.

    Args:
        model: after a backward pass.
        tree: serializes the model as it is.
    """
    import torch

    with torch.no_grad():
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for p in model.parameters()
        ]
        for p in model.parameters():
            p.fill_(torch.nan)
        found = [path for path, value in _arrays(tree()) if np.isnan(value).any()]
        for p, gradient in zip(model.parameters(), gradients):
            p.copy_(gradient)
        arrays = dict(_arrays(tree()))
    return {path: arrays[path] for path in found}


def _arrays(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and a copy of every array of floats in nested dictionaries and lists."""
    if isinstance(tree, np.ndarray):
        if tree.dtype.kind == "f":
            yield path.lstrip("/"), tree.copy()
        return
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, (list, tuple))
        else ()
    )
    for name, child in children:
        yield from _arrays(child, f"{path}/{name}")


def batch_of(name: str) -> dict[str, np.ndarray | None]:
    """Return frames with labels near what the model predicts, and parameters if it takes some.

    Of 64 atoms, with Hessians, which have 36,864 numbers then, of seven. Images at exactly equal
    distances, as in ``triclinic``, are in any order in the peer.
    """
    system = "molecule" if name.endswith(WITH_HESSIAN) else "grid"
    systems, predicted = (
        np.load(GOLDEN / "systems.npz"),
        np.load(GOLDEN / f"{name.removesuffix(WITH_HESSIAN)}.npz"),
    )
    coord, kinds, box = (systems[f"{system}_{key}"] for key in ("coord", "type", "box"))
    frames, atoms = len(coord), len(kinds)
    rng = np.random.default_rng(23)
    labels = {key: predicted[f"{system}_{key}"] for key in NOISE}
    labels = {
        key: value + NOISE[key] * rng.normal(size=value.shape)
        for key, value in labels.items()
    }
    if name.endswith(WITH_HESSIAN):
        second = rng.normal(size=(frames, 3 * atoms, 3 * atoms))
        labels[HESSIAN] = second + second.transpose(0, 2, 1)
    cells = box.reshape(-1, 3, 3) if box.size else None
    return {
        "coord": coord.reshape(frames, atoms, 3),
        "types": kinds.astype(np.int64),
        "box": cells,
    } | labels


def _conditions(
    numb_fparam: int, numb_aparam: int, frames: int, atoms: int
) -> dict[str, np.ndarray]:
    found = {}
    if numb_fparam:
        found["fparam"] = 0.1 * np.arange(frames * numb_fparam, dtype=float).reshape(
            frames, numb_fparam
        )
    if numb_aparam:
        found["aparam"] = 0.01 * np.arange(
            frames * atoms * numb_aparam, dtype=float
        ).reshape(frames, atoms, -1)
    return found


def frames_of(config: ModelConfig, data: dict[str, Any]) -> list[Frame]:
    """Return the frames of a system with labels and parameters, as a model reads them."""
    from deepmd_ema.config.labels import LABELS
    from deepmd_ema.data.source import Frame

    fitting = config.fitting_net
    more = _conditions(
        fitting.numb_fparam, fitting.numb_aparam, *data["coord"].shape[:2]
    )
    own = [key for key in (*NOISE, HESSIAN) if key in data]
    frames = []
    for k, coord in enumerate(data["coord"]):
        labels = {
            key: data[key][k].reshape(LABELS[key].shape_in_frame(len(coord)))
            for key in own
        }
        box = None if data["box"] is None else data["box"][k]
        frames.append(
            Frame(
                coord,
                data["types"],
                box,
                labels,
                **{key: value[k] for key, value in more.items()},
            )
        )
    return frames


def our_gradients(name: str) -> dict[str, np.ndarray]:
    """Return loss and gradients as a training step computes them."""
    from deepmd_ema.config.schema.optim import EnerLossConfig
    from deepmd_ema.data.collate import collate
    from deepmd_ema.distributed.world import World
    from deepmd_ema.interop.dp import model_tree, read_dp
    from deepmd_ema.training.loss import EnergyLoss

    data = batch_of(name)
    config, model, _ = read_dp(GOLDEN / f"{name.removesuffix(WITH_HESSIAN)}.dp")
    batch = collate(frames_of(config, data), model.layout)
    model.train()
    loss = EnergyLoss(
        EnerLossConfig(**SHARED, **(SECOND if HESSIAN in data else {})),
        START_LR,
        World(),
    )
    total, _ = loss(model(batch, **loss.needs(batch)), batch, LR)
    total.backward()
    return {LOSS: np.array(total.item())} | parameter_leaves(
        model, lambda: model_tree(model, config)
    )


def peer_gradients(name: str) -> dict[str, np.ndarray]:
    """Return loss and gradients of DeePMD-kit's model and loss; runs in its environment.

    The per-atom mask is set to one: its own is of integers, so that it divides by the number of
    atoms in float32, and it leaves atoms of ``atom_exclude_types`` out of the loss, which is also
    returned.
    """
    import torch
    from deepmd.pt.loss.ener import EnergyStdLoss

    data = batch_of(name)
    model = peer_side.read_model(
        str(GOLDEN / f"{name.removesuffix(WITH_HESSIAN)}.dp")
    ).train()
    if HESSIAN in data:
        model.enable_hessian()
    frames, atoms = data["coord"].shape[:2]
    more = _conditions(model.get_dim_fparam(), model.get_dim_aparam(), frames, atoms)
    given = {
        "coord": torch.tensor(data["coord"]),
        "atype": torch.tensor(np.tile(data["types"], (frames, 1))),
        "box": None
        if data["box"] is None
        else torch.tensor(data["box"].reshape(frames, 9)),
        **{key: torch.tensor(value) for key, value in more.items()},
    }
    shapes = {
        "energy": (frames, 1),
        "force": (frames, atoms, 3),
        "virial": (frames, 9),
        HESSIAN: (frames, -1),
    }
    shapes = {key: shape for key, shape in shapes.items() if key in data}
    label = {
        key: torch.tensor(data[key].reshape(shape)) for key, shape in shapes.items()
    }
    label |= {f"find_{key}": 1.0 for key in shapes}
    loss = EnergyStdLoss(
        starter_learning_rate=START_LR, **SHARED, **(SECOND if HESSIAN in data else {})
    )

    def loss_with(mask: torch.Tensor) -> torch.Tensor:
        _, total, _ = loss(
            given, lambda **inputs: {**model(**inputs), "mask": mask}, label, atoms, LR
        )
        return total

    own = model(**given)[
        "mask"
    ].double()  # of integers; without the atoms of excluded types
    masked = {} if own.all() else {MASKED: np.array(loss_with(own).item())}
    total = loss_with(torch.ones_like(own))
    total.backward()
    return (
        {LOSS: np.array(total.item())}
        | masked
        | parameter_leaves(model, model.serialize)
    )
