"""Data sets larger than memory: what is held does not grow with the arrays."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from helpers import open_data, write_system

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data import source
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.formats.stores import StoredArray
from deepmd_ema.data.loader import Loader
from deepmd_ema.data.sampler import Sampler
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

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


def test_a_scan_holds_few_bytes_of_each_frame(molecules):
    [system] = open_data([str(molecules)], ["O", "H"], LABELS)
    peak = peak_mb(lambda: scan_system(system, 2, 4.0))
    assert peak < 1.5 + 60 * FRAMES / 1e6 < 0.3 * ARRAYS_MB


def test_frames_whose_neighbors_are_counted_are_read_one_by_one_from_large_sets(molecules, monkeypatch):
    [system] = open_data([str(molecules)], ["O", "H"], LABELS)
    rows, read = [], StoredArray.read
    monkeypatch.setattr(StoredArray, "read", lambda self, a, b: rows.append(b - a) or read(self, a, b))
    report = check_systems([system], [], ["O", "H"], SeE2AConfig(rcut=4.0, sel="auto"), LABELS, max_searched=50)
    assert report.num_searched == 50
    assert not report.problems
    assert sum(rows) < 3 * FRAMES + 3 * (50 + 64 + 1)  # the scan, neighbors, units


def test_training_batches_take_no_memory_of_their_set(molecules):
    [system] = open_data([str(molecules)], ["O", "H"], LABELS)
    sampler = Sampler([system.num_frames], [system.frame_sizes], 8, seed=1)
    sampler.batch(0)  # the order of an epoch takes 8 bytes of each frame
    cache = PairCache()

    def train():
        with closing(Loader([system], sampler, NeighborLayout(4.0, (8, 12), 2), cache=cache)) as loader:
            for _ in range(40):
                next(loader)

    assert peak_mb(train) < 1.0
    assert cache.num_bytes == 0


@pytest.mark.parametrize(("compression", "stay_open"), [(None, False), ("gzip", True)])
def test_hdf5_datasets_that_are_read_from_their_place_are_not_kept_open(tmp_path, compression, stay_open):
    """10,000 systems in one file took 1.4 GB."""
    h5py = pytest.importorskip("h5py")
    source_path = write_system(tmp_path / "s", frames=3, natoms=6)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name in ("type.raw", "type_map.raw"):
            file[f"a/{name}"] = (source_path / name).read_text().split()
        for path in (source_path / "set.000").glob("*.npy"):
            file.create_dataset(
                f"a/set.000/{path.name}",
                data=np.load(path),
                compression=compression,
                chunks=None if compression is None else True,
            )
    gc.collect()
    before = h5py.h5f.get_obj_count()
    [system] = open_data([f"{tmp_path / 'data.h5'}"], ["O", "H"], ("energy", "force"))
    assert (h5py.h5f.get_obj_count() > before) is stay_open
    np.testing.assert_array_equal(system.frame(2).coord.ravel(), np.load(source_path / "set.000/coord.npy")[2])
    assert system.files() is not None
    assert set(system.files()) == {tmp_path / "data.h5"}
