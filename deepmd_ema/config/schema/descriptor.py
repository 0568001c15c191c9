"""Sections ``model.descriptor``: their protocol, and the registry of descriptors.

A descriptor is a folder of ``model/families/`` or another distribution; no other package knows its
options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from deepmd_ema.config.registry import Registry

if TYPE_CHECKING:
    from deepmd_ema.config.schema.bridging import Window
    from deepmd_ema.findings import Findings
    from deepmd_ema.geometry import NeighborStatistics


class DescriptorConfig(Protocol):
    """A section ``model.descriptor``: a frozen dataclass of options that answers these questions.

    Attributes:
        type: its canonical name, by which section, module and tree are registered.
        aliases: other values of ``type`` in the input.
        precision: precision of the parameters: ``default``, ``float64`` or ``float32``.
        neighbors_option: name of the option that ``neighbors`` come from, for messages.
        has_type_embedding: whether the module has a ``type_embedding``, which tasks may share
            alone.
    """

    type: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]
    neighbors_option: ClassVar[str]
    has_type_embedding: ClassVar[bool]

    @property
    def precision(self) -> str:
        """Return the precision of the parameters; ``default`` is float64."""

    @property
    def cutoff(self) -> float:
        """Return the largest distance of two atoms that see each other, angstrom."""

    @property
    def neighbors(self) -> tuple[int, ...] | None:
        """Return the most neighbors kept, per element or one number for all.

        None while this is left to the data.
        """

    def with_neighbors(self, statistics: NeighborStatistics) -> DescriptorConfig:
        """Return the section with the number of neighbors chosen from data, if it has none."""

    def with_neighbors_of(self, saved: DescriptorConfig) -> DescriptorConfig:
        """Return the section with the number of neighbors of ``saved``, if it has none."""

    def findings(self, type_map: Sequence[str]) -> Findings:
        """Yield findings about the options together; each value is right in itself.

        All are yielded: errors of options that contradict each other or the elements, warnings, and
        ``unused`` for options without effect beside others, which the caller drops where the input
        does not give the option. Places are as seen from the section.
        """

    def summary(self) -> str:
        """Return the type and the main options as text, for one line."""

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero, ``name = true``.

        Empty if they are zero.
        """


# Abilities that a section may have beside the protocol; callers ask with isinstance().


@runtime_checkable
class HasInnerNeighbors(Protocol):
    """A section ``model.descriptor`` with further, shorter lists of neighbors inside ``cutoff``."""

    def inner_neighbors(self) -> Iterator[tuple[str, float, int]]:
        """Yield option, cutoff (angstrom) and most neighbors of each list that has a number."""


@runtime_checkable
class HasBridging(Protocol):
    """A section ``model.descriptor`` of a descriptor for models with a ``bridging_method``.

    The model gives the descriptor vectors with clamped lengths. A descriptor that passes messages
    multiplies those of an atom by ``deepmd_ema.model.bridging.source_gate``.
    """

    def bridged(self, window: Window) -> DescriptorConfig:
        """Return the section with the window, which is no option, for the module built from it."""


@runtime_checkable
class HasMixedPrecision(Protocol):
    """A section ``model.descriptor`` whose descriptor may multiply in bfloat16 on a GPU."""

    @property
    def use_amp(self) -> bool:
        """Return whether it does in training."""


# Records are named, not imported: their folders import this module.
_FAMILIES = "deepmd_ema.model.families"
DESCRIPTORS = Registry(
    {
        "se_e2_a": f"{_FAMILIES}.se_e2_a:FAMILY",
        "se_e2_r": f"{_FAMILIES}.se_e2_r:FAMILY",
        "se_atten": f"{_FAMILIES}.se_atten:SE_ATTEN",
        "se_atten_v2": f"{_FAMILIES}.se_atten:SE_ATTEN_V2",
        "se_e3": f"{_FAMILIES}.se_e3:FAMILY",
        "se_e3_tebd": f"{_FAMILIES}.se_e3_tebd:FAMILY",
        "dpa2": f"{_FAMILIES}.dpa2:FAMILY",
        "dpa3": f"{_FAMILIES}.dpa3:FAMILY",
        "dpa4": f"{_FAMILIES}.dpa4:FAMILY",
        "dpa4c": f"{_FAMILIES}.dpa4c:FAMILY",
        "hybrid": f"{_FAMILIES}.hybrid:FAMILY",
    },
    group="deepmd_ema.descriptors",
    protocol=DescriptorConfig,
)
