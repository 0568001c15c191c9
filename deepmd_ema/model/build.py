"""From the section ``model`` of a config to a model with random parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.schema.descriptor import DESCRIPTORS, HasBridging
from deepmd_ema.config.schema.model import (
    FITTINGS,
    MODELS,
    NetworkConfig,
    StandardConfig,
)
from deepmd_ema.model.bridging import Bridging, ZblEnergies
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.nn.type_embedding import TypeEmbedding
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.model.quantity import QuantityModel
from deepmd_ema.model.short_range import TabulatedShortRange
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig
    from deepmd_ema.config.schema.model import Link, ModelConfig
    from deepmd_ema.model.interface import (
        Descriptor,
        Fitting,
        HasEquivariants,
        ShortRange,
    )

    Parts = tuple[Descriptor, Fitting, ShortRange | None]


def build_model(config: ModelConfig, seed: int | None = None) -> EnergyModel:
    """Return the model of a config; equal configs and seeds give equal random parameters.

    The global random state of torch is neither read nor moved.

    Args:
        config: ``model`` with the numbers of neighbors resolved.
        seed: for parts without a seed of their own (``training.seed``); None counts as 0.
    """
    # the module of the kind of model is imported here, so that others cost no time
    build_parts: Callable[[ModelConfig, int], Parts] = MODELS[config.type].load(
        "module"
    )
    parts = build_parts(config, seed_for("model", seed or 0))
    # embeddings of electronic states depend on the symbols, which sections do not have
    for module in cast("nn.Module", parts[0]).modules():
        if isinstance(module, TypeEmbedding):
            module.name_elements(config.type_map)
    kind = EnergyModel if ENERGY in config.fitting_net.labels else QuantityModel
    return kind(config, *parts)


def build_models(
    configs: Mapping[str, ModelConfig],
    links: Iterable[Link] = (),
    seeds: Mapping[str, int] | None = None,
) -> ModelSet:
    """Return the models of all tasks of a run, with the parts that they share.

    Args:
        configs: sections ``model`` by name of the task, with the numbers of neighbors resolved.
        links: what is shared.
        seeds: of the random parameters of each task; 0 if not given.
    """
    models = {
        name: build_model(config, (seeds or {}).get(name))
        for name, config in configs.items()
    }
    # sorted, so that the case of a task does not depend on the order of tasks in the input
    for index, name in enumerate(sorted(set(models) - {""})):
        models[name].fitting.set_case(index)
    share_parts(models, links)
    return ModelSet(models)


def share_parts(models: Mapping[str, EnergyModel], links: Iterable[Link]) -> None:
    """Let models have parts in common: one module, trained by the steps of all of their tasks.

    Of two models with a link of one name the second gets the part of the first. A part is first a
    whole one, if there is any. What distinguishes tasks stays with each: the output bias and the
    case embedding.

    Args:
        models: by name of the task; changed.
        links: which parts are shared.

    Raises:
        ConfigError: if a fitting network does not fit the descriptor of another task.
    """
    # by the key of the links: the task that has the part first, and the part
    first: dict[str, tuple[str, Any]] = {}
    # whole parts first: an embedding of elements is then that of a part shared as a whole
    for link in sorted(links, key=lambda link: link.level):
        model: Any = models[link.task]
        if link.part == "fitting_net":
            # networks and the scales of their inputs; bias and case embedding stay with each task
            task, fitting = first.setdefault(link.key, (link.task, model.fitting))
            model.fitting.share_networks(fitting, f"tasks {task} and {link.task}")
        elif link.part != "type_map":
            is_part = link.part != "descriptor"  # a part of a hybrid
            place = f"descriptor.parts.{link.place[-1]}" if is_part else "descriptor"
            _, shared = first.setdefault(
                link.key, (link.task, model.get_submodule(place))
            )
            if link.level:
                place = f"{place}.type_embedding"
                shared = shared.get_submodule("type_embedding")
            owner, _, name = place.rpartition(".")
            setattr(model.get_submodule(owner), name, shared)


def network_parts(config: NetworkConfig, seed: int) -> Parts:
    """Return the parts of a model of one descriptor and one fitting network.

    Bridging or a table may be among them.
    """
    window = config.bridging
    section = config.descriptor
    short_range: ShortRange | None = None
    if window is not None:
        assert isinstance(section, HasBridging)
        # the descriptor gets the window by its section, as messages depend on it
        short_range = Bridging(ZblEnergies(config.type_map), window, section.cutoff)
        section = section.bridged(window)
    if isinstance(config, StandardConfig) and config.use_srtab is not None:
        assert config.sw_rmin is not None
        assert config.sw_rmax is not None
        table = PairTable(config.use_srtab, section.cutoff)
        short_range = TabulatedShortRange(
            table, config.smin_alpha, config.sw_rmin, config.sw_rmax
        )
    return *build_networks(config, section, config.fitting_net, seed), short_range


def build_networks(
    config: ModelConfig, section: DescriptorConfig, fitting: Any, seed: int
) -> tuple[Descriptor, Fitting]:
    """Return a descriptor and the fitting network behind it, for the elements of ``config``."""
    num_types = len(config.type_map)
    descriptor: Descriptor = DESCRIPTORS[section.type].load("module")(
        section, num_types, seed
    )
    build_fitting: Callable[..., Fitting] = FITTINGS[fitting.type].load("module")
    about: tuple[Any, ...] = (
        fitting,
        descriptor.dim_out,
        num_types,
        seed,
        descriptor.mixed_types,
    )
    # fittings of dipoles and polarizabilities have the number of vectors as an argument as well
    if fitting.is_equivariant:
        about = *about, cast("HasEquivariants", descriptor).dim_equivariants
    return descriptor, build_fitting(*about)
