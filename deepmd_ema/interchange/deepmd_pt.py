"""Checkpoints of DeePMD-kit, ``.pt`` of its backends pt and pt_expt, read by way of the tree of a ``.dp`` file.

A checkpoint holds the section ``model`` of its input and tensors under the names of modules. The section gives the tree
of a model with its arrays in place; each tensor then has one place in that tree, and the reader of trees does the rest.
Names of modules of one descriptor are in its ``PartTree.renamed``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from deepmd_ema.config import ModelConfig, model_config_from_dict
from deepmd_ema.config.fields import type_names
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.errors import CheckpointError, ConfigError, first_few
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.model import faults_as_messages, model_from_tree, model_tree
from deepmd_ema.interchange.dp.networks import tree_by_type
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.weight_names import LIVE

Places: TypeAlias = tuple[tuple[str, str], ...]

EMA = "ema"  # the one average that such a checkpoint may hold
_EXTRA = "_extra_state"
_ONLY = "Default"  # name of the model in a file that has one
# options of a section ``model`` that are about how it was trained
_OF_TRAINING = ("finetune_head", "model_branch_alias", "info", "hessian_mode")
# names of modules that several types have, in either backend, and the entries of the tree that they are; in this order
_PLACES = (
    (r"\._module_networks\.", ".networks."),
    (r"^fitting_net\.filter_layers\.", "fitting.nets."),
    (r"^fitting_net\.", "fitting."),
    (r"\.filter_layers(_strip)?\.", r".embeddings\1."),
    (r"\.type_embedding\.(embedding\.)?embedding_net\.", ".type_embedding.embedding."),
    (r"\.mean$", ".davg"),
    (r"\.stddev$", ".dstd"),
    (r"\.matrix$", ".w"),
    (r"\.bias$", ".b"),
)
_CONVERT = "With DeePMD-kit: `dp --pt freeze -c {path} -o model.pth`, then `dp convert-backend model.pth model.dp`."


@dataclass(frozen=True)
class DeepmdCheckpoint:
    """One model of a checkpoint of DeePMD-kit.

    Attributes:
        config: its section ``model``.
        model: in evaluation mode; ``min_nbor_dist`` is set.
        weights: ``live``, ``ema``, or empty: a file with weights only does not say what they are.
        step: optimizer steps of the weights, or None.
        average: facts of the average; empty for other weights.
    """

    config: ModelConfig
    model: EnergyModel
    weights: str
    step: int | None
    average: Mapping[str, Any] = field(default_factory=dict)


def is_deepmd_checkpoint(payload: Any) -> bool:
    """Whether the content of a torch file is a checkpoint of DeePMD-kit."""
    state = _state_of(payload)
    return isinstance(state, Mapping) and _EXTRA in state


def read_deepmd_pt(payload: Any, path: Path, head: str | None = None, use_average: bool = False) -> DeepmdCheckpoint:
    """Return one model of a checkpoint of DeePMD-kit.

    Args:
        payload: the content of the file.
        path: where it was read, for messages.
        head: which model, one of :func:`heads_of`; None where there is one without a name.
        use_average: takes the averaged weights of a training checkpoint.

    Raises:
        CheckpointError: if there is no average, or the model is not available here.
    """
    with faults_as_messages(path):
        extra = _extra_of(payload, path)
        name, section = head or _ONLY, extra["model_params"]
        section = section if head is None else section["model_dict"][head]
        state, prefix = _state_of(payload), f"model.{name}."
        own = {str(key).removeprefix(prefix): value for key, value in state.items() if str(key).startswith(prefix)}
        facts: dict[str, Any] = {}
        if use_average:
            averaged, facts = _average(payload, path, "" if name == _ONLY else f"{name}.")
            own |= averaged
        config = _config(section, path)
        tree = model_tree(build_model(config), config)
        _put(tree, own, path, tree_by_type(DESCRIPTORS, config.descriptor.type).places(config.descriptor))
        model = model_from_tree(config, tree)
        distance = float(own.get("min_nbor_dist", own.get("_min_nbor_dist", -1.0)))
        model.min_nbor_dist = distance if distance > 0 else None  # -1 where it is not known
        weights = EMA if use_average else LIVE if "optimizer" in payload else ""
        return DeepmdCheckpoint(config, model.eval(), weights, _step(extra, own), facts)


def heads_of(payload: Any, path: Path) -> dict[str, list[str]]:
    """Return the names of the models of a checkpoint of DeePMD-kit, with their aliases; none where there is one."""
    with faults_as_messages(path):
        models = _extra_of(payload, path)["model_params"].get("model_dict", {})
        return {name: list(map(str, section.get("model_branch_alias") or ())) for name, section in models.items()}


def _state_of(payload: Any) -> Any:
    return payload.get("model", payload) if isinstance(payload, Mapping) else None


def _extra_of(payload: Any, path: Path) -> Mapping[str, Any]:
    extra = _state_of(payload)[_EXTRA]
    if not isinstance(extra, Mapping) or not isinstance(extra.get("model_params"), Mapping):
        raise CheckpointError(
            f"{path}: a checkpoint of DeePMD-kit without the section `model` of its input. {_CONVERT.format(path=path)}"
        )
    return extra


def _config(section: Mapping[str, Any], path: Path) -> ModelConfig:
    if section.get("use_srtab"):
        raise CheckpointError(f"{path}: a model with a table (use_srtab). {_CONVERT.format(path=path)}")
    if section.get("type") == "linear_ener":
        raise CheckpointError(f"{path}: a model of parts (linear_ener). {_CONVERT.format(path=path)}")
    options = {n: value for n, value in section.items() if n not in _OF_TRAINING}
    try:
        return model_config_from_dict(options | {"descriptor": _as_built(options.get("descriptor"))}, str(path))
    except ConfigError as error:
        raise CheckpointError(error.problems) from error


def _as_built(section: Any) -> Any:
    """Return a section ``descriptor`` as the peer builds it: ``se_e2_r`` has one side, whatever its option."""
    if not isinstance(section, Mapping):
        return section
    if str(section.get("type")).lower() in type_names([DESCRIPTORS["se_e2_r"].section]):
        return {**section, "type_one_side": True}
    parts = section.get("list")
    return section if not isinstance(parts, list) else {**section, "list": [_as_built(part) for part in parts]}


def _average(payload: Mapping[str, Any], path: Path, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the averaged parameters of one model by name, and the facts of the average."""
    average = payload.get("ema")
    if not isinstance(average, Mapping) or not isinstance(average.get("model"), Mapping):
        raise CheckpointError(
            f"{path}: a checkpoint of DeePMD-kit without averaged weights (training.enable_ema was false, or these are "
            "the averaged ones already). Leave out --use-ema."
        )
    found = {name.removeprefix(prefix): value for name, value in average["model"].items() if name.startswith(prefix)}
    return found, {"type": "ema", "decay": float(average.get("decay", 0.0))}


def _step(extra: Mapping[str, Any], state: Mapping[str, Any]) -> int | None:
    step = (extra.get("train_infos") or {}).get("step")
    # pt counts from 0 and saves the number of the last step; pt_expt saves how many there were
    return None if not isinstance(step, int) else step + ("min_nbor_dist" in state)


def _put(tree: Tree, state: Mapping[str, Any], path: Path, places: Places) -> None:
    """Write the tensors of one model into the arrays of its tree.

    Raises:
        CheckpointError: naming tensors without a place, and places without a tensor.
    """
    names = {_place(name, places): name for name, tensor in state.items() if _is_weight(name, tensor)}
    found = {place: state[name].detach().cpu().numpy() for place, name in names.items()}
    missing = sorted(_fill(tree, "", found, False))
    if missing or found:
        lines = [f"{path}: the tensors of this checkpoint of DeePMD-kit are not those of its model."]
        lines += [f"  missing: {first_few(missing)}"] * bool(missing)
        lines += [f"  not of this model: {first_few([names[place] for place in found])}"] * bool(found)
        lines.append(f"  {_CONVERT.format(path=path)}")
        raise CheckpointError("\n".join(lines))


def _is_weight(name: str, tensor: Any) -> bool:
    """Whether a tensor is one of the arrays of a tree: no mask, no list of places, no table, nothing compressed."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return False
    return "._networks." not in name and name.rpartition(".")[2] not in (
        "min_nbor_dist",
        "_min_nbor_dist",
        "default_fparam_tensor",
        "econf_tebd",  # of the elements, not of the training
    )


def _place(name: str, places: Places) -> str:
    """Return the place in the tree of the tensor ``name``."""
    place = name.removeprefix("atomic_model.")
    for pattern, entry in (*_PLACES, *places):
        place = re.sub(pattern, entry, place)
    return place


def _fill(node: Any, place: str, found: dict[str, np.ndarray], is_variable: bool) -> list[str]:
    """Replace the arrays of a tree by those ``found``, which are taken out of there; return the places without one."""
    missing: list[str] = []
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        inside = is_variable or key == VARIABLES
        there = place if key == VARIABLES else f"{place}.{key}" if place else str(key)
        if isinstance(value, dict | list):
            missing += _fill(value, there, found, inside)
        elif is_variable and there in found:
            node[key] = found.pop(there)
        elif is_variable and value is not None:
            missing.append(there)
    return missing
