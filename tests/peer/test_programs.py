"""The programs of this folder, which compare with DeePMD-kit and fail if a difference is too large.

They need DeePMD-kit 3.2.0 in a virtual environment of its own: DP_PEER=DIR python -m pytest -m
nightly tests/peer
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PEER = os.environ.get("DP_PEER")
PROGRAMS = {"parity": [], "fuzz": ["--sets", "3"]}


@pytest.mark.skipif(
    PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0"
)
@pytest.mark.timeout(1800)
@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_deepmd_kit(name, tmp_path):
    script = Path(__file__).with_name(f"{name}.py")
    words = [
        sys.executable,
        script,
        "--peer",
        PEER,
        "--work",
        tmp_path,
        *PROGRAMS[name],
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=1790, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
