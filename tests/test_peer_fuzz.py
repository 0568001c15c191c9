"""Random options of every descriptor, beside DeePMD-kit."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepmd_ema.config import model_config_from_dict

PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TABLE = [[0.3 + 0.1 * k, *[1.0 - k / 34] * 6] for k in range(35)]


@pytest.fixture(scope="module")
def options():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("fuzz_options")
    sys.path.remove(str(BENCHMARKS))


def test_options_drawn_at_random_are_known_here(options):
    for kind in options.KINDS:
        rng = np.random.default_rng(1)
        for _ in range(5):
            section, _ = options.draw_set(kind, rng, TABLE)
            assert model_config_from_dict(section).type_map == section["type_map"]


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_random_options_are_the_functions_of_deepmd_kit(tmp_path):
    words = [sys.executable, BENCHMARKS / "peer_fuzz.py", "--peer", PEER, "--work", tmp_path, "--sets", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
