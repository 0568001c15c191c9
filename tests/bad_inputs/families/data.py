"""Data: arrays that are cut, of another kind or shape, or hold numbers that no structure has; type files with odd text."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bad_inputs.case import ACCEPTED, CHECK, REFUSED, Case

SET = Path("data/set.000")
ARRAYS = ("coord", "box", "energy", "force", "virial")
TYPES = {
    "empty": "", "one number": "0", "letters": "O H", "too few": "0 1", "negative": "-1 " * 12, "a fraction": "0.5 " * 12,
    "superscripts": "² " * 12, "circled digits": "① " * 12, "digits of another alphabet": "٣ " * 12, "nan": "nan " * 12,
    "beyond int64": f"{2**70} " * 12, "beyond the elements": "7 " * 12, "NUL": "0 1\0 " * 6, "commas": "0,1," * 6,
    "a number of 5,000 digits": "9" * 5000, "no UTF-8": b"\xff\xfe0 1", "a million numbers": "0 " * 10**6, "underscores": "0_0 " * 12,
    "plus": "+0 " * 12, "hex": "0x0 " * 12, "exponents": "1e0 " * 12,
}  # fmt: skip
MAPS = {
    "empty": "", "twice": "O\nO\n", "one element": "O\n", "unknown": "O\nXx\n", "no UTF-8": b"\xff\n\xfe", "NUL": "O\0\nH",
    "a thousand": "\n".join(f"E{n}" for n in range(1000)), "blanks": "   \n \n", "lower case": "o\nh\n", "commas": "O,H\n",
    "a long name": "O" * 10_000 + "\nH\n",
}  # fmt: skip
NUMBERS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "1e30": 1e30, "1e300": 1e300}
CELLS = {
    "flat": [[4, 0, 0], [0, 4, 0], [4, 4, 0]], "zero": [[0] * 3] * 3, "nearly flat": [[4, 0, 0], [0, 4, 0], [4, 4, 1e-9]],
    "0.007 angstrom": [[0.007, 0, 0], [0, 0.007, 0], [0, 0, 0.007]], "1e-300": [[1e-300, 0, 0], [0, 1e-300, 0], [0, 0, 1e-300]],
    "an edge of 1e6": [[1e6, 0, 0], [0, 5, 0], [0, 0, 5]], "1e300": [[1e300, 0, 0], [0, 1e300, 0], [0, 0, 1e300]],
    "sheared by 1e6": [[5, 0, 0], [1e6, 5, 0], [0, 0, 5]], "left handed": [[-7, 0, 0], [0, 7, 0], [0, 0, 7]],
    "one thin edge": [[0.01, 0, 0], [0, 7, 0], [0, 0, 7]],
}  # fmt: skip


def cases() -> Iterator[Case]:
    for name in ARRAYS:
        for what, change in _spoiled(name).items():
            where = [] if what == "it is gone" else [f"{name}.npy"]
            optional = name in ("energy", "force", "virial") and what == "it is gone"
            same = (name, what) == ("energy", "five dimensions")  # as many numbers as frames
            expected = ACCEPTED if optional or same else REFUSED
            yield Case("data", f"{name}.npy: {what}", CHECK, change, expected, same, says=[] if same else where)
        for what, value in NUMBERS.items():
            label = (
                name in ("energy", "force", "virial") and what == "1e30"
            )  # finite: reported as an outlier or in the table
            yield Case(
                "data",
                f"{name}.npy: one number is {what}",
                CHECK,
                _number(name, value),
                ACCEPTED if label else REFUSED,
                says=["e+2"] if label else [],  # shown per atom, or as an RMS
            )
    for what, text in TYPES.items():
        # of these the arrays do not fit
        says = [] if what in ("one number", "too few", "a million numbers") else ["type.raw"]
        yield Case("data", f"type.raw: {what}", CHECK, _text("type.raw", text), says=says)
    for what, text in MAPS.items():
        yield Case("data", f"type_map.raw: {what}", CHECK, _text("type_map.raw", text))
    for what, cell in CELLS.items():
        expected = ACCEPTED if what == "left handed" else REFUSED
        yield Case("data", f"cell: {what}", CHECK, _cell(cell), expected, seconds=20)
    for name in (
        "type_map.raw",
        "set.000/force.npy",
        "set.000/energy.npy",
        "nopbc",
        "type.raw",
        "set.000/coord.npy",
        "set.000",
    ):
        yield Case(
            "data",
            f"{name} is a dangling link",
            CHECK,
            _dangling(name),
            says=[] if name == "set.000" else [name.split("/")[-1]],
        )
        yield Case("data", f"{name} is a link to itself", CHECK, _dangling(name, itself=True))
    for name in ("set.000/force.npy", "type.raw", "set.000/coord.npy", "type_map.raw", "set.000/energy.npy"):
        yield Case("data", f"{name} is a folder", CHECK, _folder(name))
        yield Case("data", f"{name} is a pipe", CHECK, _pipe(name), seconds=10)
    yield Case("data", "atoms in one place", CHECK, _same_place, says=["apart"])
    yield Case("data", "coordinates of 1e30 in all frames", CHECK, lambda: _change("coord", lambda a: a * 1e30))
    yield Case("data", "an atom far outside the cell", CHECK, lambda: _change("coord", _far), ACCEPTED)
    yield Case("data", "no frames", CHECK, _no_frames, says=["no frames"])
    yield Case("data", "a set that is a file", CHECK, lambda: Path("data/set.002").touch(), says=["set.002"])
    yield Case("data", "an archive of a set", CHECK, lambda: Path("data/set.000.tar").touch(), ACCEPTED, same=True)
    yield Case("data", "an empty set", CHECK, lambda: os.mkdir("data/set.002"))
    yield Case("data", "nopbc beside cells", CHECK, lambda: Path("data/nopbc").touch(), ACCEPTED)


def _array(name: str) -> Path:
    return SET / f"{name}.npy"


def _spoiled(name: str) -> dict:
    """Return ways to spoil the file of an array."""

    def header(shape: str, descr: str = "<f8"):
        def put() -> None:
            text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
            text += " " * (118 - len(text)) + "\n"
            _array(name).write_bytes(
                b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(800)
            )

        return put

    def archive() -> None:
        stream = io.BytesIO()
        np.savez(stream, a=np.load(_array(name)))
        _array(name).write_bytes(stream.getvalue())

    ways = {
        "it is gone": lambda: os.remove(_array(name)),
        "no bytes": lambda: _array(name).write_bytes(b""),
        "text": lambda: _array(name).write_text("1 2 3\n"),
        "an archive npz": archive,
        "2**64 rows": header(f"({2**64}, 36)"),
        "2**62 rows": header(f"({2**62}, 36)"),
        "negative rows": header("(-4, 36)"),
        "rows that are no number": header("('x', 36)"),
        "a code in the header": header("(4, __import__('os').system('touch broken'))"),
        "objects": lambda: np.save(_array(name), np.array([{}, "x"], object), allow_pickle=True),
        "texts": lambda: np.save(_array(name), np.array(["a", "b", "c", "d"])),
        "complex": lambda: _change(name, lambda a: a.astype(complex)),
        "booleans": lambda: _change(name, lambda a: a > 0),
        "dates": lambda: np.save(_array(name), np.zeros((4, 36), "datetime64[s]")),
        "one number": lambda: np.save(_array(name), np.float64(3)),
        "a row less": lambda: _change(name, lambda a: a[:-1]),
        "a column less": lambda: _change(name, lambda a: a.reshape(len(a), -1)[:, :-1]),
        "five dimensions": lambda: _change(name, lambda a: a.reshape(len(a), 1, 1, 1, -1)[:, :, :, :, :1]),
        "no rows": lambda: _change(name, lambda a: a[:0]),
        "a field": lambda: np.save(_array(name), np.zeros(4, [("x", "<f8")])),
        "a header of 60 kB": lambda: _array(name).write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535),
        "version 9": lambda: _array(name).write_bytes(b"\x93NUMPY\x09\x00" + bytes(500)),
    }
    for part in (0.02, 0.2, 0.6, 0.99):
        ways[f"cut off at {part:g}"] = _cut(name, part)
    return ways


def _cut(name, part):
    def cut() -> None:
        content = _array(name).read_bytes()
        _array(name).write_bytes(content[: int(part * len(content))])

    return cut


def _change(name, change) -> None:
    np.save(_array(name), change(np.load(_array(name))))


def _number(name, value):
    def put(array):
        array.reshape(-1)[2] = value
        return array

    return lambda: _change(name, put)


def _text(name, content):
    def put() -> None:
        Path("data", name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return put


def _cell(cell):
    def put(boxes):
        boxes[1] = np.ravel(cell)
        return boxes

    return lambda: _change("box", put)


def _same_place() -> None:
    def put(coord):
        coord[1, 3:6] = coord[1, :3]
        return coord

    _change("coord", put)


def _far(coord):
    coord[0, :3] += 1e4
    return coord


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def _dangling(name, itself=False):
    def put() -> None:
        path = Path("data", name)
        _remove(path)
        path.symlink_to(path.name if itself else "gone")

    return put


def _folder(name):
    return lambda: (_remove(Path("data", name)), os.mkdir(Path("data", name)))


def _pipe(name):
    return lambda: (_remove(Path("data", name)), os.mkfifo(Path("data", name)))


def _no_frames() -> None:
    for file in Path("data").glob("set.*/*.npy"):
        np.save(file, np.load(file)[:0])
