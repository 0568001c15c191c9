"""DeePMD-kit's model files, ``.dp`` (HDF5) and ``.yaml``: written from our models and read into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepmd_ema import __version__
from deepmd_ema.config.load import model_config_from_dict
from deepmd_ema.config.schema.run import to_dict
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.interchange.dp.files import VARIABLES, Tree, read_tree, write_tree
from deepmd_ema.interchange.dp.model import check_available, config_from_tree, model_from_tree, model_tree

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.energy import EnergyModel

EXTRA = "dp_ema"  # our own facts about the weights; DeePMD-kit does not look here


def write_dp(
    path: str | Path,
    model: EnergyModel,
    config: ModelConfig | Mapping[str, Any],
    min_nbor_dist: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a model in DeePMD-kit's format; the file appears whole or not at all.

    Args:
        path: ends in ``.dp`` or ``.yaml``.
        model: as built from ``config``.
        config: the section ``model``.
        min_nbor_dist: shortest distance in the training data, angstrom; by default what the model knows.
        extra: plain facts about the weights, returned by ``read_dp`` under ``dp_ema``.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    path = Path(path)
    section = model_config_from_dict(config) if isinstance(config, Mapping) else config
    distance = model.min_nbor_dist if min_nbor_dist is None else min_nbor_dist
    tree: Tree = {
        "software": "dp-ema",
        "version": __version__,
        "backend": "PyTorch",
        "pt_version": str(torch.__version__),
        "model": model_tree(model, section),
        "model_def_script": to_dict(section),
        EXTRA: dict(extra or {}),
    }
    if distance is not None:
        tree[VARIABLES] = {"min_nbor_dist": np.array(distance, dtype=np.float64)}
    write_tree(path, tree)


def rewrite_bias(
    path: str | Path, target: str | Path, bias: np.ndarray, std: np.ndarray | None, facts: Mapping[str, Any]
) -> None:
    """Write the model file ``path`` to ``target`` with another output bias; everything else in it stays.

    Args:
        path: a file that :func:`read_dp` reads.
        target: ends in ``.dp`` or ``.yaml``; may be ``path`` itself.
        bias: (T,) eV.
        std: (T,) spread of what the bias leaves unexplained, eV, or None to keep that of the file.
        facts: plain facts to add to those under ``dp_ema``.

    Raises:
        CheckpointError: if a file cannot be read or written.
    """
    tree = read_tree(Path(path))
    variables = tree["model"][VARIABLES]
    variables["out_bias"] = np.array(bias, dtype=np.float64).reshape(1, -1, 1)
    if std is not None:
        variables["out_std"] = np.array(std, dtype=np.float64).reshape(1, -1, 1)
    write_tree(Path(target), {**tree, EXTRA: {**(tree.get(EXTRA) or {}), **facts}})


def read_dp(path: str | Path) -> tuple[ModelConfig, EnergyModel, dict[str, Any]]:
    """Return the section ``model``, the model in evaluation mode, and what else the file says.

    The dictionary holds ``software``, ``version``, ``model_def_script``, ``min_nbor_dist`` (or None) and ``dp_ema``,
    which is empty in files of DeePMD-kit.

    Raises:
        CheckpointError: if the file is missing, damaged, or holds a model that is not available here.
    """
    path = Path(path)
    tree = read_tree(path)
    if not isinstance(tree.get("model"), dict):
        raise CheckpointError(f"{path}: no model inside. Expected a .dp or .yaml file of DeePMD-kit or dp-ema freeze.")
    check_available(path, tree["model"])
    try:
        config = config_from_tree(tree)
        model = model_from_tree(config, tree["model"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: an entry of the model is missing or of another kind: {error!r}.") from error
    except (ValueError, RuntimeError, ConfigError) as error:
        raise CheckpointError(f"{path}: the model does not fit together: {error}") from error
    distance = tree.get(VARIABLES, {}).get("min_nbor_dist")
    model.min_nbor_dist = None if distance is None or float(distance) < 0 else float(distance)
    info = {name: tree.get(name) for name in ("software", "version", "backend", "model_def_script")}
    return config, model.eval(), {**info, "min_nbor_dist": model.min_nbor_dist, EXTRA: tree.get(EXTRA) or {}}
