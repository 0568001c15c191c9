"""Statistics kept in a file between runs, laid out as DeePMD-kit lays out its ``stat_file``."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from deepmd_ema.config.data_options import data_options
from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.messages import differences_of, show
from deepmd_ema.errors import DataError
from deepmd_ema.files import atomic_write
from deepmd_ema.model.output_bias import BiasFit
from deepmd_ema.model.statistics import Statistics
from deepmd_ema.text import first_few

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.interface import Descriptor

Array: TypeAlias = np.ndarray

# options that DeePMD-kit's hash leaves out, and the digest of the data; not read by it
SETTINGS = "dp_ema_settings"
OBSERVED = "observed_type"


def write_stat_file(
    path: str | Path, config: ModelConfig, statistics: Statistics
) -> None:
    """Write statistics to a folder, or to an HDF5 file if ``path`` ends in ``.h5`` or ``.hdf5``.

    Statistics of other type maps or descriptors that are already there stay.
    """
    path = Path(path)
    bias, spread = _bias_names(config)
    options = json.dumps({"model": data_options(config)})
    items: dict[str, Array] = {
        bias: statistics.fit.bias.reshape(len(config.type_map), -1),
        spread: statistics.fit.std.reshape(len(config.type_map), -1),
        OBSERVED: np.array(statistics.observed, dtype=bytes),
        # versions before the digest read the first text only
        SETTINGS: np.array([options.encode(), statistics.content.encode()]),
        **statistics.measured,
        **statistics.conditions,
    }
    # a folder for each type map, as in DeePMD-kit: one file serves several
    items = {
        f"{' '.join(config.type_map)}/{name}": value for name, value in items.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_hdf5(path):
        _write_hdf5(path, items)
    else:
        for name, value in items.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as part, part.open("wb") as stream:
                np.save(stream, value)


def read_stat_file(
    path: str | Path, config: ModelConfig, descriptor: Descriptor
) -> Statistics | str:
    """Return the statistics of this model in a stat file, or why the file does not hold them.

    A file of DeePMD-kit does not say of which options it is; its names and the shapes of its arrays
    decide.

    Raises:
        DataError: if the file is there but cannot be read.
    """
    path = Path(path)
    if not path.exists():
        return "there is no such file"
    fitting = config.fitting_net
    num_types = len(config.type_map)
    # shapes of what the model needs, by name
    conditions = {
        name: (count, 3)
        for name, count in (
            ("fparam", fitting.numb_fparam),
            ("aparam", fitting.numb_aparam),
        )
        if count
    }
    bias, spread = _bias_names(config)
    shape = (num_types, *LABELS[fitting.labels[0]].shape)
    names = [bias, spread, OBSERVED, *descriptor.sum_names, *conditions]
    try:
        stored = _read(path, " ".join(config.type_map), [*names, SETTINGS])
        settings = stored.pop(SETTINGS, np.empty(0)).ravel().tolist()
        # other options are a reason to measure again, not an error
        reason = _difference(settings, config)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path}: statistics that cannot be read ({error}). Remove it to make it anew."
        ) from error
    missing = [name for name in names if name not in stored]
    if reason or missing:
        return (
            reason
            or f"it has no {missing[0]} of the elements {' '.join(config.type_map)}"
        )
    # without the settings of dp-ema shapes are all that can be compared
    for name, expected in {bias: shape, spread: shape, **conditions}.items():
        if stored[name].size != math.prod(expected):
            return f"{name} has shape {list(stored[name].shape)}, expected {list(expected)}"
    return Statistics(
        type_map=tuple(config.type_map),
        measured={name: stored[name] for name in descriptor.sum_names},
        conditions={name: stored[name] for name in conditions},
        fit=BiasFit(stored[bias].reshape(shape), stored[spread].reshape(shape)),
        observed=tuple(name.decode() for name in stored[OBSERVED].ravel()),
        protect=config.data_stat_protect,
        # DeePMD-kit and earlier versions wrote none
        content=b"".join(settings[1:]).decode(),
    )


def _difference(settings: Sequence[bytes], config: ModelConfig) -> str:
    """Return the options of a model that differ from those of a file; empty if none does."""
    if not settings:  # written by DeePMD-kit
        return ""
    stored = json.loads(settings[0])
    if "model" not in stored:
        return "it was written by an earlier version of dp-ema, which did not store all options"
    # as JSON has it: without tuples
    expected = json.loads(json.dumps({"model": data_options(config)}))
    # sections are compared option by option, in the words of an input
    texts = [
        f"{place} = {show(old)}, now {show(new)}"
        for place, old, new in differences_of(stored, expected)
    ]
    return f"it is of other options: {first_few(texts)}" if texts else ""


def _bias_names(config: ModelConfig) -> tuple[str, str]:
    """Return the names of bias and spread, which are those of the label without its width."""
    name = config.fitting_net.labels[0].partition("[")[0]
    return f"bias_atom_{name}", f"std_atom_{name}"


def _is_hdf5(path: Path) -> bool:
    return path.suffix.lower() in (".h5", ".hdf5")


def _write_hdf5(path: Path, items: Mapping[str, Array]) -> None:
    import h5py

    # a copy takes the place of the file when it is complete
    with atomic_write(path) as part:
        is_old = path.exists()
        if is_old:
            shutil.copyfile(path, part)
        with h5py.File(part, "r+" if is_old else "w") as file:
            # a file of frames, named by mistake
            if (
                file.visit(lambda name: name if name.endswith("type.raw") else None)
                is not None
            ):
                raise DataError(
                    f"{path}: holds data, to which no statistics are added. Name another "
                    "training.stat_file."
                )
            for name, value in items.items():
                if name in file:
                    del file[name]
                file.create_dataset(name, data=value)


def _read(path: Path, root: str, names: list[str]) -> dict[str, Array]:
    if not _is_hdf5(path):
        # names that are not there are left out: the caller says which is missing
        files = {name: path / root / name for name in names}
        return {
            name: np.load(file, allow_pickle=False)
            for name, file in files.items()
            if file.is_file()
        }
    import h5py

    with h5py.File(path, "r") as file:
        return {
            name: file[f"{root}/{name}"][()]
            for name in names
            if f"{root}/{name}" in file
        }
