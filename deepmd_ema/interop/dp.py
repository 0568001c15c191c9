"""DeePMD-kit's model files, ``.dp`` (HDF5) and ``.yaml``: written from and read into models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from deepmd_ema.config import ModelConfig, model_config_from_dict
from deepmd_ema.config.fields import plain
from deepmd_ema.config.registry import Registry
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS, MODELS, StandardConfig
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.interop.parts import (
    array,
    chosen,
    fill,
    node,
    tree_by_type,
    tree_of,
    types_with_tree,
)
from deepmd_ema.interop.tree_files import (
    SOFTWARE,
    VARIABLES,
    Tree,
    read_tree,
    write_tree,
)
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interface import Descriptor, Fitting
from deepmd_ema.model.short_range import TabulatedShortRange
from deepmd_ema.utils import __version__

if TYPE_CHECKING:
    from deepmd_ema.model.pair_table import PairTable

EXTRA = "dp_ema"  # our own facts about the weights; DeePMD-kit does not look here
INSIDE = "atomic_model"  # entry of the trees of some models that all others are in
# entry of the tree of a standard model -> its types, and its name in the section ``model``
PARTS: Mapping[str, tuple[Registry, str]] = {
    "descriptor": (DESCRIPTORS, "descriptor"),
    "fitting": (FITTINGS, "fitting_net"),
}
_SWITCH = ("sw_rmin", "sw_rmax", "smin_alpha")


def file_tree(
    model: EnergyModel,
    config: ModelConfig | Mapping[str, Any],
    min_nbor_dist: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Tree:
    """Return the whole content of a model file, for :func:`write_tree`.

    Args:
        model: as built from ``config``.
        config: the section ``model``.
        min_nbor_dist: shortest distance in the training data, angstrom; by default
            ``model.min_nbor_dist``.
        extra: plain facts about the weights, returned by ``read_dp`` under ``dp_ema``.
    """
    section = model_config_from_dict(config) if isinstance(config, Mapping) else config
    distance = model.min_nbor_dist if min_nbor_dist is None else min_nbor_dist
    tree: Tree = {
        "software": SOFTWARE,
        "version": __version__,
        "backend": "PyTorch",
        "pt_version": str(torch.__version__),
        "model": model_tree(model, section),
        # only options that DeePMD-kit knows, and that have a value: its `dp compress` and
        # `dp convert-backend` build the model from them
        "model_def_script": plain(section, for_deepmd=True),
    }
    if distance is not None:
        tree[VARIABLES] = {"min_nbor_dist": np.array(distance, dtype=np.float64)}
    return _with_facts(tree, extra or {})


def rewrite_bias(
    path: str | Path,
    target: str | Path,
    bias: np.ndarray,
    std: np.ndarray | None,
    facts: Mapping[str, Any],
) -> None:
    """Write the model file ``path`` to ``target`` with another output bias.

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
    model = tree["model"].get(INSIDE, tree["model"])
    # a reader adds the biases of the parts of a linear model to that of the whole
    for part in model.get("models", ()):
        part[VARIABLES]["out_bias"] = np.zeros_like(part[VARIABLES]["out_bias"])
    variables = model[VARIABLES]
    # (outputs, T, components): one output, the energy, of one component
    variables["out_bias"] = np.array(bias, dtype=np.float64).reshape(
        variables["out_bias"].shape
    )
    if std is not None:
        variables["out_std"] = np.array(std, dtype=np.float64).reshape(
            variables["out_bias"].shape
        )
    write_tree(Path(target), _with_facts(tree, {**_facts_of(tree), **facts}))


class StoredModel(NamedTuple):
    """A model in a file of DeePMD-kit.

    Attributes:
        config: the section ``model``.
        model: in evaluation mode, with its ``min_nbor_dist``.
        facts: what else the file says.
    """

    config: ModelConfig
    model: EnergyModel
    facts: dict[str, Any]


def read_dp(path: str | Path) -> StoredModel:
    """Return the model of a file, which may be one of ``dp-ema freeze``.

    The facts are ``software``, ``version``, ``model_def_script``, ``min_nbor_dist`` (or
    None) and ``dp_ema``, which is empty in files of DeePMD-kit that it has not converted from one
    of ours.

    Raises:
        CheckpointError: if the file is missing, damaged, or holds a model that is not available
            here.
    """
    path = Path(path)
    tree = read_tree(path)
    if not isinstance(tree.get("model"), dict):
        raise CheckpointError(
            f"{path}: no model inside. Expected a .dp or .yaml file of DeePMD-kit or dp-ema freeze."
        )
    with faults_as_messages(path):
        _check_available(path, tree["model"])
        tree["model"] = normalized(tree["model"])
        config = config_from_tree(tree)
        model = build_model(config)
        fill_model(model, config, tree["model"])
        distance = tree.get(VARIABLES, {}).get("min_nbor_dist")
        # DeePMD-kit writes -1 for a distance that it does not know
        model.min_nbor_dist = (
            None if distance is None or float(distance) < 0 else float(distance)
        )
        facts = _facts_of(tree)
        script = {
            name: value
            for name, value in (tree.get("model_def_script") or {}).items()
            if name != EXTRA
        }
    info = {name: tree.get(name) for name in ("software", "version", "backend")}
    info["model_def_script"] = script
    info["min_nbor_dist"] = model.min_nbor_dist
    info[EXTRA] = facts
    return StoredModel(config, model.eval(), info)


def _with_facts(tree: Tree, facts: Mapping[str, Any]) -> Tree:
    """Return ``tree`` with facts about its weights.

    Their kind and step are in the input as well, which is all that DeePMD-kit keeps of ours when it
    converts a file.
    """
    tree = {**tree, EXTRA: dict(facts)}
    if "weights" in facts:
        short = {name: fact for name, fact in facts.items() if name != "config"}
        tree["model_def_script"] = {
            **(tree.get("model_def_script") or {}),
            EXTRA: short,
        }
    return tree


def _facts_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our facts about the weights; empty in files of DeePMD-kit."""
    facts: Mapping[str, Any] = (
        tree.get(EXTRA) or (tree.get("model_def_script") or {}).get(EXTRA) or {}
    )
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
        raise CheckpointError(
            f"{path}: an entry of the model is missing or of another kind: {error!r}."
        ) from error
    except (
        ValueError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
        ConfigError,
    ) as error:
        raise CheckpointError(
            f"{path}: the model does not fit together: {error}"
        ) from error


def model_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    """Return the serialized model; arrays are copies on the CPU.

    Raises:
        CheckpointError: if the format does not have this descriptor.
    """
    whole = {
        "type_map": list(config.type_map),
        "atom_exclude_types": sorted(config.excluded_types),
        "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
        "rcond": config.fitting_net.rcond,
        "preset_out_bias": config.preset_out_bias,
        VARIABLES: {"out_bias": array(model.out_bias), "out_std": array(model.out_std)},
        **node("Model", 2),
    }
    family = MODELS[config.type]
    if not family.tree:
        raise CheckpointError(
            f'model.type = "{config.type}": cannot be written in the format of DeePMD-kit.'
        )
    tree: Tree = family.load("tree")().write(whole, model, config)
    return tree


def config_from_tree(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section ``model`` of a file.

    The shape comes from the model itself, the rest from the input that is stored with it.
    """
    model, script = tree["model"], tree.get("model_def_script") or {}
    section = {
        **chosen(script, ("data_stat_nbatch", "data_stat_protect")),
        "type_map": model["type_map"],
        "pair_exclude_types": model.get("pair_exclude_types") or [],
        "atom_exclude_types": model.get("atom_exclude_types") or [],
        "preset_out_bias": model.get("preset_out_bias"),
    }
    more = _reader_of(model).section(model, script)
    return model_config_from_dict({**section, **more}, "model")


def fill_model(model: EnergyModel, config: ModelConfig, tree: Tree) -> None:
    """Write the arrays of a normalized tree into the parameters and buffers of a model on the CPU.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    target = model_tree(model, config)
    target = _reader_of(target).normalized(target)
    # some files have no out_std
    names = {
        "out_bias",
        *(name for name, value in tree[VARIABLES].items() if value is not None),
    }
    variables = {
        name: value for name, value in target[VARIABLES].items() if name in names
    }
    fill({**target, VARIABLES: variables}, tree)


def normalized(tree: Tree) -> Tree:
    """Return a tree that was read in the form of :class:`StandardTree`.

    In this form it is compared with the tree that is written.

    Raises:
        ValueError: if it has what is not available here.
    """

    def upgraded(part: Tree) -> Tree:
        part = dict(part)
        for name, (kinds, _) in PARTS.items():
            reader = tree_of(kinds, part[name]) if name in part else None
            if reader is not None:
                part[name] = reader.upgraded(part[name])
        return part

    tree = upgraded(_reader_of(tree).normalized(tree))
    if "models" in tree:
        tree["models"] = [upgraded(part) for part in tree["models"]]
    return tree


def _model_trees() -> list[StandardTree]:
    """Return the trees of the registered types of models that can be written."""
    return [family.load("tree")() for family in MODELS.values() if family.tree]


def _reader_of(tree: Mapping[str, Any]) -> StandardTree:
    """Return the reader of the tree of a model of a known type."""
    return next(
        reader
        for reader in _model_trees()
        if tree.get("type", "standard") in reader.kinds
    )


def _check_available(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse by name what is not available here.

    Raises:
        CheckpointError: naming the descriptor, the fitting or the feature.
    """
    kind = tree.get("type", "standard")
    kinds = [name for reader in _model_trees() for name in reader.kinds]
    if kind not in kinds:
        raise CheckpointError(
            f"{path}: a model of type {kind!r}; available here: {', '.join(kinds)}."
        )
    problems: list[str] = []
    features: dict[str, None] = {}
    parts = tree.get("models")
    if parts is None:
        parts = [{**tree.get(INSIDE, tree), "type": "standard"}]
    for part in parts:
        if (kind := part.get("type", "standard")) not in ("standard", "pairtab"):
            raise CheckpointError(
                f"{path}: a part of type {kind!r}; available here: standard, pairtab."
            )
        for name, (registry, _) in PARTS.items() if kind == "standard" else ():
            network = part.get(name) or {}
            if (reader := tree_of(registry, network)) is not None:
                features |= dict.fromkeys(reader.unavailable(network))
            else:
                types = ", ".join(types_with_tree(registry))
                problems.append(
                    f"{path}: {name} {network.get('type')!r} is not available here. Known: {types}."
                )
    problems = problems or [
        f"{path}: uses {feature}, which is not available here." for feature in features
    ]
    CheckpointError.raise_if_any(problems)


# ---- types of models


class StandardTree:
    """Tree of a standard model; with a table of pair energies it has type ``zbl`` and two parts.

    The base of those of other types.

    Attributes:
        kinds: values of ``type`` of its trees.
    """

    kinds: tuple[str, ...] = ("standard", "zbl")

    def write(self, whole: Tree, model: EnergyModel, config: Any) -> Tree:
        """Return the tree of a model; ``whole`` has the entries of any type."""
        if config.bridging is not None:
            raise CheckpointError(
                'no tree of DeePMD-kit has bridging_method in a model of type standard. Use "dpa4".'
            )
        networks = network_trees(model.descriptor, model.fitting, config)
        if not isinstance(model.short_range, TabulatedShortRange):
            return {**whole, "type": "standard", **networks}
        networks["fitting"][
            "exclude_types"
        ] = []  # the model excludes them, not its network
        short = model.short_range
        pairs = part_tree(
            whole, "pairtab", table_entries(short.table, sum(model.layout.sel))
        )
        return {
            **whole,
            "type": "zbl",
            "models": [part_tree(whole, "standard", networks), pairs],
            "weights": "mean",
            "sw_rmin": short.inner,
            "sw_rmax": short.outer,
            "smin_alpha": short.alpha,
        }

    def normalized(self, tree: Tree) -> Tree:
        """Return a tree with options in place of tables, and networks as without tables.

        Raises:
            ValueError: if it has what is not available here.
        """
        if tree.get("type") != "zbl":
            return tree
        network, table = tree["models"]
        for part in (network, table):
            refuse_own_exclusions(part)
            if np.any(part[VARIABLES]["out_bias"]):
                raise ValueError(
                    "a part of the model has an out_bias of its own, which is not available here"
                )
        options = {
            "use_srtab": table_rows(table),
            **{name: float(tree[name]) for name in _SWITCH},
        }
        return {
            **tree,
            "type": "standard",
            "models": [],
            **chosen(network, tuple(PARTS)),
            **options,
        }

    def section(self, tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model`` that only this type has.

        Args:
            tree: the model, normalized.
            script: the section ``model`` of the input that is kept with it.
        """
        return {
            **network_sections(tree, script),
            **chosen(tree, ("use_srtab", *_SWITCH)),
        }


def network_trees(
    descriptor: Descriptor, fitting: Fitting, config: StandardConfig
) -> Tree:
    """Return the trees of a descriptor and its fitting network.

    Raises:
        CheckpointError: if the format does not have this descriptor.
    """
    return {
        "descriptor": tree_by_type(DESCRIPTORS, config.descriptor.type).write(
            descriptor, config
        ),
        "fitting": tree_by_type(FITTINGS, config.fitting_net.type).write(
            fitting, config
        ),
    }


def network_sections(tree: Mapping[str, Any], script: Mapping[str, Any]) -> Tree:
    """Return the sections of a descriptor and its fitting network, with seeds from ``script``."""
    sections: Tree = {}
    for part, (kinds, name) in PARTS.items():
        reader = tree_of(kinds, tree[part])
        section = script.get(name)
        assert reader is not None, f"unchecked {part}"
        seed = section.get("seed") if isinstance(section, Mapping) else None
        sections[name] = {
            **({"seed": seed} if isinstance(seed, int) else {}),
            **reader.section(tree[part]),
        }
    return sections


def part_tree(whole: Mapping[str, Any], kind: str, entries: Tree) -> Tree:
    """Return the tree of a part of a model; energies of the elements are in ``whole``.

    Args:
        whole: tree of the model.
        kind: ``standard`` or ``pairtab``.
        entries: what a tree of this kind has beside.
    """
    num_types = len(whole["type_map"])
    return {
        **whole,
        "atom_exclude_types": [],
        "pair_exclude_types": [],
        "preset_out_bias": None,
        VARIABLES: {
            "out_bias": np.zeros((1, num_types, 1)),
            "out_std": np.ones((1, num_types, 1)),
        },
        "type": kind,
        **entries,
    }


def refuse_own_exclusions(part: Mapping[str, Any]) -> None:
    """Check that only the whole model excludes types.

    Raises:
        ValueError: if a part does.
    """
    if any(part.get(name) for name in ("atom_exclude_types", "pair_exclude_types")):
        raise ValueError(
            "a part of the model excludes types on its own, which is not available here"
        )


def table_entries(table: PairTable, sel: int) -> Tree:
    """Return the entries of the tree of a table beside those of any part."""
    rows, num_types = table.rows, table.num_types
    num_intervals = len(rows) - 1
    tab = {
        **node("PairTab", 1),
        "rmin": table.first,
        "rmax": float(rows[-1, 0]),
        "hh": table.step,
        "nspline": num_intervals,
        "ntypes": num_types,
        "rcut": table.rcut,
        VARIABLES: {
            "vdata": rows,
            "tab_info": np.array(
                [table.first, table.step, num_intervals, num_types], dtype=np.float64
            ),
            "tab_data": table.coefficients.flatten().cpu().numpy(),
        },
    }
    return {"tab": tab, "rcut": table.rcut, "sel": sel}


def table_rows(part: Mapping[str, Any]) -> list[list[float]]:
    """Return the rows of the table of a part.

    Raises:
        ValueError: if it is continued beyond its last energies.
    """
    rows = np.asarray(part["tab"][VARIABLES]["vdata"])
    if rows[-1, 0] + 1e-6 < float(part["rcut"]):
        raise ValueError("its table was extrapolated to 0, which is not available here")
    return [list(map(float, row)) for row in rows]
