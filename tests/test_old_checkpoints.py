"""Files of every earlier version stay readable; tests/golden/checkpoints/make.py keeps those of a version."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import write_system

from deepmd_ema import Potential
from deepmd_ema.train.run import run_training

KEPT = sorted(
    p for p in (Path(__file__).parent / "golden" / "checkpoints").iterdir() if (p / "predictions.npz").exists()
)


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["model.ckpt-4.pt", "model_ema.ckpt-4.pt", "average.dp"])
def test_a_file_of_an_earlier_version_predicts_what_it_did(folder, name):
    kept = np.load(folder / "predictions.npz")
    found = Potential(folder / name).evaluate(kept["coord"], kept["types"], kept["box"])
    assert np.allclose(found.energy, kept[f"{name}_energy"], rtol=1e-12, atol=0)
    assert np.allclose(found.force, kept[f"{name}_force"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
def test_a_checkpoint_of_an_earlier_version_is_restarted(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=1)
    config = json.loads((folder / "input.json").read_text())
    config["training"]["numb_steps"] = 6
    Path("input.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.ckpt-4.pt", tmp_path)
    run_training("input.json", restart="model.ckpt-4.pt", device="cpu")
    assert (tmp_path / "model_ema.ckpt-6.pt").exists()
