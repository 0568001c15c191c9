"""Data sets larger than memory: what is held does not grow with the arrays."""

from __future__ import annotations

import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from helpers import open_data

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data import source
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import Loader
from deepmd_ema.data.sampler import Sampler

FRAMES, ATOMS = 20_000, 12
ARRAYS_MB = FRAMES * 2 * 3 * ATOMS * 8 / 1e6  # coordinates and forces: 11.5
LABELS = ("energy", "force")


@pytest.fixture
def molecules(tmp_path, monkeypatch):
    """Many frames of one molecule, of which a chunk of the checks holds few."""
    monkeypatch.setattr(source, "_NUMBERS_AT_ONCE", 20_000)
    rng = np.random.default_rng(0)
    rest = 1.5 * np.stack(np.meshgrid(*map(np.arange, (3, 2, 2)), indexing="ij"), -1).reshape(ATOMS, 3)
    folder = tmp_path / "molecules"
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("0\n1\n1\n" * 4)
    (folder / "type_map.raw").write_text("O\nH\n")
    (folder / "nopbc").touch()
    coord = (rest + 0.02 * rng.standard_normal((FRAMES, ATOMS, 3))).reshape(FRAMES, -1)
    arrays = {"coord": coord, "force": rng.standard_normal(coord.shape), "energy": rng.standard_normal(FRAMES)}
    for name, values in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", values.astype(np.float32))
    return folder


def peak_mb(run):
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def test_a_scan_holds_few_bytes_of_each_frame_and_training_batches_none(molecules):
    [system] = open_data([str(molecules)], ["O", "H"], LABELS)
    peak = peak_mb(lambda: scan_system(system, 2, 4.0))
    assert peak < 1.5 + 60 * FRAMES / 1e6 < 0.3 * ARRAYS_MB

    sampler = Sampler([system.num_frames], [system.frame_sizes], 8, seed=1)
    sampler.batch(0)  # the order of an epoch takes 8 bytes of each frame
    cache = PairCache()

    def train():
        with closing(Loader([system], sampler, NeighborLayout(4.0, (8, 12), 2), cache=cache)) as loader:
            for _ in range(40):
                next(loader)

    assert peak_mb(train) < 1.0
    assert cache.num_bytes == 0
