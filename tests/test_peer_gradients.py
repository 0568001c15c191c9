"""The loss of a batch and its gradient by every parameter, beside DeePMD-kit's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "peer_gradients.py"


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_every_golden_model_has_the_gradients_of_deepmd_kit(tmp_path):
    words = [sys.executable, SCRIPT, "--peer", PEER, "--work", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
