"""Write the results of DeePMD-kit's optimizers for random parameters and gradients.

Run it with the python of DeePMD-kit 3.2.0:  python make.py OUT.npz
Names: ``w/PARAMETER`` first values, ``g/PARAMETER/STEP`` gradients, ``CASE/PARAMETER`` values after the last step.
The cases are those of ``cases.json`` beside this file.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from deepmd.pt.optimizer import AdaMuonOptimizer, HybridMuonOptimizer

SHAPES = {
    "square": (5, 5),
    "wide": (4, 12),
    "tall": (20, 6),
    "row": (1, 6),
    "column": (6, 1),
    "vector": (4,),
    "scalar": (),
    "cube": (2, 3, 4),
    "thin": (3, 1, 4),
    "four": (2, 3, 4, 5),
    "large": (24, 40),
    "net.bias": (3, 4),
    "net.bias_list.3": (4, 4),
    "adam_matrix": (3, 3),
    "net.AdamW_matrix": (3, 3),
    "adamw_vector": (5,),
    "adam_net.matrix": (4, 4),
}
STEPS = 4
LR = 1e-3
CLASSES = {
    "Adam": torch.optim.Adam,  # the ones it uses
    "AdamW": torch.optim.AdamW,
    "AdaMuon": AdaMuonOptimizer,
    "HybridMuon": HybridMuonOptimizer,
}


def build(kind, parameters, options):
    options = dict(options)
    if "adam_beta1" in options:
        name = "betas" if kind.startswith("Adam") else "adam_betas"
        options[name] = (options.pop("adam_beta1"), options.pop("adam_beta2"))
    if kind == "HybridMuon":
        options["named_parameters"] = list(parameters.items())
    return CLASSES[kind](list(parameters.values()), lr=LR, **options)


def main(out):
    rng = np.random.default_rng(2026)
    start = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    gradients = [{name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    written = {f"w/{name}": value for name, value in start.items()}
    written |= {f"g/{name}/{k}": value for k, step in enumerate(gradients) for name, value in step.items()}
    cases = json.loads(Path(__file__).with_name("cases.json").read_text())
    for case, (kind, options) in cases.items():
        parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
        optimizer = build(kind, parameters, options)
        for step in gradients:
            for name, p in parameters.items():
                p.grad = torch.tensor(step[name])
            optimizer.step()
        written |= {f"{case}/{name}": p.detach().numpy() for name, p in parameters.items()}
    np.savez_compressed(out, **written)


if __name__ == "__main__":
    main(sys.argv[1])
