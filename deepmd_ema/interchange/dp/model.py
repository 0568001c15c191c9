"""Models as the dictionaries that DeePMD-kit serializes them to, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deepmd_ema.config.load import model_config_from_dict
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interchange.dp.ener import EnerTree
from deepmd_ema.interchange.dp.files import VARIABLES, Tree
from deepmd_ema.interchange.dp.networks import array, chosen, fill
from deepmd_ema.interchange.dp.se_e2_a import SeE2ATree
from deepmd_ema.model.build import build_model

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig
    from deepmd_ema.model.energy import EnergyModel


class DescriptorTree(Protocol):
    """How one kind of descriptor is written to a tree and read from it. What is read is what was written, bitwise."""

    def write(self, descriptor: Any, section: Any, type_map: Sequence[str]) -> Tree:
        """Return the tree of a descriptor; arrays are copies on the CPU."""

    def unavailable(self, tree: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return features that are not available here, and whether the tree uses them."""

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.descriptor`` that the tree gives."""

    def fill(self, descriptor: Any, tree: Mapping[str, Any]) -> None:
        """Write the arrays of the tree into parameters and buffers.

        Raises:
            ValueError: if a shape or a number of networks or layers differs.
        """


# by the ``type`` of their sections; a descriptor without a tree trains, but cannot be frozen
DESCRIPTOR_TREES: dict[str, DescriptorTree] = {"se_e2_a": SeE2ATree()}
FITTING_TREES: dict[str, EnerTree] = {"ener": EnerTree()}


def model_tree(model: EnergyModel, config: ModelConfig) -> Tree:
    """Return the serialized model; arrays are copies on the CPU.

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
        "type_map": list(config.type_map),
        "atom_exclude_types": list(config.atom_exclude_types),
        "pair_exclude_types": [list(pair) for pair in config.pair_exclude_types],
        "rcond": config.fitting_net.rcond,
        "preset_out_bias": config.preset_out_bias,
        VARIABLES: {"out_bias": array(model.out_bias), "out_std": array(model.out_std)},
        "@class": "Model",
        "@version": 2,
        "type": "standard",
        "descriptor": DESCRIPTOR_TREES[name].write(model.descriptor, config.descriptor, config.type_map),
        "fitting": FITTING_TREES[config.fitting_net.type].write(model.fitting, config),  # type: ignore[arg-type]
    }


def check_available(path: Path, tree: Mapping[str, Any]) -> None:
    """Refuse by name what is not available here.

    Raises:
        CheckpointError: naming the descriptor, the fitting or the feature.
    """
    kind = tree.get("type", "standard")
    if kind != "standard":
        raise CheckpointError(f"{path}: a model of type {kind!r}; only standard models are available here.")
    parts = (("descriptor", DESCRIPTOR_TREES), ("fitting", FITTING_TREES))
    trees = {part: tree.get(part) or {} for part, _ in parts}
    problems = [
        f"{path}: {part} {trees[part].get('type')!r} is not available here. Known: {', '.join(known)}."
        for part, known in parts
        if trees[part].get("type") not in known
    ]
    if not problems:
        used = {
            feature: None
            for part, known in parts
            for feature, is_used in known[trees[part]["type"]].unavailable(trees[part]).items()
            if is_used
        }
        problems = [f"{path}: uses {feature}, which is not available here." for feature in used]
    if problems:
        raise CheckpointError(problems)


def config_from_tree(tree: Mapping[str, Any]) -> ModelConfig:
    """Return the section ``model``: the shape from the model itself, the rest from the input that is kept with it."""
    model, script = tree["model"], tree.get("model_def_script") or {}
    descriptor, fitting = model["descriptor"], model["fitting"]
    section = {
        **chosen(script, ("data_stat_nbatch", "data_stat_protect")),
        "type_map": model["type_map"],
        "descriptor": {
            **_seed(script.get("descriptor")),
            **DESCRIPTOR_TREES[descriptor["type"]].section(descriptor),
        },
        "fitting_net": {**_seed(script.get("fitting_net")), **FITTING_TREES[fitting["type"]].section(fitting)},
        "pair_exclude_types": model.get("pair_exclude_types") or [],
        "atom_exclude_types": model.get("atom_exclude_types") or [],
        "preset_out_bias": model.get("preset_out_bias"),
    }
    return model_config_from_dict(section, "model")


def model_from_tree(config: ModelConfig, tree: Mapping[str, Any]) -> EnergyModel:
    """Return the model that a tree describes.

    Raises:
        ValueError: if a shape or the number of networks or layers differs.
    """
    model = build_model(config)
    fill("out_bias", model.out_bias, tree[VARIABLES]["out_bias"])
    if tree[VARIABLES].get("out_std") is not None:
        fill("out_std", model.out_std, tree[VARIABLES]["out_std"])
    DESCRIPTOR_TREES[config.descriptor.type].fill(model.descriptor, tree["descriptor"])
    FITTING_TREES[config.fitting_net.type].fill(model.fitting, tree["fitting"])  # type: ignore[arg-type]
    return model


def _seed(section: Any) -> Tree:
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return {"seed": seed} if isinstance(seed, int) else {}
