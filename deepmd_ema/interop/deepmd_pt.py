"""Checkpoints of DeePMD-kit (``.pt``), read and written by way of the tree of a ``.dp`` file.

A checkpoint holds the section ``model`` of its input and tensors under the names of modules. The
section gives the tree of a model with its arrays in place, and each array has one name in a
checkpoint: :func:`_name_of`, of which the names in one descriptor are those of its
``PartTree.modules``. Checkpoints of the backends pt and pt_expt are read, and such of pt are
written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.config import ModelConfig, model_config_from_dict
from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.fields import plain, type_names
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.distributed.tensors import on_cpu
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.files import atomic_write
from deepmd_ema.interop.dp import (
    EXTRA,
    INSIDE,
    PARTS,
    StoredModel,
    faults_as_messages,
    fill_model,
    model_tree,
    normalized,
)
from deepmd_ema.interop.parts import PartTree, chosen, tree_by_type
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.text import command, first_few
from deepmd_ema.utils import LIVE

EMA = "ema"  # the one average that such a checkpoint may hold
_EXTRA = "_extra_state"
# entries of dp-ema about the weights in a file that it has written
_FACTS = ("weights", "step", "average", "bias")
_ONLY = "Default"  # name of the model in a file that has one
# options of a section ``model`` that are about how it was trained
_OF_TRAINING = (
    "finetune_head",
    "finetune_bias",
    "model_branch_alias",
    "info",
    "hessian_mode",
)
# options that are or hold sections of descriptors
_WITH_DESCRIPTORS = ("descriptor", "list", "models")
# place in a tree: part of the model, its entry, and inside
_PART = re.compile(r"(models\.(\d+)\.)?([^.]+)\.?(.*)")
_IN_TABLE = ("tab_info", "tab_data")  # arrays of a table that a checkpoint holds
_TABLES = (
    "use_srtab",
    "tab_file",
)  # options that are a table, or in an input the name of its file
_SELECTED = (
    "sel_type",
    "dipole_type",
    "pol_type",
)  # options that the peer's torch backends ignore
_SMIN_ALPHA = (
    0.1  # angstrom; the backend pt takes no other one from a section ``model``
)
_CONVERT = (
    "With DeePMD-kit: `dp --pt freeze -c {path} -o model.pth`, then `dp convert-backend model.pth "
    "model.dp`."
)


def read_deepmd_pt(
    payload: Any, path: Path, head: str | None = None, use_average: bool = False
) -> StoredModel:
    """Return a model in a checkpoint of DeePMD-kit.

    The facts are ``weights`` (``live``, ``ema``, or empty: a file with weights only does not say
    what they are), ``step`` (optimizer steps of the weights, or None), ``average`` (empty for other
    weights), ``bias``, and ``version``, the program that wrote the file.

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
        params = extra["model_params"]
        section = params if head is None else params["model_dict"][head]
        name = head or _ONLY
        state = payload.get("model", payload)
        prefix = f"model.{name}."
        tensors = {
            str(key).removeprefix(prefix): value
            for key, value in state.items()
            if str(key).startswith(prefix)
        }
        average: dict[str, Any] = {}
        if use_average:
            averaged, average = _average(
                payload, path, "" if name == _ONLY else f"{name}."
            )
            tensors |= averaged
        options = {
            name: value for name, value in section.items() if name not in _OF_TRAINING
        }
        try:
            config = model_config_from_dict(_as_built(options, path), str(path))
        except ConfigError as error:
            raise CheckpointError(error.problems) from error
        model = build_model(config)
        tree = model_tree(model, config)
        _put(tree, tensors, path, config)
        fill_model(model, config, normalized(tree))
        distance = float(
            tensors.get("min_nbor_dist", tensors.get("_min_nbor_dist", -1.0))
        )
        model.min_nbor_dist = (
            distance if distance > 0 else None
        )  # -1 where it is not known
        weights = LIVE if "optimizer" in payload else ""
        step = (extra.get("train_infos") or {}).get("step")
        # pt counts from 0 and saves the number of the last step; pt_expt saves how many there were
        step = step + ("min_nbor_dist" in tensors) if isinstance(step, int) else None
        written = (payload.get(EXTRA) or {}).get(head or "", {})
        facts = {
            "weights": EMA if use_average else weights,
            "step": step,
            "average": average,
            "bias": {},
            **chosen(written, _FACTS),
        }
        facts["version"] = "dp-ema" if written else "DeePMD-kit"
        return StoredModel(config, model.eval(), facts)


def write_deepmd_pt(
    path: Path,
    models: Mapping[str, tuple[ModelConfig, EnergyModel, Mapping[str, Any]]],
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write models as a checkpoint of DeePMD-kit's backend pt, which appears whole or not at all.

    Args:
        path: ends in ``.pt``.
        models: by name of the task: the section ``model``, the model as built from it, with
            ``min_nbor_dist`` if that is known, and plain facts about the weights. One without a
            name is called ``""``.
        check: called with the path of the whole file before it takes its name; what it raises keeps
            an older file.

    Raises:
        CheckpointError: if that backend does not have such a model.
        WriteError: if the file cannot be written.
    """
    sections: dict[str, Tree] = {}
    state: dict[str, Any] = {_EXTRA: {}}
    for task, (config, model, _) in models.items():
        lacking = _not_in_pt(task, config)
        if lacking:
            raise CheckpointError(
                f"{path}: DeePMD-kit's backend pt does not have {lacking}. Without --to deepmd "
                "the file is for dp-ema."
            )
        sections[task] = deepmd_section(config)
        state |= {
            f"model.{task or _ONLY}.{name}": tensor
            for name, tensor in _tensors(model, config)
        }
    facts = {task: dict(weight_facts) for task, (_, _, weight_facts) in models.items()}
    # the number of the last step, counted from 0
    num_steps = next(iter(facts.values())).get("step") or 0
    train_infos = {"lr": 0.0, "step": max(0, num_steps - 1)}
    params = sections.get("") or {"model_dict": sections}
    state[_EXTRA] = {"model_params": params, "train_infos": train_infos}
    # DeePMD-kit starts no run from a checkpoint without the entry `optimizer`, and makes a new one
    # of None
    payload = {"model": state, "optimizer": None, EXTRA: facts}
    with atomic_write(path, "Choose another OUT, or make room.") as part:
        # no digest: DeePMD-kit changes tensors of a file and keeps what it does not know
        torch.save(on_cpu(payload), part)
        if check is not None:
            check(part)


def heads_of(payload: Any, path: Path) -> dict[str, list[str]]:
    """Return the names of the models of a checkpoint of DeePMD-kit, with their aliases.

    A single model has no name.
    """
    with faults_as_messages(path):
        models = _extra_of(payload, path)["model_params"].get("model_dict", {})
        return {
            name: list(map(str, section.get("model_branch_alias") or ()))
            for name, section in models.items()
        }


def _extra_of(payload: Any, path: Path) -> Mapping[str, Any]:
    extra = payload.get("model", payload)[_EXTRA]
    if not isinstance(extra, Mapping) or not isinstance(
        extra.get("model_params"), Mapping
    ):
        raise CheckpointError(
            f"{path}: a checkpoint of DeePMD-kit without the section `model` of its input. "
            + _CONVERT.format(path=command(path))
        )
    return extra


def _as_built(section: Any, path: Path) -> Any:
    """Return a section as the peer builds it.

    ``se_e2_r`` has one side, all types have dipoles (its ``sel_type`` has no effect), and tables
    are rows, not lines of files.
    """
    if isinstance(section, list):
        return [_as_built(part, path) for part in section]
    if not isinstance(section, Mapping):
        return section
    built = {
        name: _as_built(section[name], path)
        for name in _WITH_DESCRIPTORS
        if name in section
    }
    if str(section.get("type")).lower() in type_names(DESCRIPTORS["se_e2_r"].section):
        built["type_one_side"] = True
    for name in (name for name in _TABLES if section.get(name)):
        if not isinstance(section[name], list):
            raise CheckpointError(
                f"{path}: {name} = {section[name]!r} is the name of a file, which may be another "
                "one by now. " + _CONVERT.format(path=command(path))
            )
        built[name] = [
            [float(number) for number in line.split()] for line in section[name]
        ]
    if isinstance(fitting := section.get("fitting_net"), Mapping):
        built["fitting_net"] = {
            name: value for name, value in fitting.items() if name not in _SELECTED
        }
    return {**section, **built}


def _average(
    payload: Mapping[str, Any], path: Path, prefix: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the averaged parameters of one model by name, and the facts of the average."""
    average = payload.get("ema")
    if not isinstance(average, Mapping) or not isinstance(
        average.get("model"), Mapping
    ):
        raise CheckpointError(
            f"{path}: a checkpoint of DeePMD-kit without averaged weights (training.enable_ema "
            "was false, or these are the averaged ones already). Leave out --use-ema."
        )
    weights = {
        name.removeprefix(prefix): value
        for name, value in average["model"].items()
        if name.startswith(prefix)
    }
    return weights, {"type": "ema", "decay": float(average.get("decay", 0.0))}


def deepmd_section(config: ModelConfig) -> Tree:
    """Return the section ``model`` as DeePMD-kit's backend pt reads it in a checkpoint.

    A table is in it as the lines of its file, which that backend reads like the file.
    """
    section = {
        name: value
        for name, value in plain(config, for_deepmd=True).items()
        if name not in _OF_TRAINING
    }
    for part, values in zip(
        _parts(config), section.get("models", [section]), strict=True
    ):
        if hasattr(part, "rows_for"):
            values |= {
                "type_map": config.type_map,
                "tab_file": part.rows_for(config.type_map),
            }
        values |= {
            name: [" ".join(map(repr, row)) for row in values[name]]
            for name in _TABLES
            if name in values
        }
    if config.model_branch_alias:
        section["model_branch_alias"] = list(config.model_branch_alias)
    if section.get("fitting_net", {}).pop("sel_type", None) is not None:
        section["atom_exclude_types"] = sorted(config.excluded_types)
    return section


def _not_in_pt(task: str, config: ModelConfig) -> str:
    """Return the feature of a task's model that DeePMD-kit's backend pt lacks, or an empty text."""
    if task == _ONLY or "." in task or hasattr(nn.ModuleDict(), task):
        return f"a task of the name {task!r}"
    alpha = getattr(config, "smin_alpha", _SMIN_ALPHA)
    if config.use_srtab is not None and alpha != _SMIN_ALPHA:
        return f"smin_alpha = {alpha:g}: its own is {_SMIN_ALPHA:g} in a checkpoint"
    networks = (part for part in _parts(config) if hasattr(part, "fitting_net"))
    for part in networks:
        for kinds, option in PARTS.values():
            section = getattr(part, option)
            if lacking := tree_by_type(kinds, section.type).not_in_pt(section):
                return lacking
    return ""


def _parts(config: ModelConfig) -> Sequence[Any]:
    """Return the sections of the parts of a model, or its own if it is no sum of some."""
    parts: Sequence[Any] = getattr(config, "models", [config])
    return parts


def _tensors(model: EnergyModel, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model by the names of a checkpoint."""
    distance = -1.0 if model.min_nbor_dist is None else model.min_nbor_dist
    yield "min_nbor_dist", torch.tensor(distance, dtype=torch.float64)
    if config.bridging is not None:
        charges = [SYMBOLS.index(name) + 1 for name in config.type_map]
        yield (
            "inter_potential.atomic_numbers",
            torch.tensor(charges, dtype=torch.float64),
        )
    tree = model_tree(model, config)
    table = {"tab_data": (len(config.type_map), len(config.type_map), -1, 4)}
    arrays = [(place, node[key]) for place, node, key in _arrays(tree)]
    for place, array in [*arrays, *_added(tree)]:
        entry = _name_of(place, config, "pt")
        if (name := entry.name) is None:
            continue
        tensor = torch.from_numpy(np.asarray(array))
        tensor = tensor.reshape(table.get(place.rpartition(".")[2], tensor.shape))
        yield name, tensor
        if (
            ".networks." in name
            and entry.reader is not None
            and entry.reader.has_second_names
        ):
            yield name.replace(".networks.", "._networks."), tensor


def _added(node: Any, place: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays that a checkpoint has beside those of the tree, with places in the tree.

    They are empty until DeePMD-kit compresses the model, but for the default of the frame
    parameters.
    """
    if not isinstance(node, dict | list):
        return
    nets = node.get("embeddings") if isinstance(node, dict) else None
    if nets is not None:
        names = [
            f"{name}.{k}"
            for name in ("compress_info", "compress_data")
            for k in range(len(nets["networks"]))
        ]
        if nets["ndim"] == 0:
            names.append("type_embd_data")
        precision = nets["networks"][0]["precision"]
        yield from ((f"{place}{name}", np.zeros(0, dtype=precision)) for name in names)
    if isinstance(node, dict) and node.get("default_fparam") is not None:
        yield (
            f"{place}default_fparam_tensor",
            np.array(node["default_fparam"], dtype=node["precision"]),
        )
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _added(value, f"{place}{key}.")


def _put(tree: Tree, state: Mapping[str, Any], path: Path, config: ModelConfig) -> None:
    """Write the tensors of one model into the arrays of its tree.

    Raises:
        CheckpointError: naming tensors without a place, and places without a tensor.
    """
    tensors = {
        name: tensor for name, tensor in state.items() if _is_weight(name, tensor)
    }
    backend = "pt" if any(name.endswith(".matrix") for name in tensors) else "pt_expt"
    missing = []
    for place, node, key in list(_arrays(tree)):
        entry = _name_of(place, config, backend)
        defaults = entry.reader.defaults if entry.reader is not None else {}
        if entry.name in tensors:
            node[key] = tensors.pop(entry.name).detach().cpu().numpy()
        elif entry.inner in defaults:
            node[key] = np.full_like(node[key], defaults[entry.inner])
        elif entry.name is not None and _is_read(node[key]):
            missing.append(place)
    if missing or tensors:
        lines = [
            f"{path}: the tensors of this checkpoint of DeePMD-kit are not those of its model."
        ]
        if missing:
            lines.append(f"  missing: {first_few(sorted(missing))}")
        if tensors:
            lines.append(f"  not of this model: {first_few(list(tensors))}")
        lines.append(f"  {_CONVERT.format(path=command(path))}")
        raise CheckpointError("\n".join(lines))


def _is_weight(name: str, tensor: Any) -> bool:
    """Whether a tensor is an array of a tree: no mask, no list of places, nothing compressed."""
    if not isinstance(tensor, Tensor) or not _is_read(tensor):
        return False
    second = (
        "._networks.",
        ".nets.networks.",
    )  # names of networks that have another one, too
    return not any(part in name for part in second) and name.rpartition(".")[2] not in (
        "min_nbor_dist",
        "_min_nbor_dist",
        "default_fparam_tensor",
        "econf_tebd",  # of the elements, not of the training
        "atomic_numbers",
        "gram_scale",  # numbers that are those of all descriptors dpa4c
        "bispectrum_coupling",
        "probe_scale",
    )


def _is_read(array: Any) -> bool:
    """Whether an array or a tensor is not empty and holds numbers that are no places."""
    return bool(math.prod(array.shape)) and torch.as_tensor(array).is_floating_point()


class _ArrayName(NamedTuple):
    """The name of an array in a checkpoint.

    Attributes:
        name: None if the array is not there.
        reader: of the descriptor or fitting network that has the array, if any.
        inner: the place in its tree.
    """

    name: str | None
    reader: PartTree | None
    inner: str


def _name_of(place: str, config: ModelConfig, backend: str) -> _ArrayName:
    """Return the name in a checkpoint of the array at a place in the tree of a model."""
    match = _PART.fullmatch(place.removeprefix(f"{INSIDE}."))
    assert match is not None, place
    prefix = match[1] or ""  # number of the part in a model of several
    entry = match[3]
    inner = match[4]
    reader = None
    name = f"{entry}{inner}"
    if entry == "tab":
        name = inner if inner in _IN_TABLE else ""
    elif entry in PARTS:
        kinds, option = PARTS[entry]
        section = getattr(_parts(config)[int(match[2] or 0)], option)
        reader = tree_by_type(kinds, section.type)
        name_inside = reader.name_of(inner, section, backend)
        name = f"{option}.{name_inside}" if name_inside else ""
    return _ArrayName(f"atomic_model.{prefix}{name}" if name else None, reader, inner)


def _arrays(
    node: Any, place: str = "", is_variable: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arrays of a tree: their places, and where they are."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        inside = is_variable or key == VARIABLES
        path = place if key == VARIABLES else f"{place}.{key}" if place else str(key)
        if isinstance(value, dict | list):
            yield from _arrays(value, path, inside)
        elif is_variable and value is not None:
            yield path, node, key
