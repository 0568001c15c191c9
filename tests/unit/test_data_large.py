"""Data sets larger than memory: what is held does not grow with the arrays."""

import tracemalloc

import numpy as np
from helpers import open_data

from deepmd_ema.data import source
from deepmd_ema.data.check.scan import scan_system

FRAMES, ATOMS = 20_000, 12


def test_a_scan_holds_few_bytes_of_each_frame(tmp_path, monkeypatch):
    """Many frames of one molecule, of which a chunk of the checks holds few."""
    monkeypatch.setattr(source, "_NUMBERS_AT_ONCE", 20_000)
    rng = np.random.default_rng(0)
    rest = 1.5 * np.stack(
        np.meshgrid(*map(np.arange, (3, 2, 2)), indexing="ij"), -1
    ).reshape(ATOMS, 3)
    folder = tmp_path / "molecules"
    (folder / "set.000").mkdir(parents=True)
    (folder / "type.raw").write_text("0\n1\n1\n" * 4)
    (folder / "type_map.raw").write_text("O\nH\n")
    (folder / "nopbc").touch()
    coord = (rest + 0.02 * rng.standard_normal((FRAMES, ATOMS, 3))).reshape(FRAMES, -1)
    arrays = {
        "coord": coord,
        "force": rng.standard_normal(coord.shape),
        "energy": rng.standard_normal(FRAMES),
    }
    for name, values in arrays.items():
        np.save(folder / "set.000" / f"{name}.npy", values.astype(np.float32))
    [system] = open_data([str(folder)], ["O", "H"], ("energy", "force"))
    tracemalloc.start()
    scan_system(system, 2, 4.0)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    assert peak < 1.5 + 60 * FRAMES / 1e6 < 0.3 * 11.5  # MB of coordinates and forces
