"""DeePMD-kit's LMDB data sets as training data."""

import numpy as np
import pytest
from helpers import open_data, toy_frame, toy_labels

from deepmd_ema.errors import DataError

lmdb, msgpack = pytest.importorskip("lmdb"), pytest.importorskip("msgpack")
NO_LMDB = "cannot be read as DeePMD-kit's LMDB"
LABELS = ("energy", "force", "virial")


def toy_records(num_frames=8, seed=0, virtual=False):
    """Return frames of several sizes as DeePMD-kit names their arrays; every fourth is open."""
    rng, out = np.random.default_rng(seed), []
    for k in range(num_frames):
        coord, types, box = toy_frame(rng, int(rng.integers(4, 13)), pbc=k % 4 != 3)
        energy, force, virial, _ = toy_labels(coord, types, box)
        record = {
            "coords": coord,
            "atom_types": types.astype(np.int32),
            "energies": np.array([energy]),
        }
        record["forces"] = force
        if box is not None:
            record |= {"cells": box, "virials": virial.reshape(3, 3)}
        if virtual:
            record["atom_types"] = np.append(record["atom_types"], -1)
            record |= {
                name: np.concatenate([record[name], np.zeros((1, 3))])
                for name in ("coords", "forces")
            }
        out.append(record)
    return out


def write_lmdb(path, records, keys="012d", **meta):
    """Write records as DeePMD-kit's documentation describes its LMDB data."""

    def encoded(value):
        if not isinstance(value, np.ndarray):
            return value
        return {
            "type": str(value.dtype),
            "shape": list(value.shape),
            "data": np.ascontiguousarray(value).tobytes(),
        }

    described = {"frame_idx_fmt": "012d", "type_map": ["O", "H"], "system_info": {"natoms": [2, 2]}}
    described |= {"nframes": len(records), **meta}
    described = {name: value for name, value in described.items() if value is not None}
    env = lmdb.open(str(path), map_size=1 << 24)
    with env.begin(write=True) as transaction:
        transaction.put(b"__metadata__", msgpack.packb(described, use_bin_type=True))
        for k, record in enumerate(records):
            values = {name: encoded(value) for name, value in record.items()}
            transaction.put(format(k, keys).encode(), msgpack.packb(values, use_bin_type=True))
    env.close()
    return str(path)


def problems_of(path, type_map=("O", "H"), **spec):
    with pytest.raises(DataError) as caught:
        open_data([str(path)], list(type_map), LABELS, **spec)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("virtual", [False, True])
def test_frames_of_all_sizes_are_read(tmp_path, virtual):
    records = toy_records(virtual=virtual)
    [source] = open_data([write_lmdb(tmp_path / "a.lmdb", records)], ["H", "C", "O"], LABELS)
    assert source.frame_sizes.tolist() == [len(r["atom_types"]) for r in records]
    for k, record in enumerate(records):
        frame, real = source.frame(k), record["atom_types"] >= 0
        np.testing.assert_array_equal(frame.atom_type, np.array([2, 0])[record["atom_types"][real]])
        np.testing.assert_array_equal(frame.coord, record["coords"][real])
        np.testing.assert_array_equal(frame.labels["force"], record["forces"][real])
        assert frame.labels["energy"] == record["energies"][0]
        assert (frame.box is None) == ("cells" not in record) == ("virial" not in frame.labels)
        if frame.box is not None:
            np.testing.assert_array_equal(frame.labels["virial"], record["virials"].ravel())
        assert (frame.file_index is not None) == virtual
    again = open_data([str(tmp_path / "a.lmdb")], ["O", "H"], LABELS)  # open twice in one process
    assert again[0].num_frames == source.num_frames
    assert source.notes == []


def test_flags_other_names_and_parameters(tmp_path):
    [record] = toy_records(1)
    record |= {
        "find_virial": 0.0,
        "find_energies": 1.0,
        "charge_spin": np.array([1.0, 2.0]),
        "fparam": np.array([0.5]),
        "aparam": np.arange(2.0 * len(record["coords"])),
        "cells": record["cells"].ravel(),
    }
    path = write_lmdb(tmp_path / "a.lmdb", [record], type_map=None)
    [source] = open_data([path], ["O", "H"], LABELS, numb_fparam=1, numb_aparam=2)
    frame = source.frame(0)
    assert set(frame.labels) == {"energy", "force"}
    assert frame.fparam.tolist() == [0.5]
    assert frame.aparam[1].tolist() == [2, 3]
    assert source.notes == ["does not read charge_spin in 1 frame"]
    [source] = open_data([path], ["O", "H"], LABELS)
    assert source.unread == ("fparam", "aparam")


@pytest.mark.parametrize(
    ("change", "meta", "message"),
    [
        (
            {},
            {"type_map": ["O", "He"]},
            'a.lmdb/__metadata__: element "He" is not in model.type_map. Did you mean H?',
        ),
        (
            {},
            {"type_map": ["O"]},
            "frame 0 (from 0): atom_types: has 1, but there are only 1 elements.",
        ),
        ({}, {"type_map": 3}, "type_map = '3', expected a list of elements."),
        ({}, {"nframes": 2}, "frame 1 (from 0): there is no record 000000000001."),
        ({}, {"nframes": 0}, "no frames"),
        ({"atom_types": 3}, {}, "atom_types: missing or wrong"),
        ({"coords": np.zeros(4)}, {}, "coord: has shape (4,) of float64, expected numbers for"),
        ({"cells": np.zeros(4)}, {}, "box: has 4 numbers, expected 9."),
        ({"energies": np.zeros(2)}, {}, "energy: has 2 numbers, expected one"),
        ({"forces": {"type": "float64", "shape": [9, 9], "data": b"12345678"}}, {}, NO_LMDB),
    ],
)
def test_faults_are_reported_with_file_and_frame(tmp_path, change, meta, message):
    found = problems_of(write_lmdb(tmp_path / "a.lmdb", [toy_records(1)[0] | change], **meta))
    assert message in found
    assert "a.lmdb" in found


def test_damaged_files_are_reported(tmp_path):
    path = tmp_path / "a.lmdb"
    write_lmdb(path, toy_records(30))
    whole = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(whole[: len(whole) // 2])
    assert "is truncated" in problems_of(path)
    (path / "data.mdb").write_bytes(b"\xff" * 10_000)
    assert NO_LMDB in problems_of(path)
    (path / "data.mdb").unlink()
    assert "cannot be read" in problems_of(path)
    assert "an LMDB data set has no parts" in problems_of(f"{path}#/a")
