"""HDF5: the same data in an HDF5 file with links that lead nowhere, groups where arrays should be, and damaged bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py  # noqa: TID253
import numpy as np

from bad_inputs.case import ACCEPTED, CHECK, EITHER, RUN, Case

FILE = "data.h5"
ITEMS = ("type.raw", "type_map.raw", "set.000", "set.000/coord.npy", "set.000/box.npy", "set.000/energy.npy",
         "set.000/force.npy")  # fmt: skip


def cases() -> Iterator[Case]:
    yield Case("HDF5", "a good file", CHECK, _made(lambda file: None), ACCEPTED)
    yield Case("HDF5", "a good file by its group", CHECK, _made(lambda file: None, "#/water"), ACCEPTED)
    for item in ITEMS:
        for name, change in _changes(item).items():
            optional = ("set.000", "type_map.raw", "set.000/energy.npy", "set.000/force.npy")
            if name == "gone" and item in optional:  # set.001 is left
                yield Case("HDF5", f"{item}: {name}", CHECK, _made(change), ACCEPTED)
            else:
                yield Case("HDF5", f"{item}: {name}", CHECK, _made(change), says=[FILE])
    for number in range(12):
        yield Case("HDF5", f"cut off, {number}", CHECK, _bytes(lambda b, n=number: b[: len(b) * n // 12]), says=[FILE])
    for number in range(24):
        # HDF5 as people write it has no checksums
        yield Case("HDF5", f"bytes changed, {number}", CHECK, _bytes(lambda b, n=number: _spoil(b, n)), EITHER)
    for group in ("#", "#/", "#water", "#/water/"):
        yield Case("HDF5", f"the group {group}", CHECK, _made(lambda file: None, group), ACCEPTED)
    for group in ("#/nowhere", "#water/set.000", "#/water/type.raw", "#/water#/water", "#../x"):
        yield Case("HDF5", f"the group {group}", CHECK, _made(lambda file: None, group), says=[FILE])
    words = ("test", "-m", "model.ckpt.pt", "-s", FILE)
    for item in ITEMS[:4]:
        yield Case("HDF5", f"test, {item} is a group", words, _made(_changes(item)["a group"]), begins=RUN)


def _changes(item: str) -> dict[str, Callable[[h5py.File], object]]:
    def put(make: Callable[[h5py.Group, str], object]) -> Callable[[h5py.File], object]:
        def change(file: h5py.File) -> None:
            group = file["water"]
            del group[item]
            make(group, item)

        return change

    return {
        "gone": put(lambda group, name: None),
        "a link to nothing": put(lambda group, name: group.__setitem__(name, h5py.SoftLink("/nowhere"))),
        "a link to itself": put(lambda group, name: group.__setitem__(name, h5py.SoftLink(f"/water/{name}"))),
        "a link to a file that is gone": put(
            lambda group, name: group.__setitem__(name, h5py.ExternalLink("gone.h5", "/x"))
        ),
        "a link to the top": put(lambda group, name: group.__setitem__(name, h5py.SoftLink("/"))),
        "a group": put(lambda group, name: group.create_group(name)),
        "empty": put(lambda group, name: group.create_dataset(name, data=h5py.Empty("f8"))),
        "a text": put(lambda group, name: group.create_dataset(name, data="text")),
        "one number": put(lambda group, name: group.create_dataset(name, data=3.0)),
        "a record": put(lambda group, name: group.create_dataset(name, data=np.zeros(4, [("a", "f8")]))),
        "a type": put(lambda group, name: group.__setitem__(name, np.dtype("f8"))),
        "2**60 rows": put(lambda group, name: group.create_dataset(name, (2**60, 36), "f8", chunks=(1, 36))),
        "no rows": put(lambda group, name: group.create_dataset(name, (0, 36), "f8")),
    }


def _made(change: Callable[[h5py.File], object], group: str = "") -> Callable[[], None]:
    """Return a function that puts the system into an HDF5 file, changes it, and names it in the input."""

    def make() -> None:
        with h5py.File(FILE, "w") as file:
            for path in sorted(Path("data").rglob("*.*")):
                name = f"water/{path.relative_to('data')}"
                if path.suffix == ".npy":
                    file[name] = np.load(path)
                elif path.name == "type.raw":
                    file[name] = np.loadtxt(path, dtype=int)
                elif path.name == "type_map.raw":
                    file[name] = path.read_text().split()
            change(file)
        _name_it(group)

    return make


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[], None]:
    def make() -> None:
        _made(lambda file: None)()
        Path(FILE).write_bytes(change(Path(FILE).read_bytes()))

    return make


def _spoil(content: bytes, number: int) -> bytes:
    rng, spoiled = np.random.default_rng(number), bytearray(content)
    head = len(content) if number % 2 else 2048  # the structure of the file is where it begins
    for place in rng.integers(0, head, 1 + number):
        spoiled[place] = int(rng.integers(256))
    return bytes(spoiled)


def _name_it(group: str) -> None:
    config = json.loads(Path("input.json").read_text())
    config["training"]["training_data"]["systems"] = [FILE + group]
    Path("input.json").write_text(json.dumps(config))
