"""From the section ``model`` of a config to a model with random parameters; the registry of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from deepmd_ema.batch import both_orders
from deepmd_ema.errors import ConfigError, did_you_mean
from deepmd_ema.model.descriptor.se_e2_a import SeE2ADescriptor
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.fitting.ener import EnergyFitting
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.model import ModelConfig

DESCRIPTORS: dict[str, type[nn.Module]] = {"se_e2_a": SeE2ADescriptor}
FITTINGS: dict[str, type[nn.Module]] = {"ener": EnergyFitting}


def build_model(config: ModelConfig, seed: int | None = None) -> EnergyModel:
    """Return the model of a config with random parameters; equal configs and seeds give equal parameters.

    The global random state of torch is neither read nor moved.

    Args:
        config: ``model`` with ``sel`` resolved to numbers.
        seed: for parts without a seed of their own (``training.seed``); None counts as 0.

    Raises:
        ConfigError: if a part is unknown.
    """
    num_types = len(config.type_map)
    excluded_types = tuple(config.atom_exclude_types)
    pairs = both_orders(config.pair_exclude_types)
    start = seed_for("model", seed or 0)
    descriptor = _known("descriptor", DESCRIPTORS, config.descriptor.type)(config.descriptor, num_types, start)
    fitting = _known("fitting_net", FITTINGS, config.fitting_net.type)(
        config.fitting_net, descriptor.dim_out, num_types, excluded_types, start
    )
    return EnergyModel(descriptor, fitting, list(config.type_map), pairs, excluded_types)


def _known(section: str, table: dict[str, type[nn.Module]], name: str) -> type[nn.Module]:
    if name not in table:
        raise ConfigError(f'model.{section}.type "{name}" is unknown. {did_you_mean(name, list(table))}')
    return table[name]
