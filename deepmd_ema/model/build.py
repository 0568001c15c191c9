"""From the section ``model`` of a config to a model with random parameters; the registry of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from deepmd_ema.batch import both_orders
from deepmd_ema.config.schema.model import StandardConfig
from deepmd_ema.families.dpa2.module import DPA2Descriptor
from deepmd_ema.families.dpa3.module import DPA3Descriptor
from deepmd_ema.families.ener.module import EnergyFitting
from deepmd_ema.families.hybrid.module import HybridDescriptor
from deepmd_ema.families.linear_ener.module import LinearDescriptor, LinearFitting
from deepmd_ema.families.linear_ener.section import LinearConfig, PairTableConfig
from deepmd_ema.families.se_atten.module import DPA1Descriptor
from deepmd_ema.families.se_e2_a.module import SeE2ADescriptor
from deepmd_ema.families.se_e2_r.module import SeE2RDescriptor
from deepmd_ema.families.se_e3.module import SeE3Descriptor
from deepmd_ema.families.se_e3_tebd.module import SeE3TebdDescriptor
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.nn.type_embedding import TypeEmbedding
from deepmd_ema.model.pair_energy import PairTableDescriptor, PairTableFitting
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.model.short_range import ShortRange, Switch
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig, HybridConfig
    from deepmd_ema.config.schema.model import EnerFittingConfig, ModelConfig
    from deepmd_ema.config.schema.run import Link
    from deepmd_ema.model.interface import Descriptor, Fitting


def _hybrid(config: HybridConfig, num_types: int, seed: int) -> HybridDescriptor:
    """Return a hybrid with its parts, each of which starts from random numbers of its own."""
    parts = [
        DESCRIPTORS[part.type](part, num_types, seed_for("part", seed, index)) for index, part in enumerate(config.list)
    ]
    return HybridDescriptor(config, parts)


# by the ``type`` of their sections; called with the section, the number of elements and the seed
DESCRIPTORS: dict[str, Callable[[Any, int, int], Descriptor]] = {
    "se_e2_a": SeE2ADescriptor,
    "se_e2_r": SeE2RDescriptor,
    "se_atten": DPA1Descriptor,
    "se_atten_v2": DPA1Descriptor,
    "dpa2": DPA2Descriptor,
    "dpa3": DPA3Descriptor,
    "se_e3": SeE3Descriptor,
    "se_e3_tebd": SeE3TebdDescriptor,
    "hybrid": _hybrid,
}
# called with the section, the number of features, the number of elements, excluded types, the seed, and whether the
# features tell the elements apart
FITTINGS: dict[str, Callable[[Any, int, int, tuple[int, ...], int, bool], Fitting]] = {"ener": EnergyFitting}


def build_model(config: ModelConfig, seed: int | None = None) -> EnergyModel:
    """Return the model of a config with random parameters; equal configs and seeds give equal parameters.

    The global random state of torch is neither read nor moved.

    Args:
        config: ``model`` with the numbers of neighbors resolved.
        seed: for parts without a seed of their own (``training.seed``); None counts as 0.
    """
    excluded_types = tuple(config.atom_exclude_types)
    pairs = both_orders(config.pair_exclude_types)
    start = seed_for("model", seed or 0)
    short_range = None
    descriptor: Descriptor
    fitting: Fitting
    if isinstance(config, LinearConfig):
        descriptor, fitting = _linear(config, start)
    else:
        assert isinstance(config, StandardConfig), type(config)
        descriptor, fitting = _networks(config, config.descriptor, config.fitting_net, start)
        short_range = _short_range(config)
    for module in cast("nn.Module", descriptor).modules():
        if isinstance(module, TypeEmbedding):
            module.name_elements(config.type_map)
    return EnergyModel(descriptor, fitting, list(config.type_map), pairs, excluded_types, short_range)


def build_models(
    configs: Mapping[str, ModelConfig], links: Iterable[Link] = (), seeds: Mapping[str, int] | None = None
) -> ModelSet:
    """Return the models of all tasks of a run, with the parts that they share.

    Args:
        configs: sections ``model`` by name of the task, with the numbers of neighbors resolved.
        links: what is shared.
        seeds: of the random parameters of each task; 0 if not given.
    """
    models = {name: build_model(config, (seeds or {}).get(name)) for name, config in configs.items()}
    for index, name in enumerate(sorted(set(models) - {""})):
        models[name].fitting.set_case(index)
    share_parts(models, links)
    return ModelSet(models)


def share_parts(models: Mapping[str, EnergyModel], links: Iterable[Link]) -> None:
    """Let models have parts in common: one module, whose parameters are trained by all of their tasks.

    Of two models with a link of one name the second gets the part of the first. A part is first a whole one, if there
    is any. What tells tasks apart stays with each: the output bias and the case embedding.

    Args:
        models: by name of the task; changed.
        links: which parts are shared.

    Raises:
        ConfigError: if a fitting network does not fit the descriptor of another task.
    """
    first: dict[str, tuple[str, Any]] = {}
    for link in sorted(links, key=lambda link: link.level):
        model: Any = models[link.task]
        if link.part == "fitting_net":
            task, fitting = first.setdefault(link.key, (link.task, model.fitting))
            model.fitting.share_networks(fitting, f"tasks {task} and {link.task}")
        elif link.part != "type_map":
            place = "descriptor" if link.part == "descriptor" else f"descriptor.parts.{link.place[-1]}"
            _, shared = first.setdefault(link.key, (link.task, model.get_submodule(place)))
            if link.level:
                place, shared = f"{place}.type_embedding", shared.get_submodule("type_embedding")
            owner, _, name = place.rpartition(".")
            setattr(model.get_submodule(owner), name, shared)


def _networks(
    config: ModelConfig, descriptor: DescriptorConfig, fitting: EnerFittingConfig, seed: int
) -> tuple[Descriptor, Fitting]:
    """Return a descriptor and the fitting network behind it, for the elements of ``config``."""
    num_types, excluded_types = len(config.type_map), tuple(config.atom_exclude_types)
    made = DESCRIPTORS[descriptor.type](descriptor, num_types, seed)
    return made, FITTINGS[fitting.type](fitting, made.dim_out, num_types, excluded_types, seed, made.mixed_types)


def _linear(config: LinearConfig, seed: int) -> tuple[Descriptor, Fitting]:
    """Return all parts side by side; each starts from random numbers of its own."""
    descriptors: list[Descriptor] = []
    fittings: list[Fitting] = []
    for index, part in enumerate(config.models):
        if isinstance(part, PairTableConfig):
            assert part.neighbors is not None, "sel is resolved"
            table = PairTable.of_rows(part.rows_for(config.type_map), part.rcut)
            descriptors.append(PairTableDescriptor(table, sum(part.neighbors)))
            fittings.append(PairTableFitting(len(config.type_map), tuple(config.atom_exclude_types)))
        else:
            made = _networks(config, part.descriptor, part.fitting_net, seed_for("part", seed, index))
            descriptors.append(made[0])
            fittings.append(made[1])
    widths = [one.dim_out for one in descriptors]
    section = cast("HybridConfig", config.descriptor)
    return LinearDescriptor(section, descriptors), LinearFitting(config.fitting_net, fittings, widths)


def _short_range(config: StandardConfig) -> ShortRange | None:
    """Return the pair energies that take over at short distances, or None."""
    if config.use_srtab is None:
        return None
    assert config.sw_rmin is not None
    assert config.sw_rmax is not None
    switch = Switch(config.smin_alpha, config.sw_rmin, config.sw_rmax)
    table = PairTable.of_rows(config.use_srtab, config.descriptor.cutoff)
    return ShortRange(table, switch, len(config.type_map), tuple(config.atom_exclude_types))
