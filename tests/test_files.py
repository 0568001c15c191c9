"""Seeds, files that appear whole, and memory that stays."""

import platform
import subprocess
import sys

import pytest

from deepmd_ema.files import atomic_write
from deepmd_ema.seeds import seed_for

BLOCKS = """
import resource, sys, torch
from deepmd_ema.dist.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults(millions):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(millions * 1_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min([faults(20) for _ in range(20)][10:]))  # the first ones make room
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_are_mapped_once_and_kept():
    def fewest_page_faults(how):
        return int(
            subprocess.run([sys.executable, "-c", BLOCKS, how], check=True, capture_output=True, timeout=60).stdout
        )

    assert fewest_page_faults("keep") < 100
    assert fewest_page_faults("give back") > 500


def test_a_seed_depends_on_the_stream_and_its_numbers_only():
    assert seed_for("frames", 1) == seed_for("frames", 1)
    assert len({seed_for("frames", 1), seed_for("frames", 2), seed_for("weights", 1), seed_for("frames", 1, 0)}) == 4
    assert 0 <= seed_for("frames", 1) < 2**63


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")

    def write_half():
        with atomic_write(file) as part:
            part.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
