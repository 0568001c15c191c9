"""Data of other programs: extended XYZ and LMDB that are cut, changed or wrong, and files that convert cannot make sense of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import lmdb  # noqa: TID253
import msgpack  # noqa: TID253
import numpy as np

from bad_inputs.case import ACCEPTED, CHECK, EITHER, Case
from deepmd_ema.data.formats.stores import NpyStore
from deepmd_ema.data.formats.system import open_system
from deepmd_ema.data.source import ReadSpec

FAMILY, XYZ, BASE = "data of others", "data.extxyz", "data.lmdb"
CONVERT = ("convert", XYZ, "out")
# text in a frame to what it becomes
WRONG = {
    "no number of atoms": ("12\n", "abc\n"), "a negative number": ("12\n", "-12\n"), "a huge number": ("12\n", f"{10**30}\n"),
    "too many atoms": ("12\n", "13\n"), "too few atoms": ("12\n", "11\n"), "a fraction": ("12\n", "12.0\n"),
    "no species": ("species:S:1:", ""), "no positions": ("pos:R:3", "pos:R:2"), "no columns": ("force:R:3", "force:R:0"),
    "a kind that is none": ("force:R:3", "force:Q:3"), "too many columns": ("force:R:3", "force:R:4"),
    "an energy of words": ("energy=", "energy=abc "), "two energies": ("energy=", "ref_energy=1 energy="),
    "an energy of nan": ("energy=", "energy=nan x="), "an energy of three": ("energy=", 'energy="1 2 3" x='),
    "a flat cell": ('Lattice="', 'Lattice="0 0 0 0 0 0 0 0 0" x="'), "a cell of eight": ('Lattice="', 'Lattice="1 0 0 0 1 0 0 0" x="'),
    "open in part": ("energy=", 'pbc="T F T" energy='), "pbc of words": ("energy=", "pbc=maybe energy="),
    "a stress and a virial": ("energy=", 'stress="0 0 0 0 0 0" energy='), "an element that is none": ("O ", "Qq "),
    "an element of a thousand letters": ("O ", "O" * 1000 + " "), "a quote that does not end": ('Lattice="', "Lattice='"),
    "NUL": ("O ", "O\0 "), "a position of words": ("O ", "O x"),
}  # fmt: skip
RECORDS = {
    "no types": {"atom_types": None}, "types of words": {"atom_types": "O H"}, "a type beyond the elements": {"atom_types": np.full(12, 7)},
    "only virtual atoms": {"atom_types": np.full(12, -1)}, "no positions": {"coords": None}, "positions of nan": {"coords": np.full((12, 3), np.nan)},
    "a text": {"coords": "abc"}, "too few forces": {"forces": np.zeros((5, 3))}, "two energies": {"energies": np.zeros(2)},
    "a cell of eight": {"cells": np.zeros(8) + 1}, "a record that is no map": 7, "no msgpack": b"\xc1\xff", "nothing": b"",
    "an array of objects": {"coords": {"type": "object", "shape": [12, 3], "data": b"0" * 288}},
    "a shape that does not fit": {"coords": {"type": "float64", "shape": [99, 3], "data": b"0" * 288}},
    "a shape below zero": {"coords": {"type": "float64", "shape": [-12, -3], "data": b"0" * 288}},
}  # fmt: skip
METAS = {
    "no number of frames": {"nframes": None}, "too many frames": {"nframes": 10**9}, "a text": {"nframes": "four"},
    "less than none": {"nframes": -4}, "no format": {"frame_idx_fmt": "%s"}, "an element that is none": {"type_map": ["O", "Qq"]},
    "one element": {"type_map": ["O"]}, "elements that are one text": {"type_map": 3},
}  # fmt: skip


def cases() -> Iterator[Case]:
    yield Case(FAMILY, "good extended XYZ", CHECK, _xyz(lambda b: b), ACCEPTED)
    yield Case(FAMILY, "good LMDB", CHECK, _lmdb(), ACCEPTED)
    yield Case(FAMILY, "convert, good", CONVERT, _xyz(lambda b: b), ACCEPTED, makes=["out/H6O6/type.raw"])
    for what, (old, new) in WRONG.items():
        change = _xyz(partial(_replace, old.encode(), new.encode()))
        expected = EITHER if what == "NUL" else "refused"
        yield Case(FAMILY, f"XYZ: {what}", CHECK, change, expected, says=[XYZ] * (expected == "refused"))
    for number in range(12):
        # a cut at the end of a frame leaves whole frames
        yield Case(FAMILY, f"XYZ cut off, {number}", CHECK, _xyz(lambda b, n=number: b[: len(b) * n // 12]),
                   EITHER if number == 6 else "refused", says=[XYZ] * (number != 6))  # fmt: skip
    for number in range(24):
        yield Case(FAMILY, f"XYZ, bytes changed, {number}", CHECK, _xyz(lambda b, n=number: _spoil(b, n)), EITHER)
    for what, change in RECORDS.items():
        yield Case(FAMILY, f"LMDB record: {what}", CHECK, _lmdb(change), says=[BASE])
    for what, change in METAS.items():
        yield Case(FAMILY, f"LMDB description: {what}", CHECK, _lmdb(meta=change), says=[BASE])
    for number in range(8):
        yield Case(
            FAMILY, f"LMDB cut off, {number}", CHECK, _mdb(lambda b, n=number: b[: len(b) * n // 8]), says=[BASE]
        )
    for name in ("OUTCAR", "vasprun.xml", "a.db", "a.traj", "a.cif", "a.json", "POSCAR", "a.nc", "a.xsf"):
        for what, content in {"noise": bytes(range(256)) * 40, "empty": b"", "words": b"these are words\n" * 9}.items():
            make = lambda n=name, c=content: Path(n).write_bytes(c)  # noqa: E731
            yield Case(FAMILY, f"convert, {name}: {what}", ("convert", name, "out"), make, says=[name])
    for what, (old, new) in WRONG.items():
        if what not in (
            "an energy of nan",
            "a flat cell",
            "an element that is none",
            "NUL",
            "an element of a thousand letters",
        ):
            change = _xyz(partial(_replace, old.encode(), new.encode()))
            yield Case(FAMILY, f"convert, XYZ: {what}", CONVERT, change, says=[XYZ])


def _replace(old: bytes, new: bytes, content: bytes) -> bytes:
    return content.replace(old, new, 1)


def _frames() -> list:
    system = open_system(NpyStore("data"), ReadSpec(["O", "H"], ("energy", "force", "virial")))
    return [system.frame(k) for k in range(system.num_frames)]


def _xyz(change: Callable[[bytes], bytes]) -> Callable[[], None]:
    """Return a function that writes the frames as extended XYZ, changes the text, and names the file in the input."""

    def make() -> None:
        out = []
        for frame in _frames():
            head = (
                f'Lattice="{_row(frame.box)}" Properties=species:S:1:pos:R:3:force:R:3 energy={frame.labels["energy"]}'
            )
            rows = np.hstack([frame.coord, frame.labels["force"]])
            out += [str(frame.num_atoms), f'{head} virial="{_row(frame.labels["virial"])}"']
            out += [f"{'OH'[t]} {_row(row)}" for t, row in zip(frame.atom_type, rows)]
        Path(XYZ).write_bytes(change(("\n".join(out) + "\n").encode()))
        _name_it(XYZ)

    return make


def _lmdb(change: object = None, meta: dict | None = None) -> Callable[[], None]:
    """Return a function that writes the frames as LMDB, the second one or the description changed, and names it in the input."""

    def make() -> None:
        frames = _frames()
        described = {"nframes": len(frames), "frame_idx_fmt": "012d", "type_map": ["O", "H"]} | (meta or {})
        env = lmdb.open(BASE, map_size=1 << 24)
        with env.begin(write=True) as transaction:
            transaction.put(b"__metadata__", msgpack.packb({n: v for n, v in described.items() if v is not None}))
            for k, frame in enumerate(frames):
                record = {"coords": frame.coord, "atom_types": frame.atom_type, "cells": frame.box, "forces": frame.labels["force"],
                          "energies": frame.labels["energy"].reshape(1)}  # fmt: skip
                changed = change if k == 1 and change is not None else {}
                if isinstance(changed, dict):
                    record = {n: _encoded(v) for n, v in (record | changed).items() if v is not None}
                packed = (
                    changed
                    if isinstance(changed, bytes)
                    else msgpack.packb(record if isinstance(changed, dict) else changed)
                )
                transaction.put(format(k, "012d").encode(), packed)
        env.close()
        _name_it(BASE)

    return make


def _mdb(change: Callable[[bytes], bytes]) -> Callable[[], None]:
    def make() -> None:
        _lmdb()()
        file = Path(BASE) / "data.mdb"
        content = file.read_bytes()
        file.write_bytes(change(content))

    return make


def _encoded(value: object) -> object:
    if not isinstance(value, np.ndarray):
        return value
    return {"type": str(value.dtype), "shape": list(value.shape), "data": np.ascontiguousarray(value).tobytes()}


def _row(numbers: np.ndarray) -> str:
    return " ".join(repr(float(number)) for number in np.ravel(numbers))


def _spoil(content: bytes, number: int) -> bytes:
    rng, spoiled = np.random.default_rng(number), bytearray(content)
    for place in rng.integers(0, len(content), 1 + number):
        spoiled[place] = int(rng.integers(256))
    return bytes(spoiled)


def _name_it(name: str) -> None:
    config = json.loads(Path("input.json").read_text())
    config["training"]["training_data"]["systems"] = [name]
    Path("input.json").write_text(json.dumps(config))
