"""The section of the descriptor fake."""

from dataclasses import dataclass, replace
from typing import ClassVar

from deepmd_ema.config.fields import option, positive, positive_int
from deepmd_ema.config.schema.bridging import Window
from deepmd_ema.findings import error


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """Messages of neighbors, twice."""

    type: ClassVar[str] = "fake"
    aliases: ClassVar[tuple[str, ...]] = ("make_believe",)
    neighbors_option: ClassVar[str] = "most"
    has_type_embedding: ClassVar[bool] = False

    rcut: float = option(4.0, unit="angstrom", check=positive, doc="Cutoff radius.")
    width: int = option(8, check=positive_int, doc="Features of an atom.")
    most: int | None = option(
        None, check=positive_int, doc="Most neighbors; null counts them in the data."
    )
    precision: str = option(
        "default",
        choices=("default", "float64", "float32"),
        doc="Precision of the parameters.",
    )
    window: Window | None = None

    @property
    def cutoff(self):
        return self.rcut

    @property
    def neighbors(self):
        return None if self.most is None else (self.most,)

    def with_neighbors(self, found):
        return (
            self if self.most is not None else replace(self, most=found.max_total + 2)
        )

    def with_neighbors_of(self, saved):
        return (
            replace(self, most=saved.most)
            if isinstance(saved, FakeConfig) and self.most is None
            else self
        )

    def bridged(self, window):
        return replace(self, window=window)

    def findings(self, type_map):
        if self.width < len(type_map):
            expected = f"at least {len(type_map)}, one for each element"
            yield error("width", f" = {self.width}: expected {expected}.")

    def summary(self):
        return f"fake, rcut {self.rcut:g} angstrom, most {self.most or 'auto'}, width {self.width}"

    vacuum_needs = ""
