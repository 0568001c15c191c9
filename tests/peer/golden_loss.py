"""Write golden numbers of DeePMD-kit 3.2.0 for losses and learning rates, with the peer's python.

usage: DIR/bin/python tests/peer/golden_loss.py tests/golden
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from deepmd.dpmodel.utils.learning_rate import LearningRateCosine, LearningRateExp, LearningRateWSD
from deepmd.pt.loss.ener import EnergyStdLoss

MADE_BY = "DIR/bin/python tests/peer/golden_loss.py tests/golden  (DIR: setup of DeePMD-kit 3.2.0)"
START_LR, LR = 1e-3, 2.5e-4
SCHEDULES = [
    {"start_lr": 1e-3, **schedule}
    for schedule in (
        {"type": "exp", "num_steps": 1000},
        {"type": "exp", "num_steps": 1000, "decay_steps": 1000},
        {"type": "exp", "num_steps": 2500, "stop_lr": 1e-6, "decay_steps": 5000},
        {"type": "exp", "num_steps": 1000, "stop_lr": 1e-8, "decay_steps": 30},
        {"type": "exp", "num_steps": 1000, "start_lr": 2e-3, "stop_lr_ratio": 1e-3, "decay_steps": 30, "smooth": True},
        {"type": "exp", "num_steps": 1000, "decay_steps": 30, "decay_rate": 0.8, "stop_lr": 1e-5},
        {"type": "exp", "num_steps": 300, "decay_steps": 5000, "decay_rate": 0.8},
        {"type": "exp", "num_steps": 1000, "decay_steps": 50, "warmup_steps": 100},
        {"type": "exp", "num_steps": 1000, "stop_lr": 1e-7, "warmup_ratio": 0.137, "warmup_start_factor": 0.2},
        {"type": "exp", "num_steps": 9},
        {"type": "cosine", "num_steps": 1000},
        {"type": "cosine", "num_steps": 1000, "stop_lr": 1e-5, "warmup_steps": 77, "warmup_start_factor": 0.1},
        {"type": "wsd", "num_steps": 1000},
        {"type": "wsd", "num_steps": 1000, "stop_lr": 1e-6, "decay_phase_ratio": 0.3, "decay_type": "cosine",
         "warmup_steps": 50},
        {"type": "wsd", "num_steps": 1000, "stop_lr_ratio": 0.01, "decay_phase_ratio": 1.0, "decay_type": "linear",
         "warmup_ratio": 0.25},
        {"type": "wsd", "num_steps": 5, "decay_phase_ratio": 0.1},
    )
]  # fmt: skip
EF = {"start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1}
EFV = {**EF, "start_pref_v": 0.5, "limit_pref_v": 2}
LOSSES = {
    "default": EF,
    "efv": EFV,
    "intensive": {**EFV, "intensive_ener_virial": True},
    "atomic": {**EFV, "start_pref_ae": 3, "limit_pref_ae": 1, "start_pref_pf": 7, "limit_pref_pf": 2},
    "relative": {**EFV, "relative_f": 0.3},
    "relative_pf": {**EFV, "relative_f": 0.3, "start_pref_pf": 7, "limit_pref_pf": 2},
    "mae_relative_pf": {**EFV, "relative_f": 0.3, "start_pref_pf": 7, "limit_pref_pf": 2, "loss_func": "mae"},
    "mae": {**EFV, "start_pref_ae": 3, "limit_pref_ae": 1, "loss_func": "mae"},
    "mae_pf": {**EFV, "start_pref_pf": 3, "limit_pref_pf": 1, "loss_func": "mae"},
    "mae_norm": {**EFV, "loss_func": "mae", "f_use_norm": True},
    "mae_intensive": {**EFV, "loss_func": "mae", "intensive_ener_virial": True},
    "mae_relative": {**EFV, "loss_func": "mae", "relative_f": 0.3},
    "huber": {**EFV, "use_huber": True, "start_pref_ae": 3, "limit_pref_ae": 1},
    "huber_three": {**EFV, "use_huber": True, "huber_delta": [0.1, 0.2, 0.3]},
    "huber_norm": {**EFV, "use_huber": True, "f_use_norm": True, "huber_delta": 0.4},
    "huber_intensive": {**EFV, "use_huber": True, "intensive_ener_virial": True},
}
BAD = {
    "huber_mae": {**EFV, "use_huber": True, "loss_func": "mae"},
    "huber_pf": {**EFV, "use_huber": True, "start_pref_pf": 1, "limit_pref_pf": 1},
    "huber_relative": {**EFV, "use_huber": True, "relative_f": 0.3},
    "norm_mse": {**EFV, "f_use_norm": True},
    "mae_norm_pf": {**EFV, "loss_func": "mae", "f_use_norm": True, "start_pref_pf": 1, "limit_pref_pf": 1},
    "mae_norm_relative": {**EFV, "loss_func": "mae", "f_use_norm": True, "relative_f": 0.3},
}


def schedule_numbers() -> dict:
    """Return for each schedule the values at some steps."""
    kinds = {"exp": LearningRateExp, "cosine": LearningRateCosine, "wsd": LearningRateWSD}
    out = []
    for config in SCHEDULES:
        given = {k: v for k, v in config.items() if k != "type"}
        if not given.keys() & {"stop_lr", "stop_lr_ratio"}:
            given["stop_lr"] = 5e-8  # the peer's default, filled in by its input checker
        schedule = kinds[config["type"]](**given)
        last = config["num_steps"]
        steps = sorted({*range(0, last + 1, max(1, last // 40)), last - 1, last, last + 3})
        out.append({"config": config, "steps": steps, "values": [float(schedule.value(s)) for s in steps]})
    return {"made_by": MADE_BY, "cases": out}


class Fixed(torch.nn.Module):
    """A model that predicts what it was given."""

    def __init__(self, prediction):
        super().__init__()
        self.prediction = prediction

    def forward(self, **_):
        """Return the prediction, whatever is requested."""
        return dict(self.prediction)


def loss_numbers() -> dict:
    """Return the data and for each loss the total and the displayed values (None for nan)."""
    rng = np.random.default_rng(5)
    frames, atoms = 3, 5
    shapes = {
        "energy": (frames, 1),
        "force": (frames, atoms, 3),
        "virial": (frames, 9),
        "atom_energy": (frames, atoms, 1),
    }
    prediction = {k: rng.normal(size=s) for k, s in shapes.items()}
    label = {k: prediction[k] + 0.3 * rng.normal(size=s) for k, s in shapes.items()}
    weight = rng.uniform(0, 2, size=(frames, atoms))
    results = {}
    for name, keys in [*LOSSES.items(), *BAD.items()]:
        for missing in ("", "virial", "energy", "force"):
            given = {k: torch.tensor(v) for k, v in label.items() if k != "atom_energy"}
            given["atom_ener"] = torch.tensor(label["atom_energy"])
            given["atom_pref"] = torch.tensor(np.repeat(weight[..., None], 3, -1))
            given |= {f"find_{k}": 0.0 if k == missing else 1.0 for k in list(given)}
            try:
                loss = EnergyStdLoss(starter_learning_rate=START_LR, **keys)
                model = Fixed({k: torch.tensor(v) for k, v in prediction.items()})
                _, total, shown = loss({"atype": torch.zeros(frames, atoms, dtype=torch.long)}, model, given, atoms, LR)
            except Exception as error:
                results[f"{name}/{missing}"] = {"loss": keys, "missing": missing, "error": repr(error)}
                print(name, missing, repr(error))
                continue
            shown = {k: float(v) for k, v in shown.items() if "l2_" not in k}
            known = {k: None if np.isnan(v) else v for k, v in sorted(shown.items())}
            results[f"{name}/{missing}"] = {"loss": keys, "missing": missing, "total": float(total), "shown": known}
    data = {"prediction": prediction, "label": label}
    return {
        "made_by": MADE_BY,
        "start_lr": START_LR,
        "lr": LR,
        "weight": weight.tolist(),
        **{k: {n: a.tolist() for n, a in v.items()} for k, v in data.items()},
        "results": results,
    }


def main(folder: str) -> None:
    """Write schedule.json and loss.json into ``folder``."""
    for name, numbers in (("schedule", schedule_numbers()), ("loss", loss_numbers())):
        Path(folder, f"{name}.json").write_text(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
