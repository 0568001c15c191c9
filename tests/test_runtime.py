"""Seeds, files that appear whole, and memory that stays."""

import platform
import subprocess
import sys

import pytest

from deepmd_ema.runtime import atomic_write, seed_for

BLOCKS = """
import resource, torch
from deepmd_ema.runtime import keep_freed_memory
keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(40_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, second = faults(), faults()
assert first > 1000, first
assert second < 100, second
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_large_block_is_mapped_once_and_kept():
    subprocess.run([sys.executable, "-c", BLOCKS], check=True, timeout=60)


def test_a_seed_depends_on_the_stream_and_its_numbers_only():
    assert seed_for("frames", 1) == seed_for("frames", 1)
    assert len({seed_for("frames", 1), seed_for("frames", 2), seed_for("weights", 1), seed_for("frames", 1, 0)}) == 4
    assert 0 <= seed_for("frames", 1) < 2**63


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(file) as part:
        part.write_text("half")
        raise RuntimeError("stop")
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
