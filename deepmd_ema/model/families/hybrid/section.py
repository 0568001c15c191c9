"""The section of the descriptor hybrid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from deepmd_ema.config.fields import option
from deepmd_ema.config.schema.descriptor import (
    DESCRIPTORS,
    DescriptorConfig,
    HasInnerNeighbors,
)
from deepmd_ema.findings import Finding, error, inside

if TYPE_CHECKING:
    from deepmd_ema.geometry import NeighborStatistics

# named here, because in the class `list` is the option
_Parts = list[DescriptorConfig]


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """Several descriptors side by side, whose features are concatenated."""

    type: ClassVar[str] = "hybrid"
    # class attributes that every section of a descriptor has
    aliases: ClassVar[tuple[str, ...]] = ()
    neighbors_option: ClassVar[str] = "sel"
    has_type_embedding: ClassVar[bool] = False

    list: _Parts = option(
        registry=DESCRIPTORS,
        left_out=("hybrid",),
        doc="The sections of the descriptors, each like a section `model.descriptor` of its type. "
        "They share one list of neighbors, which ends at the largest cutoff and holds the "
        "largest `sel` of them. `sel` = `auto` of a part that counts by element and has a "
        "shorter cutoff than another part is an upper bound.",
    )

    @property
    def has_equivariants(self) -> bool:
        """Return whether all parts have frames of atoms."""
        return all(getattr(part, "has_equivariants", False) for part in self.list)

    def part(self, number: int) -> str:
        """Return the place of a part in the section."""
        return f"list[{number}]"

    @property
    def precision(self) -> str:
        """Return the higher precision of the parts."""
        return (
            "float32"
            if all(part.precision == "float32" for part in self.list)
            else "float64"
        )

    @property
    def cutoff(self) -> float:
        """Return the largest cutoff of the parts."""
        return max(part.cutoff for part in self.list)

    @property
    def neighbors(self) -> tuple[int, ...] | None:
        """Return the largest numbers of the parts, or None while one is ``auto``.

        They are per element if all parts count so.
        """
        numbers = [part.neighbors for part in self.list if part.neighbors is not None]
        if len(numbers) < len(self.list):
            return None
        # one number for each element in all parts, or one number for all elements in all parts
        if len({len(n) for n in numbers}) == 1:
            return tuple(max(n) for n in zip(*numbers))
        return (max(sum(n) for n in numbers),)

    def with_neighbors(self, statistics: NeighborStatistics) -> HybridConfig:
        """Return the section with the numbers of neighbors of all parts."""
        # the numbers of a part by element may be upper bounds (see the option `list`)
        parts = [
            part.with_neighbors(statistics.within(part.cutoff)) for part in self.list
        ]
        return replace(self, list=parts)

    def with_neighbors_of(self, saved: DescriptorConfig) -> HybridConfig:
        """Return the section with the numbers of ``saved`` where a part leaves them to the data."""
        if not isinstance(saved, HybridConfig) or len(saved.list) != len(self.list):
            return self
        parts = [
            part.with_neighbors_of(other) for part, other in zip(self.list, saved.list)
        ]
        return replace(self, list=parts)

    def findings(self, type_map: Sequence[str]) -> Iterator[Finding]:
        """Yield findings of the parts, of which there must be one."""
        if not self.list:
            yield error("list", " = []: expected at least one descriptor.")
        for k, part in enumerate(self.list):
            yield from inside(f"list[{k}]", part.findings(type_map))

    def inner_neighbors(self) -> Iterator[tuple[str, float, int]]:
        """Yield the lists of parts that keep one for all elements, and shorter lists of parts."""
        for k, part in enumerate(self.list):
            # a part by element is no list of the nearest: its own numbers bound each element
            if part.neighbors is not None and len(part.neighbors) == 1:
                yield (
                    f"{self.part(k)}.{part.neighbors_option}",
                    part.cutoff,
                    part.neighbors[0],
                )
            # dpa2 and dpa3 read shorter lists beside their own
            if isinstance(part, HasInnerNeighbors):
                yield from (
                    (f"{self.part(k)}.{name}", rcut, most)
                    for name, rcut, most in part.inner_neighbors()
                )

    def summary(self) -> str:
        """Return the main options of the parts as text."""
        return f"{self.type} of " + "; ".join(part.summary() for part in self.list)

    @property
    def vacuum_needs(self) -> str:
        """Return the setting that makes the features of an isolated atom zero."""
        # every part must vanish, so that all settings are named at once
        needs = [(k, part.vacuum_needs) for k, part in enumerate(self.list)]
        return " and ".join(f"list[{k}].{text}" for k, text in needs if text)
