"""Training on data sets larger than memory: start-up, memory over time, and the share of time waiting for data.

usage: python benchmarks/large_data.py [--frames 20000 ...] [--kinds npy systems mixed lmdb hdf5] [--output PAGE]

Makes sets of small molecules whose energies and forces are those of a harmonic potential, and trains on each twice.
A set is made once per size and kept in --work. 1,000,000 frames of 9 atoms take 270 MB and, with --kinds npy systems,
about ten minutes in all; LMDB and HDF5 are made with a tenth of the frames.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import common
import numpy as np

NAMES = ["C", "H", "N", "O"]
RADII = {"C": 0.76, "H": 0.31, "N": 0.71, "O": 0.66}  # angstrom
BOND, CLOSE, FAR = 20.0, 2.0, 0.1  # eV/angstrom^2: bonds, angles, other pairs
AMPLITUDE = 0.05  # angstrom, standard deviation of a coordinate
AT_ONCE = 20_000  # frames in memory
FEWER = {"lmdb": 10, "hdf5": 1, "mixed": 4, "npy": 1, "systems": 1}  # divisors of --frames
NUM_SYSTEMS = 1000
NUM_SETS = 10
VALIDATION = 1000  # frames
MB = 1 << 20


@dataclass(frozen=True)
class Molecule:
    """A molecule at rest.

    Attributes:
        types: (N,) indices into ``NAMES``.
        rest: (N, 3) positions, angstrom.
    """

    types: np.ndarray
    rest: np.ndarray

    def frames(self, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return positions (F, 3 N), energies (F,) and forces (F, 3 N) of displaced molecules, eV and angstrom."""
        coord = self.rest + AMPLITUDE * rng.standard_normal((num, *self.rest.shape), np.float32)
        coord = coord.astype(np.float32).astype(np.float64)  # as it is stored
        i, j = np.triu_indices(len(self.types), 1)
        length = np.linalg.norm(self.rest[j] - self.rest[i], axis=1)
        stiff = np.select([length < 1.7, length < 2.8], [BOND, CLOSE], FAR)
        vector = coord[:, j] - coord[:, i]
        distance = np.linalg.norm(vector, axis=2)
        stretch = distance - length
        energy = 0.5 * (stiff * stretch**2).sum(1) - 10.0 * len(self.types)
        pull = (stiff * stretch / distance)[:, :, None] * vector
        force = np.zeros_like(coord)
        for pair, (a, b) in enumerate(zip(i, j)):
            force[:, a] += pull[:, pair]
            force[:, b] -= pull[:, pair]
        return {
            "coord": coord.astype(np.float32).reshape(num, -1),
            "energy": energy,
            "force": force.astype(np.float32).reshape(num, -1),
        }


def main() -> None:
    """Make the sets, train on each twice, and print the page."""
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for frames, kind in ((max(2000, number // FEWER[kind]), kind) for number in args.frames for kind in args.kinds):
        folder = args.work / f"{kind}-{frames}"
        seconds = make_set(folder, kind, frames, min(NUM_SYSTEMS, max(10, frames // 100)))
        print(f"{folder}: {frames:,} frames, made in {seconds:.1f} s", flush=True)
        rows += _measure(folder, kind, frames, args)
        if args.remove:
            shutil.rmtree(folder)
    numbers, kinds = " ".join(map(str, args.frames)), " ".join(args.kinds)
    command = f"benchmarks/large_data.py --frames {numbers} --kinds {kinds} --steps {args.steps} "
    page = "\n\n".join(
        [
            f"# Large data sets, {common.today()}",
            f"`python {command}--batch {args.batch}`: molecules of 9 atoms (6 to 12 where systems are many or mixed) "
            f"with energies and forces, se_e2_a, {args.batch} frames a batch; MB of memory are resident: private, and "
            "mapped files.Read are bytes that the process requests until the first step is done; those "
            f"of the first row of a set with {'an empty' if args.cold else 'whatever'} page cache. Waiting is the "
            "share of the time of training, from the first batch on.  \n"
            f"On {common.machine(common.programs(None), args.threads, args.device)}.",
            common.table(
                ["set", "frames", "MB on disk", "start", "first step after, s", "MB read until then",
                 "memory at the first step, MB", "largest, MB", "private at the end, MB", "steps/s",
                 "waiting for data"],
                rows,
            ),
        ]
    )  # fmt: skip
    common.publish(page, args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--frames", type=int, nargs="+", default=[20_000], help="frames of a set, fewer of some kinds")
    parser.add_argument("--kinds", nargs="+", default=list(FEWER), choices=list(FEWER), help="how frames are stored")
    parser.add_argument("--steps", type=int, default=300, help="training steps of a run")
    parser.add_argument("--batch", type=int, default=16, help="frames per batch")
    parser.add_argument("--cold", action="store_true", help="drop a set from the page cache before its first run")
    parser.add_argument("--remove", action="store_true", help="remove each set after its runs")
    return parser.parse_args()


def make_set(folder: Path, kind: str, frames: int, num_systems: int) -> float:
    """Write training and validation frames below ``folder`` unless they are there; return the seconds it took."""
    if (folder / "complete").exists():
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    begun, rng = time.perf_counter(), np.random.default_rng(1)
    molecules = list(_molecules(num_systems)) if kind in ("systems", "mixed", "lmdb") else [_molecule((2, 6, 0, 1))]
    MAKERS[kind](folder / "train", molecules, frames, rng)
    few = molecules[:: max(1, len(molecules) // 10)]
    _write_systems(folder / "valid", few, VALIDATION, rng)
    (folder / "complete").touch()
    return time.perf_counter() - begun


def _molecules(num: int) -> Iterator[Molecule]:
    """Yield molecules of different compositions of 6 to 12 atoms, the first ``num`` in an order drawn once."""
    every = [
        (c, h, n, size - c - h - n)
        for size in range(6, 13)
        for c in range(1, size)
        for h in range(size - c + 1)
        for n in range(size - c - h + 1)
        if h <= 2 * (size - h) + 1
    ]
    for k in np.random.default_rng(0).permutation(len(every))[:num]:
        yield _molecule(every[k])


def _molecule(counts: tuple[int, ...]) -> Molecule:
    """Return atoms that grow from the first one by bonds in random directions, none too close to another."""
    rng = np.random.default_rng([7, *counts])
    types = np.repeat([0, 2, 3, 1], [counts[0], counts[2], counts[3], counts[1]])  # hydrogen comes last
    radius = np.array([RADII[NAMES[t]] for t in types])
    num_heavy = int((types != 1).sum())
    rest, tries = np.zeros((1, 3)), 0
    while len(rest) < len(types):
        k, tries = len(rest), tries + 1
        if tries % 1000 == 0:  # no room is left: begin anew
            rest, k = rest[:1], 1
        way = rng.standard_normal(3)
        parent = int(rng.integers(min(k, num_heavy)))  # hydrogen has one bond
        at = rest[parent] + way / np.linalg.norm(way) * (radius[k] + radius[parent])
        far = np.linalg.norm(rest - at, axis=1) >= np.maximum(1.4, 1.4 * (radius[:k] + radius[k]))
        far[parent] = True
        if far.all():
            rest = np.vstack([rest, at])
    order = np.argsort(types, kind="stable")
    return Molecule(types[order], rest[order])


def _pieces(num: int) -> Iterator[int]:
    for begin in range(0, num, AT_ONCE):
        yield min(AT_ONCE, num - begin)


def _write_npy(folder: Path, molecules: list[Molecule], frames: int, rng: np.random.Generator) -> None:
    """Write one system in ten sets, each of them piece by piece."""
    [molecule] = molecules
    _describe(folder, molecule.types)
    for k, part in enumerate(np.array_split(np.arange(frames), NUM_SETS)):
        _write_arrays(folder / f"set.{k:03d}", len(part), (molecule.frames(n, rng) for n in _pieces(len(part))))


def _write_systems(folder: Path, molecules: list[Molecule], frames: int, rng: np.random.Generator) -> None:
    for k, (molecule, part) in enumerate(zip(molecules, np.array_split(np.arange(frames), len(molecules)))):
        _describe(folder / f"system_{k:04d}", molecule.types)
        _write_arrays(folder / f"system_{k:04d}" / "set.000", len(part), [molecule.frames(len(part), rng)])


def _write_mixed(folder: Path, molecules: list[Molecule], frames: int, rng: np.random.Generator) -> None:
    """Write one mixed system: frames of all molecules in a random order, padded with virtual atoms."""
    most = max(len(molecule.types) for molecule in molecules)
    _describe(folder, np.zeros(most, np.int64))
    for k, part in enumerate(np.array_split(np.arange(frames), NUM_SETS)):
        pieces = (_mixed_frames(molecules, n, most, rng) for n in _pieces(len(part)))
        _write_arrays(folder / f"set.{k:03d}", len(part), pieces)


def _mixed_frames(molecules: list[Molecule], num: int, most: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    chosen = rng.integers(len(molecules), size=num)
    out = {
        "real_atom_types": np.full((num, most), -1, np.int32),
        "coord": np.zeros((num, 3 * most), np.float32),
        "energy": np.zeros(num),
        "force": np.zeros((num, 3 * most), np.float32),
    }
    for kind in np.unique(chosen):
        rows, molecule = np.flatnonzero(chosen == kind), molecules[kind]
        out["real_atom_types"][rows, : len(molecule.types)] = molecule.types
        for name, values in molecule.frames(len(rows), rng).items():
            if name == "energy":
                out[name][rows] = values
            else:
                out[name][rows, : values.shape[1]] = values
    return out


def _write_lmdb(folder: Path, molecules: list[Molecule], frames: int, rng: np.random.Generator) -> None:
    """Write a data base as DeePMD-kit names its parts: one record per frame."""
    import lmdb
    import msgpack

    def encoded(array: np.ndarray) -> dict:
        return {"type": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}

    about = {"nframes": frames, "frame_idx_fmt": "012d", "type_map": NAMES}
    folder.mkdir(parents=True)
    with lmdb.open(str(folder / "data.lmdb"), map_size=frames * 4096 + (64 << 20)) as env:
        with env.begin(write=True) as transaction:
            transaction.put(b"__metadata__", msgpack.packb(about))
        first = 0
        for num in _pieces(frames):
            most = max(len(molecule.types) for molecule in molecules)
            found = _mixed_frames(molecules, num, most, rng)
            with env.begin(write=True) as transaction:
                for k in range(num):
                    size = int((found["real_atom_types"][k] >= 0).sum())
                    record = {
                        "atom_types": found["real_atom_types"][k, :size],
                        "coords": found["coord"][k, : 3 * size].reshape(-1, 3),
                        "forces": found["force"][k, : 3 * size].reshape(-1, 3),
                        "energies": found["energy"][k : k + 1],
                    }
                    packed = msgpack.packb({name: encoded(array) for name, array in record.items()})
                    transaction.put(format(first + k, "012d").encode(), packed)
            first += num


def _write_hdf5(folder: Path, molecules: list[Molecule], frames: int, rng: np.random.Generator) -> None:
    """Write the folders of ``npy`` as groups of one file."""
    import h5py

    _write_npy(folder / "folders", molecules, frames, rng)
    with h5py.File(folder / "data.h5", "w") as file:
        group = file.create_group("molecule")
        for name in ("type.raw", "type_map.raw"):
            words = (folder / "folders" / name).read_text().split()
            group[name] = np.array(words, dtype=int if name == "type.raw" else bytes)
        group["nopbc"] = True
        for path in sorted((folder / "folders").glob("set.*/*.npy")):
            group[f"{path.parent.name}/{path.name}"] = np.load(path, mmap_mode="r")
    shutil.rmtree(folder / "folders")


MAKERS = {
    "npy": _write_npy, "systems": _write_systems, "mixed": _write_mixed, "lmdb": _write_lmdb, "hdf5": _write_hdf5,
}  # fmt: skip


def _describe(folder: Path, types: np.ndarray) -> None:
    folder.mkdir(parents=True)
    np.savetxt(folder / "type.raw", types, fmt="%d")
    (folder / "type_map.raw").write_text("\n".join(NAMES) + "\n")
    (folder / "nopbc").touch()


def _write_arrays(folder: Path, frames: int, pieces) -> None:
    """Write the arrays of a set from pieces that follow each other, none of which need hold all frames."""
    folder.mkdir(parents=True)
    files: dict[str, np.ndarray] = {}
    first = 0
    for piece in pieces:
        for name, values in piece.items():
            if name not in files:
                shape = (frames, *values.shape[1:])
                files[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", values.dtype, shape)
            files[name][first : first + len(values)] = values
        first += len(piece["energy"])


def _input(folder: Path, args: argparse.Namespace) -> dict:
    systems = [str(next(folder.glob(f"train/{name}"))) for name in ("data.lmdb", "data.h5") if
               (folder / "train" / name).exists()]  # fmt: skip
    return {
        "model": {
            "type_map": NAMES,
            "descriptor": {"type": "se_e2_a", "sel": "auto", "rcut": 6.0, "rcut_smth": 0.5, "neuron": [25, 50, 100],
                           "axis_neuron": 16, "type_one_side": True, "seed": 1, "precision": "float32"},
            "fitting_net": {"neuron": [120, 120, 120], "seed": 1, "precision": "float32"},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-4, "decay_steps": 100},
        "loss": {"type": "ener", "start_pref_e": 0.02, "limit_pref_e": 1, "start_pref_f": 1000, "limit_pref_f": 1},
        "training": {
            "training_data": {"systems": systems or [str(folder / "train")], "batch_size": args.batch},
            "validation_data": {"systems": [str(folder / "valid")], "batch_size": args.batch},
            "stat_file": "statistics",
            "numb_steps": args.steps, "disp_freq": args.steps // 5, "save_freq": args.steps, "seed": 1,
        },
    }  # fmt: skip


@dataclass
class Watched:
    """Measurements of a run from outside.

    Attributes:
        first_step: seconds until the first row of lcurve.out was there.
        read: bytes read until then.
        samples: seconds, private memory and memory of mapped files, MB.
        log: what it printed.
    """

    first_step: float = 0.0
    read: int = 0
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    log: str = ""


def _measure(folder: Path, kind: str, frames: int, args: argparse.Namespace) -> list[list[str]]:
    place = args.work / f"run-{folder.name}"
    common.write_input(place, _input(folder, args))
    size = sum(file.stat().st_size for file in (folder / "train").rglob("*") if file.is_file())
    rows = []
    for start in ("first", "second"):
        if args.cold and start == "first":
            _drop_from_cache(folder)
        run = _watch(place, common.environment(args.threads, args.device))
        at_first = next((sum(sample[1:]) for sample in run.samples if sample[0] >= run.first_step), 0.0)
        waiting = re.search(r"waiting\s+for data (\S+ %)", run.log)
        speeds = re.findall(r"\((\S+) steps/s", run.log)
        rows.append(
            [kind, f"{frames:,}", f"{size / MB:,.0f}", start, f"{run.first_step:.1f}", f"{run.read / MB:,.0f}",
             f"{at_first:,.0f}", f"{max(sum(sample[1:]) for sample in run.samples):,.0f}",
             f"{run.samples[-1][1]:,.0f}", speeds[-1] if speeds else "", waiting.group(1) if waiting else ""]
        )  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
        (place / f"{start}.json").write_text(json.dumps(run.samples))
    return rows


def _watch(place: Path, env: dict[str, str]) -> Watched:
    """Train, and look at the memory of the process now and then."""
    [program] = common.programs(None).values()
    lcurve, log, seen = place / "lcurve.out", place / "train.log", Watched()
    lcurve.unlink(missing_ok=True)
    begun = time.perf_counter()
    with log.open("w") as out:
        run = subprocess.Popen([*program.command, "train", "input.json"], cwd=place, env=env, stdout=out, stderr=out)
        while run.poll() is None:
            now = time.perf_counter() - begun
            try:
                status = Path(f"/proc/{run.pid}/status").read_text()
                read = int(re.findall(r"rchar: (\d+)", Path(f"/proc/{run.pid}/io").read_text())[0])
            except (FileNotFoundError, ProcessLookupError, IndexError):
                break
            found = dict(re.findall(r"(RssAnon|RssFile):\s+(\d+) kB", status))
            if found:
                seen.samples.append((now, int(found["RssAnon"]) / 1024, int(found["RssFile"]) / 1024))
            rows = lcurve.read_text().splitlines() if not seen.first_step and lcurve.exists() else []
            if any(row.strip() and not row.startswith("#") for row in rows):
                seen.first_step, seen.read = now, read
            time.sleep(0.02)
        run.wait()
    seen.log = log.read_text()
    if run.returncode:
        raise SystemExit(f"failed in {place}:\n{seen.log[-3000:]}")
    return seen


def _drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
