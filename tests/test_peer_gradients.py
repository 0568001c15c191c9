"""The loss of a batch and its gradient by every parameter, beside DeePMD-kit's."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepmd_ema.data.collate import collate
from deepmd_ema.interchange import read_dp

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gradients.json").read_text())
TOLERANCE = 1e-8  # relative to the length of an array of gradients
PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peer_gradients.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    yield importlib.import_module(SCRIPT.stem)
    sys.path.remove(str(SCRIPT.parent))


@pytest.mark.parametrize("name", GOLDEN["models"])
def test_the_loss_and_its_gradients_are_those_of_deepmd_kit(script, name):
    data = script.batch_of(name, script.systems_of(name)[-1])
    found = script.summary(script.our_gradients(name.removesuffix(script.WITH_HESSIAN), data))
    expected = {path: numbers for path, numbers in GOLDEN["models"][name].items() if path != script.MASKED}
    assert found.keys() == expected.keys()
    longest = max(length for length, _ in expected.values())
    for path, numbers in expected.items():
        # an array whose gradient vanishes holds rounding of the others
        assert found[path] == pytest.approx(numbers, rel=0, abs=TOLERANCE * max(numbers[0], 1e-12 * longest)), path


def test_atoms_without_an_energy_count_in_the_loss_and_deepmd_kit_leaves_them_out(script):
    """Both losses from one prediction: over all atoms, and over those whose type is not in atom_exclude_types."""
    name = "se_e2_a_excluded"
    config, model, _ = read_dp(script.GOLDEN / f"{name}.dp")
    data = script.batch_of(name, script.SYSTEMS[-1])
    batch = collate(script.frames_of(config, data), model.layout)
    found = {key: value.detach() for key, value in model(batch).items()}
    force = batch.in_file_order(found["force"]).numpy().reshape(data["force"].shape)
    counted = ~np.isin(data["types"], config.atom_exclude_types)
    for path, chosen in ((script.LOSS, np.ones_like(counted)), (script.MASKED, counted)):
        errors = {"e": found["energy"].numpy() - data["energy"].ravel(), "v": found["virial"].numpy() - data["virial"],
                  "f": (force - data["force"])[:, chosen]}  # fmt: skip
        size, share = chosen.sum(), script.LR / script.START_LR
        loss = sum(
            (share * script.SHARED[f"start_pref_{term}"] + (1 - share) * script.SHARED[f"limit_pref_{term}"])
            * np.mean(error**2) / (1 if term == "f" else size)
            for term, error in errors.items()
        )  # fmt: skip
        assert loss == pytest.approx(GOLDEN["models"][name][path][0], rel=TOLERANCE)


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_every_golden_model_has_the_gradients_of_deepmd_kit(tmp_path):
    words = [sys.executable, SCRIPT, "--peer", PEER, "--work", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
