"""Keep checkpoints of this version, so that later ones are tested to load them.

usage: python make.py      (writes a folder named after the version beside this file)
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


def main():
    """Train four steps on toy data and keep the files with what they predict."""
    from helpers import tiny_input, toy_frame, write_system

    import deepmd_ema
    from deepmd_ema.cli import main as dp_ema

    folder = HERE / deepmd_ema.__version__
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_system("data", frames=4, seed=1)
        config = tiny_input(["data"], num_steps=4, training__enable_ema=True, training__save_freq=4)
        Path("input.json").write_text(json.dumps(config))
        assert dp_ema(["train", "input.json", "--device", "cpu"]) == 0
        assert dp_ema(["freeze", "--use-ema", "-o", "average.dp"]) == 0
        for name in ("model.ckpt-4.pt", "model_ema.ckpt-4.pt", "average.dp"):
            shutil.copy(name, folder / name)
        coord, types, box = toy_frame(np.random.default_rng(0))
        found = {"coord": coord, "types": types, "box": box}
        for name in ("model.ckpt-4.pt", "model_ema.ckpt-4.pt", "average.dp"):
            result = deepmd_ema.Potential(folder / name).evaluate(coord, types, box)
            found |= {f"{name}_energy": result.energy, f"{name}_force": result.force}
        np.savez(folder / "predictions.npz", **found)
        shutil.copy("input.json", folder / "input.json")


if __name__ == "__main__":
    main()
