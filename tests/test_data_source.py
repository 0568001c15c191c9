"""A further format of data is one class: a source in memory whose frames differ in size goes through everything."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers import tiny_input, toy_frame, toy_labels, write_system

from deepmd_ema.cli import main
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.formats import discover
from deepmd_ema.data.sampler import Sampler, batch_sizes
from deepmd_ema.data.source import Frame, FrameSource, Place
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

SIZES = (5, 12, 8, 12, 3, 9, 8, 5, 12, 7)


class MemorySource(FrameSource):
    """Frames of different sizes, some of them open, some without a virial, from no file at all."""

    def __init__(self, name="memory:toy", sizes=SIZES, seed=0, open_frames=(4,)):
        super().__init__(name, np.array(sizes), is_slow=False)
        rng, self.frames = np.random.default_rng(seed), []
        for k, size in enumerate(sizes):
            coord, types, box = toy_frame(rng, size, pbc=k not in open_frames)
            energy, force, virial, _ = toy_labels(coord, types, box)
            labels = {"energy": np.array(energy), "force": force}
            if box is not None and k % 3:
                labels["virial"] = np.asarray(virial).reshape(9)
            self.frames.append(Frame(coord, types, box, labels, source=(name, k)))

    def files(self):
        return []

    def frame(self, index):
        return self.frames[index]

    def where(self, index, array=""):
        return Place(f"{self.name}{'/' * bool(array)}{array}", index, self.num_frames)


def find(path, group):
    return [lambda spec: MemorySource(str(path), seed=3 if "valid" in path.name else 0)]


@pytest.fixture
def memory_format(monkeypatch):
    """A format whose paths end in ``.memory``."""
    monkeypatch.setattr(
        discover, "FORMATS", [discover.Format(lambda path: path.suffix == ".memory", find), *discover.FORMATS]
    )


@pytest.mark.usefixtures("memory_format")
def test_a_further_format_is_checked_trained_on_validated_and_restarted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_system("plain", frames=4, natoms=6)
    content = tiny_input(
        ["train.memory", "plain"],
        ["valid.memory"],
        num_steps=12,
        training__training_data__batch_size="auto:16",
        training__enable_ema=True,
        training__save_freq=6,
        model__descriptor__sel="auto",
        validating={"full_validation": True, "validation_freq": 6, "full_val_start": 0},
    )
    (tmp_path / "input.json").write_text(json.dumps(content))
    assert main(["check", "input.json"]) == 0
    reported = capsys.readouterr().out
    assert "2 systems, 14 frames, 105 atoms" in reported
    assert "3-12  both" in reported
    assert "virial: 9 of 14 frames" in reported
    assert main(["train", "input.json"]) == 0
    whole = torch.load("model.ckpt-12.pt", weights_only=True)
    rows = (tmp_path / "val.log").read_text()
    assert len(rows.splitlines()) > 2
    assert "nan" not in rows
    assert main(["train", "input.json", "--restart", "model.ckpt-6.pt"]) == 0
    again = torch.load("model.ckpt-12.pt", weights_only=True)
    assert all(
        torch.equal(value, again["model"][name]) for name, value in whole["model"].items() if name != "_extra_state"
    )
    assert main(["test", "-m", "model.ckpt-12.pt", "-s", "valid.memory"]) == 0
    assert "memory frame" in capsys.readouterr().out


def test_chunks_pad_smaller_frames_and_hold_frames_of_the_same_arrays():
    source = MemorySource()
    chunks = list(source.chunks())
    assert [chunk.first for chunk in chunks] == [0, 1, 3, 4, 5, 6, 7, 9]  # virial and cell come and go
    assert sum(len(chunk.types) for chunk in chunks) == source.num_frames
    for chunk in chunks:
        assert ("box" in chunk.arrays) == (chunk.first != 4)
        for k in range(len(chunk.types)):
            frame = source.frame(chunk.first + k)
            exists = chunk.types[k] >= 0
            np.testing.assert_array_equal(chunk.types[k][exists], frame.atom_type)
            np.testing.assert_array_equal(chunk.arrays["coord"][k][exists], frame.coord)
            np.testing.assert_array_equal(chunk.arrays["force"][k][exists], frame.labels["force"])
            assert chunk.arrays["energy"][k] == frame.labels["energy"]


def test_problems_of_frames_of_different_sizes_name_frame_and_atom():
    source = MemorySource()
    source.frames[5].labels["force"][6, 1] = np.nan
    source.frames[9].coord[2] = source.frames[9].coord[1]
    report = check_systems([source], [], ["O", "H"], SeE2AConfig(rcut=4.0))
    assert report.problems == [
        "memory:toy/force: frame 5 (of 10, from 0): nan at atom 6. Expected finite numbers; remove the frame or "
        "compute it again.",
        "memory:toy/coord: frame 9 (of 10, from 0): atoms 1 (H) and 2 (O) are 0.000 angstrom apart, expected at least "
        "0.3. Remove the frame, or set training.training_data.min_pair_dist: 0.3 leaves such training frames out, "
        "a smaller number accepts them.",
    ]


@pytest.mark.parametrize(
    ("rule", "size", "frames"),
    [
        ("auto:16", 2, 10),  # 8.1 atoms in the mean
        ("max:24", 2, 10),  # of the largest frames, of 12 atoms
        ("max:23", 1, 10),
        ("filter:9", 1, 7),  # without the three frames of 12 atoms
    ],
)
def test_batch_rules_count_the_atoms_of_each_frame(rule, size, frames):
    assert batch_sizes(rule, [np.array(SIZES)])[0] == (size,)
    plan = Sampler([10, 4], [np.array(SIZES), 1], rule if isinstance(rule, str) else [rule, 1])
    assert len(plan.frames[0]) == frames
    assert all(SIZES[k] <= 9 for k in plan.frames[0]) or frames == 10
