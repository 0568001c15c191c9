"""DeePMD-kit's model files, ``.dp`` (HDF5) and ``.yaml``: written from our models and read into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepmd_ema import __version__
from deepmd_ema.config import ModelConfig, model_config_from_dict, to_dict
from deepmd_ema.config.schema.descriptor import HybridConfig
from deepmd_ema.config.schema.model import EnerFittingConfig, StandardConfig
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.families.dpa2.section import DPA2Config
from deepmd_ema.families.dpa2.tree import DPA2Tree
from deepmd_ema.families.dpa3.section import DPA3Config
from deepmd_ema.families.dpa3.tree import DPA3Tree
from deepmd_ema.families.ener.tree import EnerTree
from deepmd_ema.families.hybrid.tree import HybridTree
from deepmd_ema.families.linear_ener.module import LinearDescriptor, LinearFitting
from deepmd_ema.families.linear_ener.section import LinearConfig, PairTableConfig, Part
from deepmd_ema.families.linear_ener.tree import KINDS, linear_tree, table_section, weights_of, with_own_biases_of_parts
from deepmd_ema.families.se_atten.section import SeAttenConfig, SeAttenV2Config
from deepmd_ema.families.se_atten.tree import SeAttenTree
from deepmd_ema.families.se_e2_a.section import SeE2AConfig
from deepmd_ema.families.se_e2_a.tree import SeE2ATree, SeE2RTree, SeE3Tree
from deepmd_ema.families.se_e2_r.section import SeE2RConfig
from deepmd_ema.families.se_e3.section import SeE3Config
from deepmd_ema.families.se_e3_tebd.section import SeE3TebdConfig
from deepmd_ema.families.se_e3_tebd.tree import SeE3TebdTree
from deepmd_ema.interchange.dp.files import VARIABLES, Tree, read_tree, write_tree
from deepmd_ema.interchange.dp.networks import PartTree, array, chosen, fill, tree_of
from deepmd_ema.interchange.dp.parts import part_tree, table_entries
from deepmd_ema.interchange.dp.zbl import table_options, with_table, without_table
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interface import Descriptor, Fitting
from deepmd_ema.model.pair_energy import PairTableDescriptor

EXTRA = "dp_ema"  # our own facts about the weights; DeePMD-kit does not look here

# by the ``type`` of their sections; a descriptor without a tree trains, but cannot be frozen
PART_TREES: dict[str, PartTree] = {
    "se_e2_a": SeE2ATree(SeE2AConfig),
    "se_e2_r": SeE2RTree(SeE2RConfig),
    "se_e3": SeE3Tree(SeE3Config),
    "se_atten": SeAttenTree(SeAttenConfig),
    "se_atten_v2": SeAttenTree(SeAttenV2Config),
    "dpa2": DPA2Tree(DPA2Config),
    "dpa3": DPA3Tree(DPA3Config),
    "se_e3_tebd": SeE3TebdTree(SeE3TebdConfig),
}
DESCRIPTOR_TREES: dict[str, PartTree] = {**PART_TREES, "hybrid": HybridTree(HybridConfig, PART_TREES)}
FITTING_TREES: dict[str, PartTree] = {"ener": EnerTree(EnerFittingConfig)}


def write_dp(
    path: str | Path,
    model: EnergyModel,
    config: ModelConfig | Mapping[str, Any],
    min_nbor_dist: float | None = None,
    extra: Mapping[str, Any] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a model in DeePMD-kit's format; the file appears whole or not at all.

    Args:
        path: ends in ``.dp`` or ``.yaml``.
        model: as built from ``config``.
        config: the section ``model``.
        min_nbor_dist: shortest distance in the training data, angstrom; by default ``model.min_nbor_dist``.
        extra: plain facts about the weights, returned by ``read_dp`` under ``dp_ema``.
        check: called with the path of the whole file before it takes its name; what it raises keeps an older file.

    Raises:
        WriteError: if the file cannot be written.
    """
    path = Path(path)
    write_tree(path, file_tree(model, config, min_nbor_dist, extra), check)


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
        "software": "dp-ema",
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
    variables = tree["model"][VARIABLES]
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
        if tree["model"].get("type") in KINDS:
            tree["model"] = with_own_biases_of_parts(tree["model"])
        else:
            tree["model"] = {**without_table(tree["model"]), **table_options(tree["model"])}
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

    What they are and of which step stands in the input as well: it is all that DeePMD-kit keeps of ours when it
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
    if isinstance(config, LinearConfig):
        return linear_tree(whole, list(_part_trees(whole, model, config)), config.weights)
    assert isinstance(config, StandardConfig), type(config)
    tree = {**whole, "type": "standard", **_network_trees(model.descriptor, model.fitting, config)}
    return tree if model.short_range is None else with_table(tree, model)


def _network_trees(descriptor: Descriptor, fitting: Fitting, config: StandardConfig) -> Tree:
    """Return the trees of a descriptor and its fitting network.

    Raises:
        CheckpointError: if the format does not have this descriptor.
    """
    name = config.descriptor.type
    if name not in DESCRIPTOR_TREES:
        raise CheckpointError(
            f'model.descriptor.type = "{name}": cannot be written in the format of DeePMD-kit (.dp, .yaml), so it '
            f"cannot be frozen. Known: {', '.join(DESCRIPTOR_TREES)}."
        )
    return {
        "descriptor": DESCRIPTOR_TREES[name].write(descriptor, config),
        "fitting": FITTING_TREES[config.fitting_net.type].write(fitting, config),
    }


def _part_trees(whole: Tree, model: EnergyModel, config: LinearConfig) -> Iterator[Tree]:
    """Yield the trees of the parts of a model."""
    for section, descriptor, fitting in _parts(model, config):
        if isinstance(section, PairTableConfig):
            assert isinstance(descriptor, PairTableDescriptor)
            yield part_tree(whole, "pairtab", table_entries(descriptor.pairs.table, descriptor.sel))
        else:
            yield part_tree(whole, "standard", _network_trees(descriptor, fitting, config.standard(section)))


def _parts(model: EnergyModel, config: LinearConfig) -> Iterator[tuple[Part, Descriptor, Fitting]]:
    """Yield the section of each part, and what the model has for it."""
    assert isinstance(model.descriptor, LinearDescriptor)
    assert isinstance(model.fitting, LinearFitting)
    yield from zip(config.models, model.descriptor.descriptors, model.fitting.fittings, strict=True)


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
    if model.get("type") in KINDS:
        scripts = script.get("models") or []
        scripts = [*scripts, *[{}] * (len(model["models"]) - len(scripts))]
        parts = [
            table_section(part) if part["type"] == "pairtab" else _network_sections(part, one)
            for part, one in zip(model["models"], scripts, strict=True)
        ]
        more = {"type": "linear_ener", "models": parts, "weights": weights_of(model)}
    else:
        table = chosen(model, ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax"))
        more = {**_network_sections(model, script), **table}
    return model_config_from_dict({**section, **more}, "model")


def _network_sections(tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
    """Return the sections of a descriptor and its fitting network."""
    return {
        "descriptor": {**_seed(script.get("descriptor")), **_section(DESCRIPTOR_TREES, tree["descriptor"])},
        "fitting_net": {**_seed(script.get("fitting_net")), **_section(FITTING_TREES, tree["fitting"])},
    }


def model_from_tree(config: ModelConfig, tree: Mapping[str, Any]) -> EnergyModel:
    """Return the model that a tree describes.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    model = build_model(config)
    fill("out_bias", model.out_bias, tree[VARIABLES]["out_bias"])
    if tree[VARIABLES].get("out_std") is not None:
        fill("out_std", model.out_std, tree[VARIABLES]["out_std"])
    if isinstance(config, LinearConfig):
        for (section, descriptor, fitting), part in zip(_parts(model, config), tree["models"], strict=True):
            if not isinstance(section, PairTableConfig):
                _fill_networks(config.standard(section), descriptor, fitting, part)
    else:
        assert isinstance(config, StandardConfig), type(config)
        _fill_networks(config, model.descriptor, model.fitting, tree)
    return model


def _fill_networks(config: StandardConfig, descriptor: Descriptor, fitting: Fitting, tree: Mapping[str, Any]) -> None:
    DESCRIPTOR_TREES[config.descriptor.type].fill(descriptor, tree["descriptor"])
    FITTING_TREES[config.fitting_net.type].fill(fitting, tree["fitting"])


def _check_available(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse by name what is not available here.

    Raises:
        CheckpointError: naming the descriptor, the fitting or the feature.
    """
    kind = tree.get("type", "standard")
    known = ("standard", "zbl", *KINDS)
    if kind not in known:
        raise CheckpointError(f"{path}: a model of type {kind!r}; available here: {', '.join(known)}.")
    parts = tree["models"] if kind in ("zbl", *KINDS) else [tree]
    kinds = [part.get("type", "standard") for part in parts]
    for found in kinds if kind != "standard" else ():
        if found not in ("standard", "pairtab"):
            raise CheckpointError(f"{path}: a part of type {found!r}; available here: standard, pairtab.")
    problems: list[str] = []
    used: dict[str, bool] = {}
    for part, found in zip(parts, kinds):
        if found == "standard":
            problems += _unknown_networks(path, part)
            used |= _unavailable(part)
    problems = problems or [f"{path}: uses {feature}, which is not available here." for feature in used]
    if problems:
        raise CheckpointError(problems)


def _unknown_networks(path: Path, tree: Mapping[str, Any]) -> Iterator[str]:
    for part, known in (("descriptor", DESCRIPTOR_TREES), ("fitting", FITTING_TREES)):
        found = tree.get(part) or {}
        if tree_of(known, found) is None:
            yield f"{path}: {part} {found.get('type')!r} is not available here. Known: {', '.join(known)}."


def _unavailable(tree: Mapping[str, Any]) -> dict[str, bool]:
    """Return the features that a tree uses and that are not available here."""
    used: dict[str, bool] = {}
    for part, known in (("descriptor", DESCRIPTOR_TREES), ("fitting", FITTING_TREES)):
        found = tree.get(part) or {}
        reader = tree_of(known, found)
        if reader is not None:
            used |= {name: True for name, is_used in reader.unavailable(found).items() if is_used}
    return used


def _section(known: Mapping[str, PartTree], found: Mapping[str, Any]) -> Tree:
    """Return the options that a tree gives."""
    reader = tree_of(known, found)
    return {} if reader is None else reader.section(found)


def _seed(section: Any) -> Tree:
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return {"seed": seed} if isinstance(seed, int) else {}
