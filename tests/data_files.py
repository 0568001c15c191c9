"""Data in every format, written by tests."""

import numpy as np
import pytest
from helpers import toy_frame, toy_labels, write_system


def write_kinds(path):
    """Write 20 frames of bulk, 10 of a surface and one of a third kind."""
    from ase.io import write

    frames = toy_atoms(31, natoms=12)
    for atoms, kind in zip(
        frames, ["bulk"] * 20 + ["surface"] * 10 + ["only"], strict=True
    ):
        atoms.info["config_type"] = kind
    write(path, frames)


LABELS = ("energy", "force", "virial")
ELEMENTS = np.array(["O", "H", "C"])


def toy_atoms(num_frames=10, seed=0, num_types=2, natoms=None):
    """Return frames with toy labels, as Atoms; without ``natoms`` of several sizes, and every fifth
    is open.
    """
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    rng, out = np.random.default_rng(seed), []
    for k in range(num_frames):
        size = natoms or int(rng.integers(4, 13))
        coord, types, box = toy_frame(
            rng, size, num_types, pbc=bool(natoms) or k % 5 != 4
        )
        energy, force, virial, atom_energy = toy_labels(coord, types, box)
        atoms = Atoms(ELEMENTS[types], coord, cell=box, pbc=box is not None)
        results = {"energy": energy, "forces": force, "energies": atom_energy}
        if box is not None:
            tensor = -virial.reshape(3, 3) / atoms.get_volume()
            results["stress"] = tensor[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        atoms.calc = SinglePointCalculator(atoms, **results)
        out.append(atoms)
    return out


def text(rows="O 0 0 0 1 2 3\nH 0 0 1 4 5 6\n", natoms=2, **head):
    """Return one frame in extended XYZ."""
    values = {
        "Lattice": "9 0 0 0 9 0 0 0 9",
        "Properties": "species:S:1:pos:R:3:forces:R:3",
        "energy": -1.5,
    } | head
    return (
        f"{natoms}\n"
        + " ".join(f'{k}="{v}"' for k, v in values.items() if v is not None)
        + f"\n{rows}"
    )


lmdb, msgpack = pytest.importorskip("lmdb"), pytest.importorskip("msgpack")


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

    described = {
        "frame_idx_fmt": "012d",
        "type_map": ["O", "H"],
        "system_info": {"natoms": [2, 2]},
    }
    described |= {"nframes": len(records), **meta}
    described = {name: value for name, value in described.items() if value is not None}
    env = lmdb.open(str(path), map_size=1 << 24)
    with env.begin(write=True) as transaction:
        transaction.put(b"__metadata__", msgpack.packb(described, use_bin_type=True))
        for k, record in enumerate(records):
            values = {name: encoded(value) for name, value in record.items()}
            transaction.put(
                format(k, keys).encode(), msgpack.packb(values, use_bin_type=True)
            )
    env.close()
    return str(path)


def to_hdf5(folder, group):
    """Write a system's folder into an HDF5 group, as dpdata does."""
    group["type.raw"] = np.loadtxt(folder / "type.raw", dtype=int)
    group["type_map.raw"] = np.array(
        (folder / "type_map.raw").read_text().split(), dtype="S"
    )
    if (folder / "nopbc").exists():
        group["nopbc"] = True
    for file in sorted(folder.glob("set.*/*.npy")):
        group[f"{file.parent.name}/{file.name}"] = np.load(file)


def hdf5(system, path="data.h5", group="w"):
    import h5py

    with h5py.File(path, "w") as file:
        to_hdf5(system, file.require_group(group))
    return path


def with_close_atoms(folder, frames, distance, **how):
    """Return a system in which the first two atoms of some frames are so close."""
    system = write_system(folder, frames=6, natoms=8, **how)
    file = system / "set.000" / "coord.npy"
    coord = np.load(file)
    coord[frames, 3:6] = coord[frames, :3] + np.array([distance, 0, 0])
    np.save(file, coord)
    return system
