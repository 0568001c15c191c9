"""Tiny data sets with an exact toy potential, and a tiny input, for every test."""

import errno
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import torch

from deepmd_ema.checkpoint import FORMAT
from deepmd_ema.config.outputs import CHECKED, RECORD
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.source import ReadSpec

SPACING = 2.3  # angstrom, of the lattice on which atoms jitter
TOY_RCUT = 4.2
ELEMENT_ENERGY = -3.0  # eV; element k of the list has (k + 1) times this


def toy_labels(coord, types, box=None):
    """Return energy (eV), force (N, 3), virial (9,) and atom energies (N,) of a smooth pair
    potential.

    A Morse well whose depth and place depend on the two types, switched off at TOY_RCUT with two
    derivatives; exact forces and virials, for cells of any shape and size. Brute force over images.
    """
    coord, types = np.asarray(coord, float), np.asarray(types)
    natoms = len(types)
    shifts = (
        np.zeros((1, 3))
        if box is None
        else _image_shifts(np.asarray(box, float).reshape(3, 3))
    )
    vector = (
        coord[None, :, None, :] + shifts[None, None] - coord[:, None, None, :]
    )  # (N, N, S, 3), j's image minus i
    distance = np.linalg.norm(vector, axis=-1)
    near = (distance < TOY_RCUT) & (distance > 1e-9)
    i, j, s = np.nonzero(near)
    r, d = distance[i, j, s], vector[i, j, s]
    pair_energy, slope = _morse(r, types[i], types[j])
    atom_energy = 0.5 * np.bincount(
        i, weights=pair_energy, minlength=natoms
    ) + ELEMENT_ENERGY * (types + 1)
    force = np.zeros((natoms, 3))
    np.add.at(
        force, i, (slope / r)[:, None] * d
    )  # the full list has each pair twice: once for each end
    virial = -0.5 * np.einsum("p,pa,pb->ab", slope / r, d, d)
    return atom_energy.sum(), force, virial.reshape(9), atom_energy


def toy_hessian(coord, types, box=None, step=1e-4):
    """Return the second derivatives (3 N, 3 N) of the energy of ``toy_labels``, by central
    differences of forces.
    """
    rows = []
    for place in np.ndindex(np.shape(coord)):
        moved = np.zeros_like(coord)
        moved[place] = step
        up, down = (toy_labels(coord + sign * moved, types, box)[1] for sign in (1, -1))
        rows.append((down - up).ravel() / (2 * step))
    return (np.array(rows) + np.array(rows).T) / 2


def toy_frame(rng, natoms=12, num_types=2, pbc=True, jitter=0.25, triclinic=True):
    """Return coord (N, 3), types (N,), box (3, 3) or None: a jittered lattice with the types in
    turn.
    """
    grid = _grid(natoms)
    sites = np.stack(
        np.meshgrid(*[np.arange(g) for g in grid], indexing="ij"), -1
    ).reshape(-1, 3)[:natoms]
    box = np.diag(np.array(grid, float) * SPACING)
    if triclinic:
        box[1, 0], box[2, 0], box[2, 1] = 0.3, -0.2, 0.4
    coord = sites / np.array(grid) @ box + rng.uniform(-jitter, jitter, (natoms, 3))
    types = np.arange(natoms) % num_types
    return coord, types, box if pbc else None


def write_system(
    path,
    frames=8,
    natoms=12,
    elements=("O", "H"),
    seed=0,
    pbc=True,
    virial=True,
    *,
    force=True,
    energy=True,
    atom_ener=False,
    atom_pref=False,
    hessian=False,
    fparam=0,
    aparam=0,
    sets=1,
    mixed=False,
    virtual=0,
    num_types=None,
    jitter=0.25,
    triclinic=True,
    dtype=np.float64,
):
    """Write a system with toy labels in deepmd/npy (``mixed``: deepmd/npy/mixed) form and return
    its path.

    Frames are spread over ``sets`` folders. ``mixed`` frames have their types in another order in
    each frame and ``virtual`` more atoms of type -1 at random places. ``fparam`` and ``aparam`` are
    numbers of columns to write.
    """
    path, rng = Path(path), np.random.default_rng(seed)
    num_types = num_types or len(elements)
    records = [
        _record(rng, natoms, num_types, pbc, jitter, triclinic, mixed, virtual)
        for _ in range(frames)
    ]
    path.mkdir(parents=True, exist_ok=True)
    total = natoms + virtual
    types = np.zeros(total, int) if mixed else records[0]["types"]
    np.savetxt(path / "type.raw", types, fmt="%d")
    (path / "type_map.raw").write_text("\n".join(elements) + "\n")
    if not pbc:
        (path / "nopbc").touch()
    wanted = {
        "energy": energy,
        "force": force,
        "virial": virial and pbc,
        "atom_ener": atom_ener,
    }
    for number, chunk in enumerate(np.array_split(np.arange(frames), sets)):
        folder = path / f"set.{number:03d}"
        folder.mkdir(exist_ok=True)
        arrays = {"coord": [records[k]["coord"].ravel() for k in chunk]}
        arrays |= {
            name: [np.ravel(records[k][name]) for k in chunk]
            for name, want in wanted.items()
            if want
        }
        if pbc:
            arrays["box"] = [records[k]["box"].ravel() for k in chunk]
        if hessian:
            arrays["hessian"] = [_hessian_of(records[k]).ravel() for k in chunk]
        if atom_pref:
            arrays["atom_pref"] = rng.uniform(0.5, 1.5, (len(chunk), total))
        if fparam:
            arrays["fparam"] = rng.normal(size=(len(chunk), fparam))
        if aparam:
            arrays["aparam"] = rng.normal(size=(len(chunk), total * aparam))
        for name, value in arrays.items():
            array = np.asarray(value)
            np.save(
                folder / f"{name}.npy",
                (array.ravel() if name == "energy" else array).astype(dtype),
            )
        if mixed:
            np.save(
                folder / "real_atom_types.npy",
                np.array([records[k]["types"] for k in chunk], np.int32),
            )
    return path


def open_data(
    paths, type_map, labels=(), *, rglob_patterns=None, where="systems", **spec
):
    """Return the sources at ``paths`` with these elements and labels."""
    return open_systems(
        paths, ReadSpec(type_map, labels, **spec), rglob_patterns, where
    )


def tiny_input(
    training, validation=None, *, num_steps=20, type_map=("O", "H"), **changes
):
    """Return the dict of an ``input.json`` for a tiny se_e2_a model; ``changes`` are
    ``section__key=value``.
    """
    config = {
        "model": {
            "type_map": list(type_map),
            "descriptor": {
                "type": "se_e2_a",
                "sel": [24] * len(type_map),
                "rcut": 4.0,
                "rcut_smth": 1.0,
                "neuron": [4, 8],
                "axis_neuron": 4,
                "seed": 1,
            },
            "fitting_net": {"neuron": [8, 8], "resnet_dt": True, "seed": 1},
        },
        "learning_rate": {
            "type": "exp",
            "start_lr": 1e-3,
            "stop_lr": 1e-6,
            "decay_steps": 10,
        },
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0.01,
            "limit_pref_v": 0.1,
        },
        "training": {
            "training_data": {"systems": [str(s) for s in training], "batch_size": 2},
            "numb_steps": num_steps,
            "seed": 10,
            "disp_freq": 5,
            "save_freq": 10,
        },
    }
    if validation is not None:
        data = {
            "systems": [str(s) for s in validation],
            "batch_size": 2,
            "numb_btch": 1,
        }
        config["training"]["validation_data"] = data
    return changed(config, changes)


def trains_in(root, monkeypatch, data, options, device="cpu"):
    """Return a function that trains in a folder of its own: start(name, num_steps, options, **how).

    Args:
        root: where the folders are made.
        monkeypatch: of the test.
        data: the systems to train on, and those to validate on.
        options: of all its runs, as keys of ``tiny_input``.
        device: of the runs whose call names none.
    """

    from deepmd_ema.training.run import run_training

    def start(name, num_steps=20, more=None, **how):
        folder = root / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        config = tiny_input(*data, num_steps=num_steps, **{**options, **(more or {})})
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", **{"device": device, **how})
        return folder

    return start


def validated(every, **more):
    """Return options of a run with the average ``ema`` that validates live and averaged weights
    every so many steps.
    """
    return {
        "training__enable_ema": True,
        "training__ema_decay": 0.9,
        "validating__full_validation": True,
        "validating__ema_full_validation": True,
        "validating__validation_freq": every,
        "validating__full_val_start": 0,
        **more,
    }


def changed(values, changes):
    """Return ``values`` with sections, or keys of them after ``__``, replaced in place."""
    for where, value in changes.items():
        *sections, key = where.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return values


class FullDisk:
    """A file on a disk with space for ``space`` bytes more."""

    def __init__(self, file, space=100):
        self.file, self.space = file, space

    def write(self, data):
        self.space -= len(data)
        if self.space < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def flush(self):
        self.file.flush()


def killed_at(at, action):
    """Call ``action`` in a child process, killed at change ``at`` of the disk; return whether it
    was.
    """
    pid = (
        os.fork()
    )  # as a fork: starting torch anew for each change would take a second each
    if pid == 0:
        left = [at]

        def before(call):
            def change(*given, **how):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*given, **how)

            return change

        for name in ("replace", "mkdir", "unlink", "rmdir", "fsync"):
            setattr(os, name, before(getattr(os, name)))
        torch.save, Path.symlink_to = before(torch.save), before(Path.symlink_to)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def training_parts():
    """Return the least content of a checkpoint beside its weights."""
    streams, display = {"": {"frames": 0}}, {"sums": {}, "count": 0}
    return {
        "optimizer": {"type": "Adam", "state": {}},
        "streams": streams,
        "display": display,
        "validation_pending": False,
    }


def checkpoint_payload(step=3, kind="training", weights="live", value=0.0, **more):
    """Return a checkpoint of three tensors: the numbers 0 to 5, zeros, and ``step + value``."""
    model = {
        "a.weight": torch.arange(6.0).view(2, 3),
        "a.bias": torch.zeros(2, dtype=torch.float64),
    }
    head = {
        "format": FORMAT,
        "version": "0.1.0",
        "kind": kind,
        "weights": weights,
        "step": step,
    }
    parts = (
        training_parts()
        if kind == "training"
        else {"average": {}}
        if kind == "average"
        else {}
    )
    config = {"model": {"type_map": ["O"]}, "training": {"seed": 1}}
    return {
        **head,
        "config": config,
        "model": {**model, "w": torch.full((50,), step + value)},
        **parts,
        **more,
    }


def assert_same(a, b, path=""):
    """Every tensor and number of two checkpoints is bitwise equal."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


def files_of_run(folder):
    """Return the names of all files of a run, but its record and the results of checks of the data.

    These have dates, and a restart after "sel": "auto" has those of its numbers as well.
    """
    files = [p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()]
    return {str(p) for p in files if p.parent.suffix != CHECKED and p.name != RECORD}


def assert_same_files(left, right):
    """Return the names of the files of two folders: the same ones, with the same bytes or the same
    checkpoints.
    """
    names = [files_of_run(folder) for folder in (left, right)]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".pt"):
            assert_same(
                *(
                    torch.load(folder / name, weights_only=True)
                    for folder in (left, right)
                ),
                name,
            )
        else:
            assert (left / name).read_bytes() == (right / name).read_bytes(), name
    return names[0]


def _record(rng, natoms, num_types, pbc, jitter, triclinic, mixed, virtual):
    coord, types, box = toy_frame(rng, natoms, num_types, pbc, jitter, triclinic)
    if mixed:
        types = rng.permutation(types)
    energy, force, virial, atom_energy = toy_labels(coord, types, box)
    record = {"coord": coord, "types": types, "force": force, "atom_ener": atom_energy}
    if virtual:
        order = rng.permutation(natoms + virtual)
        fill = {
            "coord": rng.uniform(0, SPACING, (virtual, 3)),
            "types": np.full(virtual, -1),
            "force": np.zeros((virtual, 3)),
            "atom_ener": np.zeros(virtual),
        }
        record = {
            name: np.concatenate([value, fill[name]])[order]
            for name, value in record.items()
        }
    return record | {"energy": energy, "virial": virial, "box": box}


def _hessian_of(record):
    """Return the Hessian of a record, nan for virtual atoms."""
    real = np.flatnonzero(record["types"] >= 0)
    places = (3 * real[:, None] + np.arange(3)).ravel()
    whole = np.full((3 * len(record["types"]),) * 2, np.nan)
    whole[np.ix_(places, places)] = toy_hessian(
        record["coord"][real], record["types"][real], record["box"]
    )
    return whole


def _morse(r, type_i, type_j):
    kind = type_i + type_j
    depth, place, steep = 0.3 + 0.1 * kind, 2.2 + 0.1 * (kind % 3), 1.4
    decay = np.exp(-steep * (r - place))
    value, slope = (
        depth * ((1 - decay) ** 2 - 1),
        2 * depth * steep * (1 - decay) * decay,
    )
    u = r / TOY_RCUT
    switch = 1 - 10 * u**3 + 15 * u**4 - 6 * u**5
    switch_slope = (-30 * u**2 + 60 * u**3 - 30 * u**4) / TOY_RCUT
    return value * switch, slope * switch + value * switch_slope


def _image_shifts(box):
    heights = 1 / np.linalg.norm(np.linalg.inv(box), axis=0)
    reach = np.ceil((TOY_RCUT + 2 * SPACING) / heights).astype(int) + 1
    axes = [np.arange(-n, n + 1) for n in reach]
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3) @ box


def _grid(natoms):
    side = max(1, round(natoms ** (1 / 3)))
    grid = [side, side, side]
    while np.prod(grid) < natoms:
        grid[int(np.argmin(grid))] += 1
    return grid


def compile_with(backend):
    """Return ``torch.compile`` with a backend in the place of that which is named in the input."""
    compiled = torch.compile
    return lambda function, **how: compiled(function, **how | {"backend": backend})


def wrong_forces(graph, inputs):
    """A backend of torch.compile whose code returns forces of zero, with gradients of zero."""

    def evaluate(*args):
        return [
            x * 0 if x.dim() == 2 and x.shape[1] == 3 else x
            for x in graph.forward(*args)
        ]

    return evaluate


def blocks(page, language):
    """Return the fenced blocks of a page in one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S
    )
