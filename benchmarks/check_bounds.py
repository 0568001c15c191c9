"""Time and memory of `dp-ema check` and `dp-ema train` on inputs that are small on the disk and large to read.

Every row is one process, with its time of computing and largest memory as ``wait4`` tells them. The first rows are a
right input: what the program needs before it reads anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from common import ROOT

DEEP = 50_000
LIMIT_S = 120
CELL, ATOMS = 10.0, 8


def write(folder: Path) -> None:
    """Write a right input of two frames and one step."""
    rng = np.random.default_rng(0)
    system = folder / "data" / "set.000"
    system.mkdir(parents=True)
    (folder / "data" / "type.raw").write_text("0\n" * ATOMS)
    (folder / "data" / "type_map.raw").write_text("Si\n")
    sites = np.array(list(np.ndindex(2, 2, 2))) * CELL / 2
    np.save(system / "coord.npy", (sites + rng.normal(0, 0.1, (2, ATOMS, 3))).reshape(2, -1))
    np.save(system / "box.npy", np.tile(CELL * np.eye(3).ravel(), (2, 1)))
    np.save(system / "energy.npy", rng.normal(size=2))
    force = rng.normal(size=(2, ATOMS, 3))
    np.save(system / "force.npy", (force - force.mean(axis=1, keepdims=True)).reshape(2, -1))
    descriptor = {"type": "se_e2_a", "sel": "auto", "rcut": 6.0, "neuron": [4, 8], "axis_neuron": 4}
    config = {
        "model": {"type_map": ["Si"], "descriptor": descriptor, "fitting_net": {"neuron": [8]}},
        "loss": {"type": "ener"},
        "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-4},
        "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1, "disp_freq": 1, "save_freq": 1},
    }
    (folder / "input.json").write_text(json.dumps(config))


def cell(*rows: tuple[float, float, float]) -> Callable[[Path], None]:
    """Return what puts a cell into the second frame."""

    def change(folder: Path) -> None:
        file = folder / "data" / "set.000" / "box.npy"
        box = np.load(file)
        box[1] = np.ravel(rows)
        np.save(file, box)

    return change


def claim(name: str, shape: tuple[int, ...]) -> Callable[[Path], None]:
    """Return what lets the header of an array say that it is larger than its file."""

    def change(folder: Path) -> None:
        with (folder / "data" / "set.000" / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
            file.write(bytes(800))

    return change


def long_header(folder: Path) -> None:
    """Let a header say that it is 4 GB long itself."""
    (folder / "data" / "set.000" / "force.npy").write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{" + bytes(800))


def sparse_hdf5(folder: Path, first: int = 0) -> None:
    """Put the data into HDF5, where arrays of a trillion values take no room; of the first frames they are written."""
    import h5py

    with h5py.File(folder / "data.hdf5", "w") as file:
        group = file.create_group("set.000")
        num = 10**12 // (3 * ATOMS)
        for name, width in (("coord", 3 * ATOMS), ("box", 9), ("force", 3 * ATOMS), ("energy", 1)):
            group.create_dataset(f"{name}.npy", (num, width), "f8", chunks=(1000, width))[:first] = 1.0
        file["type.raw"], file["type_map.raw"] = np.zeros(ATOMS, int), np.array(["Si"], "S")
    config = json.loads((folder / "input.json").read_text())
    config["training"]["training_data"]["systems"] = ["data.hdf5"]
    (folder / "input.json").write_text(json.dumps(config))


def text(name: str, content: str) -> Callable[[Path], None]:
    """Return what writes a file."""
    return lambda folder: (folder / name).write_text(content) and None


def bomb(merge: bool) -> str:
    """Return YAML of ten anchors that is a billion sections, or lists, when it is read."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x, x]"]
    for k in range(1, 11):
        uses = ", ".join([f"*a{k - 1}"] * 9)
        lines.append(f"a{k}: &a{k} {{<<: [{uses}], y{k}: {{z: *a{k - 1}}}}}" if merge else f"a{k}: &a{k} [{uses}]")
    return "\n".join(lines) + "\n"


BOTH = (("check", "{input}"), ("train", "{input}"))
MODEL = (
    ("show", "{model}"),
    ("test", "-m", "{model}", "-s", "data"),
    ("train", "input.json", "--init-model", "{model}"),
)
# name -> (what is done to the right input, name of the input or the model, commands)
CASES: dict[str, tuple[Callable[[Path], object], str, tuple[tuple[str, ...], ...]]] = {
    "nothing": (lambda _: None, "input.json", BOTH),
    "cell of nearly no volume": (cell((10, 0, 0), (0, 10, 0), (10, 10, 1e-9)), "input.json", BOTH),
    "cell of 3e-6 of its volume": (cell((10, 0, 0), (0, 10, 0), (10, 10, 6e-5)), "input.json", BOTH),
    "vector of 0.001 angstrom": (cell((10, 0, 0), (0, 10, 0), (0, 0, 1e-3)), "input.json", BOTH),
    "all vectors of 0.3 angstrom": (cell((0.3, 0, 0), (0, 0.3, 0), (0, 0, 0.3)), "input.json", BOTH),
    "vector of 1e6 angstrom": (cell((10, 0, 0), (0, 10, 0), (0, 0, 1e6)), "input.json", BOTH),
    "vectors of 9e4 angstrom": (cell((9e4, 0, 0), (0, 9e4, 0), (0, 0, 9e4)), "input.json", BOTH),
    "YAML bomb of lists": (text("input.yaml", bomb(False)), "input.yaml", BOTH),
    "YAML bomb of merges": (text("input.yaml", bomb(True)), "input.yaml", BOTH),
    "JSON lists 50,000 deep": (text("input.json", "[" * DEEP + "]" * DEEP), "input.json", BOTH),
    "JSON sections 50,000 deep": (text("input.json", '{"a":' * DEEP + "1" + "}" * DEEP), "input.json", BOTH),
    "YAML lists 50,000 deep": (text("input.yaml", "[" * DEEP + "]" * DEEP), "input.yaml", BOTH),
    "YAML block lists 50,000 deep": (text("input.yaml", "- " * DEEP + "a"), "input.yaml", BOTH),
    "YAML sections 50,000 deep": (text("input.yaml", "{a: " * DEEP + "1" + "}" * DEEP), "input.yaml", BOTH),
    "YAML model 50,000 deep": (text("model.yaml", "{a: " * DEEP + "1" + "}" * DEEP), "model.yaml", MODEL),
    "YAML model, block lists 50,000 deep": (text("model.yaml", "- " * DEEP + "a"), "model.yaml", MODEL),
    "YAML model, bomb": (text("model.yaml", bomb(False)), "model.yaml", MODEL),
    "coord.npy claims 1e12 values": (claim("coord", (10**12 // 24, 24)), "input.json", BOTH),
    "force.npy claims 1e12 values": (claim("force", (10**12 // 24, 24)), "input.json", BOTH),
    "energy.npy claims 1e12 values": (claim("energy", (10**12,)), "input.json", BOTH),
    "force.npy, header of 4 GB": (long_header, "input.json", BOTH),
    "HDF5 with 1e12 values, none stored": (sparse_hdf5, "input.json", BOTH),
    "HDF5 with 1e12 values, one frame stored": (partial(sparse_hdf5, first=1), "input.json", BOTH),
}


def rows(work: Path, only: str) -> Iterator[list[str]]:
    """Yield a row for each case and command."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, (change, file, commands) in CASES.items():
        for command in commands if only in name else ():
            folder = work / "case"
            shutil.rmtree(folder, ignore_errors=True)
            write(folder)
            change(folder)
            words = [word.format(input=file, model=file) for word in command]
            with (work / "said").open("wb") as said:
                process = subprocess.Popen(
                    ["timeout", "-s", "KILL", str(LIMIT_S), sys.executable, "-m", "deepmd_ema", *words],
                    cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=said,
                )  # fmt: skip
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            lines = (work / "said").read_text(errors="replace").splitlines()
            first = next((line for line in lines if line.startswith("dp-ema:")), "")
            seconds, size = usage.ru_utime + usage.ru_stime, f"{usage.ru_maxrss / 1024:.0f}"
            yield [
                name,
                " ".join(words),
                str(process.returncode),
                f"{seconds:.1f}",
                size,
                first[:200].replace("|", "\\|"),
            ]


def main() -> None:
    """Try every case and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--output", type=Path, help="write the page here as well")
    args = parser.parse_args()
    titles = ["case", "command", "exit", "CPU s", "MB", "message, first line"]
    with tempfile.TemporaryDirectory() as work:
        table = []
        for row in rows(Path(work), args.only):
            print(*row, sep=" | ", flush=True)
            table.append(row)
    seconds, most = max(float(row[3]) for row in table), max(int(row[4]) for row in table)
    head = [
        f"# Time and memory of inputs that are larger than they look ({time.strftime('%Y-%m-%d')})",
        "",
        "`python benchmarks/check_bounds.py`",
        "",
        f"{len(table)} runs, one process each; at most {seconds:.1f} s of computing and {most} MB.",
        "",
    ]
    body = [f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *table]]
    if args.output:
        args.output.write_text("\n".join([*head, *body, ""]))


if __name__ == "__main__":
    main()
