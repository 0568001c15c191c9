"""Keep files of this version, so that later ones are tested to load them and to continue from them.

usage: python make.py NAME      (writes a folder of that name here: a version, or a commit)
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

KEPT = ("model.ckpt-4.pt", "model_ema.ckpt-4.pt", "average.dp")
BANK = [
    {"name": "slow", "decay": 0.9, "dtype": "float64"},
    {"name": "p10", "type": "power", "sigma_rel": 0.1, "buffers": "average"},
    {"name": "flat", "type": "swa", "start_step": 1, "full_validation": True},
]


def main(name):
    """Train four steps on toy data, keep the files with what they predict, and the weights two
    steps later.
    """
    from helpers import tiny_input, toy_frame, write_system

    import deepmd_ema
    from deepmd_ema.cli import main as dp_ema

    folder = HERE / name
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_system("data", frames=4, seed=1)
        options = {
            "training__enable_ema": True,
            "training__averaging": BANK,
            "training__save_freq": 2,
            "training__disp_freq": 1,
            "validating": {
                "full_validation": True,
                "validation_freq": 2,
                "full_val_start": 0,
            },
        }
        config = tiny_input(["data"], ["data"], num_steps=4, **options)
        Path("input.json").write_text(json.dumps(config))
        assert dp_ema(["train", "input.json", "--device", "cpu"]) == 0
        assert (
            dp_ema(["freeze", "--use-ema", "--profile", "ema", "-o", "average.dp"]) == 0
        )
        for file in KEPT:
            shutil.copy(file, folder / file)
        coord, types, box = toy_frame(np.random.default_rng(0))
        found = {"coord": coord, "types": types, "box": box}
        for file in KEPT:
            result = deepmd_ema.Potential(folder / file).evaluate(coord, types, box)
            found |= {f"{file}_energy": result.energy, f"{file}_force": result.force}
        shutil.copy("input.json", folder / "input.json")
        Path("input.json").write_text(
            json.dumps({**config, "training": {**config["training"], "numb_steps": 6}})
        )
        assert (
            dp_ema(
                [
                    "train",
                    "--restart",
                    "model.ckpt-4.pt",
                    "input.json",
                    "--device",
                    "cpu",
                ]
            )
            == 0
        )
        for weights in ("", "_ema", *(f"_{average['name']}" for average in BANK)):
            file = f"model{weights}.ckpt-6.pt"
            result = deepmd_ema.Potential(file).evaluate(coord, types, box)
            found |= {f"{file}_energy": result.energy, f"{file}_force": result.force}
        np.savez(folder / "predictions.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
