"""Compute golden numbers again with DeePMD-kit 3.2.0.

The files hold the inputs too: a new case is a new input there.

usage: DIR/bin/python tests/golden/make.py PART ...   (DIR: an environment with DeePMD-kit)
       DIR/bin/python tests/golden/make.py model NAME [INPUT.json]

Parts are the functions below. ``model`` writes NAME.npz, what NAME.dp gives for the frames of
``systems.npz``; with a section ``model`` in INPUT.json it makes NAME.dp first, with all numbers
drawn at random.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import drawn
import numpy as np
import torch

sys.path.extend(
    str(Path(__file__).resolve().parents[1] / name) for name in ("peer", ".", "..")
)
import peer_side

HERE = Path(__file__).resolve().parent


def model(name: str, section: str = "") -> None:
    """NAME.npz, and NAME.dp of a section ``model``."""
    from deepmd.dpmodel.utils.serialization import load_dp_model

    job = {
        "out": str(HERE / name),
        "frames": str(HERE / "systems.npz"),
        "seed": 1,
        "one_mean": True,
    }
    job |= (
        {"input": json.loads(Path(section).read_text())}
        if section
        else {"file": str(HERE / f"{name}.dp")}
    )
    script = job.get("input") or load_dp_model(job["file"])["model_def_script"]
    parts = [
        part.get("fitting_net", {}) for part in (script, *script.get("models", []))
    ]
    job |= {
        key: max(part.get(key, 0) for part in parts)
        for key in ("numb_fparam", "numb_aparam")
    }
    np.savez(HERE / f"{name}.npz", **peer_side.answer(job))


def dpa4() -> None:
    """dpa4.json: numbers and projected gradients of DPA-4; it needs vesin-torch."""
    from deepmd.pt.model.model import get_model

    cases = json.loads((HERE / "dpa4.json").read_text())
    for case in cases.values():
        built = get_model(json.loads(json.dumps(case["model"]))).double().train()
        if "version" in case:
            built.atomic_model.descriptor.version_tensor.fill_(case["version"])
            built.atomic_model.descriptor.version = case["version"]
        drawn.fill(_named(built).items())
        case |= _with_gradients(built, drawn.frames(1))
    (HERE / "dpa4.json").write_text(json.dumps(cases) + "\n")


def dpa4c() -> None:
    """dpa4c.json: the same of DPA4C, calibrated by two frames; dpa4c.dp and dpa4c.pt are two of its
    models.
    """
    from deepmd.dpmodel.utils.serialization import save_dp_model
    from deepmd.pt_expt.model import get_model

    cases = json.loads((HERE / "dpa4c.json").read_text())
    coord, kinds, box = drawn.frames(2)
    for name, case in cases.items():
        built = get_model(json.loads(json.dumps(case["model"])))
        drawn.fill(_named(built).items())
        descriptor = built.atomic_model.descriptor
        descriptor.type_embedding.adam_type_embedding.data[-1] = 0
        data = {
            "coord": coord,
            "atype": np.tile(kinds, (2, 1)),
            "box": box.reshape(2, 9),
        }
        descriptor.compute_input_stats([data])
        case |= {
            "mean": descriptor.mean[-2 - descriptor.channels :][:2].tolist(),
            "stddev": descriptor.stddev.tolist(),
        }
        case |= _with_gradients(built.train(), (coord, kinds, box))
        if name == "small":
            state = {
                f"model.Default.{key}": tensor
                for key, tensor in built.state_dict().items()
            }
            state["_extra_state"] = {
                "model_params": case["model"],
                "train_infos": {"lr": 0.0, "step": 3},
            }
            torch.save({"model": state, "optimizer": None}, HERE / "dpa4c.pt")
        if name == "degree_4":
            save_dp_model(
                str(HERE / "dpa4c.dp"),
                {"model": built.serialize(), "model_def_script": case["model"]},
            )
    (HERE / "dpa4c.json").write_text(json.dumps(cases) + "\n")


def _named(built: Any) -> dict[str, Any]:
    return {
        name.removeprefix("atomic_model."): p for name, p in built.named_parameters()
    }


def _with_gradients(built: Any, frames: tuple) -> dict[str, Any]:
    """Return numbers of the first frame, and projections of the gradients of a loss by the
    parameters.
    """
    coord, kinds, box = frames
    found, named = _evaluated(built, coord[0], kinds, box[0]), _named(built)
    gradients = torch.autograd.grad(
        drawn.loss_of(*found.values()), list(named.values()), materialize_grads=True
    )
    numbers = {key: value.detach().tolist() for key, value in found.items()}
    return numbers | {"gradients": drawn.projections(dict(zip(named, gradients)))}


def _evaluated(built: Any, coord: Any, kinds: Any, box: Any) -> dict[str, Any]:
    """Return energy, force (N, 3) and virial (9,) of one frame."""
    coord, box = (torch.tensor(np.asarray(part, float)[None]) for part in (coord, box))
    found = built(
        coord.requires_grad_(True),
        torch.tensor(np.asarray(kinds)[None]),
        box=box.reshape(1, 9),
    )
    return {
        "energy": found["energy"].sum(),
        "force": found["force"][0],
        "virial": found["virial"].reshape(9),
    }


def dpa4_files() -> None:
    """dpa4_files/numbers.json: what checkpoints and trees of models dpa4 give."""
    path = HERE / "dpa4_files" / "numbers.json"
    numbers = json.loads(path.read_text())
    for name, frame in numbers.items():
        built = peer_side.read_model(str(path.with_name(name))).eval()
        found = _evaluated(built, *(frame[key] for key in ("coord", "types", "box")))
        frame |= {key: value.detach().tolist() for key, value in found.items()}
    path.write_text(json.dumps(numbers))


def checkpoints() -> None:
    """peer_checkpoints/predictions.npz: what checkpoints of DeePMD-kit's trainings give."""
    from deepmd.infer import DeepPot
    from deepmd.main import main as dp

    folder = HERE / "peer_checkpoints"
    found = dict(np.load(folder / "predictions.npz"))
    for name in sorted(
        key.removesuffix("_energy") for key in found if key.endswith("_energy")
    ):
        stem, _, head = name.partition("_heads_")
        path = str(folder / f"{stem}{'_heads' * bool(head)}.pt")
        with tempfile.TemporaryDirectory() as scratch:
            if name == "pt_expt":
                frozen = f"{scratch}/model.pte"
                dp(["--pt-expt", "freeze", "-c", path, "-o", frozen])
                path = frozen
            potential = DeepPot(path, **({"head": head} if head else {}))
        answer = potential.eval(
            found["coord"].reshape(1, -1), found["box"].reshape(1, 9), found["types"]
        )
        found |= {
            f"{name}_{key}": value
            for key, value in zip(("energy", "force", "virial"), answer)
        }
    np.savez(folder / "predictions.npz", **found)


def gradients() -> None:
    """gradients.json: loss of a batch, and two numbers of its gradient by each array of
    parameters.
    """
    from gradients import peer_gradients, summary

    found = json.loads((HERE / "gradients.json").read_text())
    for name in found["models"]:
        found["models"][name] = summary(peer_gradients(name))
    (HERE / "gradients.json").write_text(json.dumps(found, indent=0) + "\n")


def bridging() -> None:
    """bridging.json: distances as a network sees them, weights, gates, pair energies."""
    from deepmd.pt.model.descriptor.sezm_nn.edge_cache import compute_edge_src_gate
    from deepmd.pt.model.descriptor.sezm_nn.radial import BridgingSwitch, InnerClamp
    from deepmd.pt.model.model.sezm_model import InnerPotential

    found = json.loads((HERE / "bridging.json").read_text())
    window = found["inner"], found["outer"]
    clamp, switch = InnerClamp(*window), BridgingSwitch(*window)
    distance = torch.tensor(found["distance"], requires_grad=True)
    clamped = clamp(distance)
    slope = torch.autograd.grad(clamped.sum(), distance)[0]
    found |= {
        "clamped": clamped.tolist(),
        "slope": slope.tolist(),
        "switch": switch(distance).tolist(),
    }
    source, length = (torch.tensor(found["gate"][key]) for key in ("source", "length"))
    gate = compute_edge_src_gate(
        edge_len=length[:, None], src=source, n_nodes=3, bridging_switch=switch
    )
    found["gate"]["value"] = gate[:, 0].tolist()
    elements = list(dict.fromkeys(name.partition("-")[0] for name in found["pairs"]))
    potential = InnerPotential(elements, "ZBL")
    for name, pair in found["pairs"].items():
        kinds = torch.tensor([elements.index(element) for element in name.split("-")])
        pair["half energy"], pair["half slope"] = [], []
        for value in pair["distance"]:
            vector = torch.tensor([[value, 0.0, 0.0]], requires_grad=True)
            energy = potential(
                vector,
                torch.tensor([[1], [0]]),
                kinds,
                torch.ones(1, dtype=torch.bool),
                2,
            ).sum()
            pair["half energy"].append(energy.item())
            pair["half slope"].append(
                torch.autograd.grad(energy, vector)[0][0, 0].item()
            )
    (HERE / "bridging.json").write_text(json.dumps(found, indent=1))


def statistics() -> None:
    """statistics.npz: the ``stat_file`` of each case of statistics.json, every frame sampled."""
    from deepmd.main import main as dp
    from helpers import write_system

    known, values = json.loads((HERE / "statistics.json").read_text()), {}
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for name, options in known["systems"].items():
            write_system(name, **options)
        for name, case in known["cases"].items():
            training = {
                "training_data": {"systems": case["systems"], "batch_size": 1},
                "stat_file": f"stat_{name}",
                "numb_steps": 1,
                "seed": 1,
            }
            rate = {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-6}
            config = {
                "model": case["model"],
                "learning_rate": rate,
                "loss": {"type": "ener"},
                "training": training,
            }
            Path("input.json").write_text(json.dumps(config))
            dp(["--pt", "train", "input.json", "--skip-neighbor-stat"])
            for file in Path(f"stat_{name}", "O H").rglob("*"):
                if file.is_file() and file.name != "observed_type":
                    values[f"{name}/{file.name}"] = np.load(file.open("rb"))
    np.savez(HERE / "statistics.npz", **values)


def schedule() -> None:
    """schedule.json: learning rates at some steps."""
    from deepmd.dpmodel.utils.learning_rate import (
        LearningRateCosine,
        LearningRateExp,
        LearningRateWSD,
    )

    kinds = {
        "exp": LearningRateExp,
        "cosine": LearningRateCosine,
        "wsd": LearningRateWSD,
    }
    found = json.loads((HERE / "schedule.json").read_text())
    for case in found["cases"]:
        given = {key: value for key, value in case["config"].items() if key != "type"}
        if not given.keys() & {"stop_lr", "stop_lr_ratio"}:
            given["stop_lr"] = 5e-8  # its default, which its input checker fills in
        curve = kinds[case["config"]["type"]](**given)
        case["values"] = [float(curve.value(step)) for step in case["steps"]]
    (HERE / "schedule.json").write_text(json.dumps(found) + "\n")


def loss() -> None:
    """loss.json: total and displayed values of losses (None for nan), each with and without a
    label.
    """
    from deepmd.pt.loss.ener import EnergyStdLoss

    found = json.loads((HERE / "loss.json").read_text())
    predicted, given = (
        {k: torch.tensor(v) for k, v in found[kind].items()}
        for kind in ("prediction", "label")
    )
    given["atom_ener"] = given.pop("atom_energy")
    given["atom_pref"] = torch.tensor(found["weight"])[..., None].repeat(1, 1, 3)
    frames, atoms = given["force"].shape[:2]
    for case in found["results"].values():
        labels = given | {f"find_{key}": float(key != case["missing"]) for key in given}
        types = {"atype": torch.zeros(frames, atoms, dtype=torch.long)}
        try:
            energy_loss = EnergyStdLoss(
                starter_learning_rate=found["start_lr"], **case["loss"]
            )
            _, total, shown = energy_loss(
                types, lambda **_: dict(predicted), labels, atoms, found["lr"]
            )
        except Exception as error:
            case["error"] = repr(error)
            continue
        shown = {
            key: float(value)
            for key, value in sorted(shown.items())
            if "l2_" not in key
        }
        case |= {
            "total": float(total),
            "shown": {k: None if np.isnan(v) else v for k, v in shown.items()},
        }
    (HERE / "loss.json").write_text(json.dumps(found) + "\n")


def optimizers() -> None:
    """optim/steps.npz: parameters (w) after steps by gradients (g), for each case of
    optim/cases.json.
    """
    from deepmd.pt.optimizer import AdaMuonOptimizer, HybridMuonOptimizer

    kinds = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    kinds |= {"AdaMuon": AdaMuonOptimizer, "HybridMuon": HybridMuonOptimizer}
    found = dict(np.load(HERE / "optim" / "steps.npz"))
    names = [key[2:] for key in found if key.startswith("w/")]
    for case, (kind, options) in json.loads(
        (HERE / "optim" / "cases.json").read_text()
    ).items():
        named = {
            name: torch.nn.Parameter(torch.tensor(found[f"w/{name}"])) for name in names
        }
        options = dict(options)
        if "adam_beta1" in options:
            betas = options.pop("adam_beta1"), options.pop("adam_beta2")
            options["betas" if kind.startswith("Adam") else "adam_betas"] = betas
        if kind == "HybridMuon":
            options["named_parameters"] = list(named.items())
        optimizer = kinds[kind](list(named.values()), lr=1e-3, **options)
        for step in range(4):
            for name, p in named.items():
                p.grad = torch.tensor(found[f"g/{name}/{step}"])
            optimizer.step()
        found |= {f"{case}/{name}": p.detach().numpy() for name, p in named.items()}
    np.savez_compressed(HERE / "optim" / "steps.npz", **found)


def kalman() -> None:
    """optim/lkf.npz: parameters after updates of the Kalman filter, alone and by energies and
    forces.

    ``wrapper/``: of a model whose parameters are the energies (F, 1) and forces (F, N, 3)
    themselves, after an update of energies and four of forces, and how often each force counted in
    each of these.
    """
    from deepmd.pt.optimizer import KFOptimizerWrapper, LKFOptimizer

    found = dict(np.load(HERE / "optim" / "lkf.npz"))
    named = {
        key: torch.nn.Parameter(torch.tensor(v))
        for key, v in found.items()
        if key.startswith("filter/w/")
    }
    optimizer = LKFOptimizer(list(named.values()), block_size=10)
    for step in range(5):
        optimizer.set_grad_prefactor(found[f"filter/divisor/{step}"])
        for key, p in named.items():
            p.grad = torch.tensor(found[f"{key.replace('/w/', '/g/')}/{step}"])
        optimizer.step(torch.tensor(found[f"filter/error/{step}"]))
    found |= {
        key.replace("/w/", "/after/"): p.detach().numpy() for key, p in named.items()
    }

    class Itself(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("energy", "force"):
                setattr(
                    self,
                    name,
                    torch.nn.Parameter(torch.tensor(found[f"wrapper/w/{name}"])),
                )

        def forward(self, **_: Any) -> Any:
            return {"energy": self.energy * 1, "force": self.force * 1}, None, None

    seen: list[np.ndarray] = []

    class Watched(LKFOptimizer):
        def step(self, error: Any) -> None:
            seen.extend(
                p.grad.numpy().copy()
                for p in self.param_groups[0]["params"]
                if p.grad is not None
            )
            super().step(error)

    itself = Itself()
    optimizer = Watched(itself.parameters(), block_size=100)
    wrapper, shape = (
        KFOptimizerWrapper(itself, optimizer, 24, 6, False),
        itself.force.shape,
    )
    frames = {
        "coord": torch.zeros(shape),
        "atype": torch.zeros(shape[:2], dtype=torch.int64),
        "box": None,
    }
    wrapper.update_energy(frames, torch.tensor(found["wrapper/energy"]), 1.5)
    seen.clear()
    wrapper.update_force(frames, torch.tensor(found["wrapper/force"]), 3.0)
    counts = [
        np.rint(np.abs(one[0, :, 0]) / 3.0).astype(int) for one in seen if one.ndim == 3
    ]
    found |= {f"wrapper/counts/{k}": count for k, count in enumerate(counts)}
    found |= {
        f"wrapper/after/{name}": p.detach().numpy()
        for name, p in itself.named_parameters()
    }
    np.savez_compressed(HERE / "optim" / "lkf.npz", **found)


def quantities() -> None:
    """quantities/: values of models of other quantities, losses, statistics, and what a checkpoint
    gives.
    """
    from deepmd.dpmodel.utils.serialization import load_dp_model
    from deepmd.infer.deep_dipole import DeepDipole
    from deepmd.pt import loss as losses
    from deepmd.pt.model.model import BaseModel
    from deepmd.pt.utils.stat import compute_output_stats

    folder = HERE / "quantities"
    for file in folder.glob("*.dp"):
        tree = load_dp_model(str(file))
        built, fitting = (
            BaseModel.deserialize(tree["model"]).double().eval(),
            tree["model_def_script"]["fitting_net"],
        )
        arrays, is_tensor = (
            dict(np.load(file.with_suffix(".npz"))),
            fitting["type"] in ("dipole", "polar"),
        )
        for system in ("cell", "open"):
            inputs = {
                name: arrays.get(f"{system}_{name}")
                for name in ("coord", "atype", "box", "fparam", "aparam")
            }
            found = built(
                **{
                    name: torch.tensor(value)
                    for name, value in inputs.items()
                    if value is not None
                }
            )
            name = fitting.get("property_name", fitting["type"])
            names = (f"global_{name}", name) if is_tensor else (name, f"atom_{name}")
            for key, output in zip(("global", "atomic"), names):
                arrays[f"{system}_{key}"] = found[output].detach().numpy()
        np.savez_compressed(file.with_suffix(".npz"), **arrays)

    class Answer(torch.nn.Module):
        def __init__(self, case: dict[str, Any]) -> None:
            super().__init__()
            self.case, self.atomic_model = case, torch.nn.Module()
            for name in ("out_bias", "out_std"):
                self.atomic_model.register_buffer(name, torch.tensor(case.get(name, 0)))

        def forward(self) -> dict[str, torch.Tensor]:
            return {
                key: torch.tensor(value)
                for key, value in self.case["prediction"].items()
            }

    cases = json.loads((folder / "losses.json").read_text())
    for case in cases:
        labels = {name: torch.tensor(value) for name, value in case["label"].items()}
        labels |= {
            f"find_{name}": find for name, find in zip(case["label"], case["find"])
        }
        evaluated = getattr(losses, case["loss"])(**case["options"])
        _, value, shown = evaluated({}, Answer(case), labels, 4, case["learning_rate"])
        case |= {
            "value": float(value),
            "shown": {name: float(number) for name, number in shown.items()},
        }
    (folder / "losses.json").write_text(json.dumps(cases) + "\n")

    arrays = dict(np.load(folder / "statistics.npz"))
    for case, (name, of_frames, of_atoms, options) in json.loads(
        str(arrays["cases"])
    ).items():
        samples, exclude = [], options.pop("exclude", [])
        for system in sorted({*of_frames, *of_atoms}):
            atype = arrays[f"{system}_atype"]
            counts = [
                [len(kinds), len(kinds), *np.bincount(kinds, minlength=3)]
                for kinds in atype
            ]
            sample = {
                key: torch.tensor(arrays[f"{system}_{key}"])
                for key in (name, f"atom_{name}", "atype")
            }
            sample |= {"natoms": torch.tensor(counts), "atom_exclude_types": exclude}
            samples.append(
                {
                    **sample,
                    f"find_{name}": system in of_frames,
                    f"find_atom_{name}": system in of_atoms,
                }
            )
        bias, std = compute_output_stats(samples, 3, [name], **options)
        arrays |= {f"{case}_bias": bias[name].numpy(), f"{case}_std": std[name].numpy()}
    np.savez_compressed(folder / "statistics.npz", **arrays)

    arrays = dict(np.load(folder / "checkpoint.npz"))
    where = arrays["coord"], arrays["box"], arrays["atype"]
    dipoles = DeepDipole(str(folder / "checkpoint.pt"))
    arrays |= {
        "global": dipoles.eval(*where, atomic=False),
        "atomic": dipoles.eval(*where),
    }
    np.savez(folder / "checkpoint.npz", **arrays)


PARTS = (
    dpa4,
    dpa4c,
    dpa4_files,
    checkpoints,
    gradients,
    bridging,
    statistics,
    schedule,
    loss,
    optimizers,
    kalman,
    quantities,
)

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if sys.argv[1:2] == ["model"]:
        model(*sys.argv[2:])
    for part in PARTS:
        if part.__name__ in sys.argv[1:]:
            part()
