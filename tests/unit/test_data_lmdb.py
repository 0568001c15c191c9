"""DeePMD-kit's LMDB data sets as training data."""

import numpy as np
import pytest
from data_files import toy_records, write_lmdb
from helpers import open_data

from deepmd_ema.errors import DataError

NO_LMDB = "cannot be read as DeePMD-kit's LMDB"
LABELS = ("energy", "force", "virial")


def problems_of(path, type_map=("O", "H"), **spec):
    with pytest.raises(DataError) as caught:
        open_data([str(path)], list(type_map), LABELS, **spec)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("virtual", [False, True])
def test_frames_of_all_sizes_are_read(tmp_path, virtual):
    records = toy_records(virtual=virtual)
    [source] = open_data(
        [write_lmdb(tmp_path / "a.lmdb", records)], ["H", "C", "O"], LABELS
    )
    assert source.frame_sizes.tolist() == [len(r["atom_types"]) for r in records]
    for k, record in enumerate(records):
        frame, real = source.frame(k), record["atom_types"] >= 0
        np.testing.assert_array_equal(
            frame.atom_type, np.array([2, 0])[record["atom_types"][real]]
        )
        np.testing.assert_array_equal(frame.coord, record["coords"][real])
        np.testing.assert_array_equal(frame.labels["force"], record["forces"][real])
        assert frame.labels["energy"] == record["energies"][0]
        assert (
            (frame.box is None)
            == ("cells" not in record)
            == ("virial" not in frame.labels)
        )
        if frame.box is not None:
            np.testing.assert_array_equal(
                frame.labels["virial"], record["virials"].ravel()
            )
        assert (frame.file_index is not None) == virtual
    again = open_data(
        [str(tmp_path / "a.lmdb")], ["O", "H"], LABELS
    )  # open twice in one process
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
        (
            {"coords": np.zeros(4)},
            {},
            "coord: has shape (4,) of float64, expected numbers for",
        ),
        ({"cells": np.zeros(4)}, {}, "box: has 4 numbers, expected 9."),
        ({"energies": np.zeros(2)}, {}, "energy: has 2 numbers, expected one"),
        (
            {"forces": {"type": "float64", "shape": [9, 9], "data": b"12345678"}},
            {},
            NO_LMDB,
        ),
    ],
)
def test_faults_are_reported_with_file_and_frame(tmp_path, change, meta, message):
    found = problems_of(
        write_lmdb(tmp_path / "a.lmdb", [toy_records(1)[0] | change], **meta)
    )
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


@pytest.mark.parametrize(
    ("change", "meta", "problem"),
    [
        (
            {"energy_unit": "hartree"},
            {},
            "a.lmdb: frame 0 (from 0): energy_unit = hartree: expected eV and angstrom. "
            "Convert the numbers.",
        ),
        ({}, {"forces_unit": "Ha/bohr"}, "a.lmdb/__metadata__: forces_unit = Ha/bohr:"),
        ({}, {"units": {"energy": "eV"}}, "is not a known unit"),
        ({"coords_unit": "angstrom"}, {"energies_unit": "eV", "units": "metal"}, ""),
    ],
)
def test_data_bases_that_state_other_units_are_refused(tmp_path, change, meta, problem):
    path = write_lmdb(tmp_path / "a.lmdb", [toy_records(1)[0] | change], **meta)
    if problem:
        assert problem in problems_of(path)
    else:
        open_data([path], ["O", "H"], LABELS)
