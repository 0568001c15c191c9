"""Statistics kept in a file between runs, laid out as DeePMD-kit lays out its ``stat_file``."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deepmd_ema.errors import DataError
from deepmd_ema.files import atomic_write
from deepmd_ema.model.statistics import Statistics

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig

Array: TypeAlias = np.ndarray

SETTINGS = "dp_ema_settings"  # what DeePMD-kit's hash leaves out; it does not read this
BIAS, BIAS_STD, OBSERVED = "bias_atom_energy", "std_atom_energy", "observed_type"


def write_stat_file(path: str | Path, config: ModelConfig, statistics: Statistics) -> None:
    """Write statistics to a folder, or to an HDF5 file if ``path`` ends in ``.h5`` or ``.hdf5``.

    Statistics of other type maps or cutoffs that are already there stay.
    """
    path = Path(path)
    environment = _hash(config)
    items: dict[str, Array] = {
        BIAS: statistics.bias[:, None],
        BIAS_STD: statistics.bias_std[:, None],
        OBSERVED: np.array(statistics.observed, dtype=bytes),
        SETTINGS: np.array([_settings(config).encode()]),
    }
    for t, (radial, angular) in enumerate(zip(statistics.radial, statistics.angular)):
        items |= {f"{environment}/r_{t}": radial, f"{environment}/a_{t}": angular}
    for name, sums in (("fparam", statistics.fparam), ("aparam", statistics.aparam)):
        if sums is not None:
            items[name] = sums
    items = {f"{' '.join(config.type_map)}/{name}": value for name, value in items.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_hdf5(path):
        _write_hdf5(path, items)
    else:
        _write_folder(path, items)


def read_stat_file(path: str | Path, config: ModelConfig) -> Statistics | None:
    """Return the statistics of this model in a stat file, or None if the file does not hold all of them.

    Raises:
        DataError: if the file is there but cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return None
    num_types, fitting = len(config.type_map), config.fitting_net
    environment = _hash(config)
    wanted = [BIAS, BIAS_STD, OBSERVED]
    wanted += [f"{environment}/{kind}_{t}" for t in range(num_types) for kind in "ra"]
    wanted += [n for n, count in (("fparam", fitting.numb_fparam), ("aparam", fitting.numb_aparam)) if count]
    root = " ".join(config.type_map)
    try:
        found = (_read_hdf5 if _is_hdf5(path) else _read_folder)(path, root, [*wanted, SETTINGS])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: statistics that cannot be read ({error}). Remove it to make it anew.") from error
    settings = found.pop(SETTINGS, None)
    if any(name not in found for name in wanted) or (
        settings is not None and np.ravel(settings)[0] != _settings(config).encode()
    ):
        return None
    return Statistics(
        type_map=tuple(config.type_map),
        radial=np.stack([found[f"{environment}/r_{t}"] for t in range(num_types)]),
        angular=np.stack([found[f"{environment}/a_{t}"] for t in range(num_types)]),
        bias=found[BIAS].reshape(num_types),
        bias_std=found[BIAS_STD].reshape(num_types),
        fparam=found.get("fparam"),
        aparam=found.get("aparam"),
        observed=tuple(name.decode() for name in found[OBSERVED].ravel()),
        set_davg_zero=config.descriptor.set_davg_zero,
        protect=config.data_stat_protect,
    )


def _hash(config: ModelConfig) -> str:
    descriptor = config.descriptor
    about = {
        "type": "se_a",
        "ntypes": len(config.type_map),
        "rcut": round(descriptor.rcut, 2),
        "rcut_smth": round(descriptor.rcut_smth, 2),
        "nsel": sum(_numbers(descriptor.sel)),
        "sel": _numbers(descriptor.sel),
        "mixed_types": False,
    }
    return hashlib.sha1(json.dumps(about).encode(), usedforsecurity=False).hexdigest()


def _settings(config: ModelConfig) -> str:
    """Return what else the statistics depend on; a file of other settings is not taken."""
    descriptor, fitting = config.descriptor, config.fitting_net
    about: Mapping[str, Any] = {
        "rcut": descriptor.rcut,
        "rcut_smth": descriptor.rcut_smth,
        "exclude_types": sorted(sorted(pair) for pair in descriptor.exclude_types),
        "env_protection": descriptor.env_protection,
        "pair_exclude_types": sorted(sorted(pair) for pair in config.pair_exclude_types),
        "atom_exclude_types": sorted(config.atom_exclude_types),
        "preset_out_bias": config.preset_out_bias,
        "atom_ener": fitting.atom_ener or None,
        "rcond": fitting.rcond,
    }
    return json.dumps(about, sort_keys=True)


def _numbers(sel: list[int] | str) -> list[int]:
    assert not isinstance(sel, str), "sel must be resolved to numbers"
    return list(sel)


def _is_hdf5(path: Path) -> bool:
    return path.suffix.lower() in (".h5", ".hdf5")


def _write_folder(path: Path, items: Mapping[str, Array]) -> None:
    for name, value in items.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as part, part.open("wb") as stream:
            np.save(stream, value)


def _read_folder(path: Path, root: str, names: list[str]) -> dict[str, Array]:
    there = [name for name in names if (path / root / name).is_file()]
    out = {}
    for name in there:
        with (path / root / name).open("rb") as stream:
            out[name] = np.load(stream, allow_pickle=False)
    return out


def _write_hdf5(path: Path, items: Mapping[str, Array]) -> None:
    import h5py

    with atomic_write(path) as part:
        if path.exists():
            shutil.copyfile(path, part)
        with h5py.File(part, "a") as file:
            for name, value in items.items():
                if name in file:
                    del file[name]
                file.create_dataset(name, data=value)


def _read_hdf5(path: Path, root: str, names: list[str]) -> dict[str, Array]:
    import h5py

    with h5py.File(path, "r") as file:
        return {name: file[f"{root}/{name}"][()] for name in names if f"{root}/{name}" in file}
