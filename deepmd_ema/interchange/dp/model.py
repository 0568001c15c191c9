"""DeePMD-kit's model files, ``.dp`` (HDF5) and ``.yaml``: written from our models and read into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmd_ema.config import ModelConfig, model_config_from_dict, to_dict
from deepmd_ema.config.fields import plain
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.interchange.dp.files import SOFTWARE, VARIABLES, Tree, read_tree, write_tree
from deepmd_ema.interchange.dp.networks import array, chosen, fill
from deepmd_ema.interchange.dp.standard import ModelTree, model_trees, tree_of_model, unavailable_networks
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.version import __version__

INSIDE = "atomic_model"  # entry of the trees of some models that all others are in
EXTRA = "dp_ema"  # our own facts about the weights; DeePMD-kit does not look here


def write_dp(
    path: str | Path,
    model: EnergyModel,
    config: ModelConfig | Mapping[str, Any],
    min_nbor_dist: float | None = None,
    extra: Mapping[str, Any] | None = None,
    check: Callable[[Path], None] | None = None,
    *,
    for_deepmd: bool = False,
) -> None:
    """Write a model in DeePMD-kit's format; the file appears whole or not at all.

    Args:
        path: ends in ``.dp`` or ``.yaml``.
        model: as built from ``config``.
        config: the section ``model``.
        min_nbor_dist: shortest distance in the training data, angstrom; by default ``model.min_nbor_dist``.
        extra: plain facts about the weights, returned by ``read_dp`` under ``dp_ema``.
        check: called with the path of the whole file before it takes its name; what it raises keeps an older file.
        for_deepmd: whether DeePMD-kit converts the file: the section ``model`` in it then has only options that it
            knows and that have a value, because ``dp compress`` builds the model from them.

    Raises:
        WriteError: if the file cannot be written.
    """
    path = Path(path)
    tree = file_tree(model, config, min_nbor_dist, extra)
    if for_deepmd:
        section = model_config_from_dict(config) if isinstance(config, Mapping) else config
        ours = chosen(tree["model_def_script"], (EXTRA,))
        tree["model_def_script"] = {**plain(section, for_deepmd=True), **ours}
    write_tree(path, tree, check)


def file_tree(
    model: EnergyModel,
    config: ModelConfig | Mapping[str, Any],
    min_nbor_dist: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Tree:
    """Return the whole content of a model file; arguments are those of ``write_dp``."""
    section = model_config_from_dict(config) if isinstance(config, Mapping) else config
    distance = model.min_nbor_dist if min_nbor_dist is None else min_nbor_dist
    tree: Tree = {
        "software": SOFTWARE,
        "version": __version__,
        "backend": "PyTorch",
        "pt_version": str(torch.__version__),
        "model": model_tree(model, section),
        "model_def_script": to_dict(section),
    }
    if distance is not None:
        tree[VARIABLES] = {"min_nbor_dist": np.array(distance, dtype=np.float64)}
    return _with_facts(tree, extra or {})


def rewrite_bias(
    path: str | Path, target: str | Path, bias: np.ndarray, std: np.ndarray | None, facts: Mapping[str, Any]
) -> None:
    """Write the model file ``path`` to ``target`` with another output bias and otherwise the same content.

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
    variables = tree["model"].get(INSIDE, tree["model"])[VARIABLES]
    # (outputs, T, components): one output, the energy, of one component
    variables["out_bias"] = np.array(bias, dtype=np.float64).reshape(1, -1, 1)
    if std is not None:
        variables["out_std"] = np.array(std, dtype=np.float64).reshape(1, -1, 1)
    write_tree(Path(target), _with_facts(tree, {**_facts_of(tree), **facts}))


def read_dp(path: str | Path) -> tuple[ModelConfig, EnergyModel, dict[str, Any]]:
    """Return the section ``model``, the model in evaluation mode, and what else the file says.

    The dictionary holds ``software``, ``version``, ``model_def_script``, ``min_nbor_dist`` (or None) and ``dp_ema``,
    which is empty in files of DeePMD-kit that it has not converted from one of ours.

    Raises:
        CheckpointError: if the file is missing, damaged, or holds a model that is not available here.
    """
    path = Path(path)
    tree = read_tree(path)
    if not isinstance(tree.get("model"), dict):
        raise CheckpointError(f"{path}: no model inside. Expected a .dp or .yaml file of DeePMD-kit or dp-ema freeze.")
    with faults_as_messages(path):
        _check_available(path, tree["model"])
        tree["model"] = reader_of(tree["model"]).normalized(tree["model"])
        config = config_from_tree(tree)
        model = model_from_tree(config, tree["model"])
        distance = tree.get(VARIABLES, {}).get("min_nbor_dist")
        # DeePMD-kit writes -1 for a distance that it does not know
        model.min_nbor_dist = None if distance is None or float(distance) < 0 else float(distance)
        facts = _facts_of(tree)
        script = {name: value for name, value in (tree.get("model_def_script") or {}).items() if name != EXTRA}
    info = {name: tree.get(name) for name in ("software", "version", "backend")}
    more = {"model_def_script": script, "min_nbor_dist": model.min_nbor_dist, EXTRA: facts}
    return config, model.eval(), {**info, **more}


def _with_facts(tree: Tree, facts: Mapping[str, Any]) -> Tree:
    """Return ``tree`` with facts about its weights.

    Their kind and step are in the input as well, which is all that DeePMD-kit keeps of ours when it
    converts a file.
    """
    tree = {**tree, EXTRA: dict(facts)}
    if "weights" in facts:
        short = {name: fact for name, fact in facts.items() if name != "config"}
        tree["model_def_script"] = {**(tree.get("model_def_script") or {}), EXTRA: short}
    return tree


def _facts_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our facts about the weights; empty in files of DeePMD-kit."""
    facts: Mapping[str, Any] = tree.get(EXTRA) or (tree.get("model_def_script") or {}).get(EXTRA) or {}
    return facts


@contextmanager
def faults_as_messages(path: Path) -> Iterator[None]:
    """Turn what a tree of another form makes fail inside into messages.

    Raises:
        CheckpointError: for every fault.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: an entry of the model is missing or of another kind: {error!r}.") from error
    except (ValueError, ArithmeticError, RuntimeError, MemoryError, ConfigError) as error:
        raise CheckpointError(f"{path}: the model does not fit together: {error}") from error


def model_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    """Return the serialized model; arrays are copies on the CPU.

    Raises:
        CheckpointError: if the format does not have this descriptor.
    """
    whole = {
        "type_map": list(config.type_map),
        "atom_exclude_types": list(config.atom_exclude_types),
        "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
        "rcond": config.fitting_net.rcond,
        "preset_out_bias": config.preset_out_bias,
        VARIABLES: {"out_bias": array(model.out_bias), "out_std": array(model.out_std)},
        "@class": "Model",
        "@version": 2,
    }
    return tree_of_model(config).write(whole, model, config)


def config_from_tree(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section ``model``: the shape from the model itself, the rest from the input that is kept with it."""
    model, script = tree["model"], tree.get("model_def_script") or {}
    section = {
        **chosen(script, ("data_stat_nbatch", "data_stat_protect")),
        "type_map": model["type_map"],
        "pair_exclude_types": model.get("pair_exclude_types") or [],
        "atom_exclude_types": model.get("atom_exclude_types") or [],
        "preset_out_bias": model.get("preset_out_bias"),
    }
    more = reader_of(model).section(model, script)
    return model_config_from_dict({**section, **more}, "model")


def model_from_tree(config: ModelConfig, tree: Mapping[str, Any]) -> EnergyModel:
    """Return the model that a tree describes.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    model = build_model(config)
    own = {"out_bias": array(model.out_bias)}
    if tree[VARIABLES].get("out_std") is not None:
        own["out_std"] = array(model.out_std)
    fill({VARIABLES: own}, tree)
    tree_of_model(config).fill(model, config, tree)
    return model


def reader_of(tree: Mapping[str, Any]) -> ModelTree:
    """Return the reader of the tree of a model of a known type."""
    return next(reader for reader in model_trees() if tree.get("type", "standard") in reader.kinds)


def _check_available(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse by name what is not available here.

    Raises:
        CheckpointError: naming the descriptor, the fitting or the feature.
    """
    kind = tree.get("type", "standard")
    known = [name for reader in model_trees() for name in reader.kinds]
    if kind not in known:
        raise CheckpointError(f"{path}: a model of type {kind!r}; available here: {', '.join(known)}.")
    problems: list[str] = []
    used: dict[str, None] = {}
    for part in tree["models"] if "models" in tree else [tree.get(INSIDE, tree)]:
        found = part.get("type", "standard")
        if found == "standard" or "models" not in tree:
            unknown, features = unavailable_networks(path, part)
            problems += unknown
            used |= dict.fromkeys(features)
        elif found != "pairtab":
            raise CheckpointError(f"{path}: a part of type {found!r}; available here: standard, pairtab.")
    problems = problems or [f"{path}: uses {feature}, which is not available here." for feature in used]
    if problems:
        raise CheckpointError(problems)
