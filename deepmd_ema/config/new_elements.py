"""Options of a section ``model`` with an entry for each element, when elements are added."""

from __future__ import annotations

from typing import Any

from deepmd_ema.config.schema.model import ModelConfig


def continue_lists(
    config: ModelConfig,
    num_types: int,
    descriptor: dict[str, Any],
    fitting: dict[str, Any],
    model: dict[str, Any],
) -> None:
    """Give new elements entries in the lists of options that have one for each element.

    Args:
        config: of the model without them.
        num_types: number of elements with them.
        descriptor: options of ``model.descriptor``, changed in place.
        fitting: options of ``model.fitting_net``, changed in place.
        model: other options of ``model``, changed in place.
    """
    num_new = num_types - len(config.type_map)
    sections = getattr(config.descriptor, "list", [config.descriptor])
    for part, section in zip(descriptor.get("list", [descriptor]), sections):
        # as many neighbors as of the most frequent element; `check` compares with the data
        if getattr(section, "counts_elements", False) and isinstance(part["sel"], list):
            part["sel"] = [*part["sel"], *[max(part["sel"])] * num_new]
    # no energy was given, and tensors are as the network gives them
    for name, value in (("atom_ener", None), ("scale", 1.0)):
        if isinstance(fitting.get(name), list):
            fitting[name] = [*fitting[name], *[value] * num_new]
    if presets := model.get("preset_out_bias"):
        model["preset_out_bias"] = {
            name: [*values, *[None] * num_new] for name, values in presets.items()
        }
