"""The tree of the descriptor se_e2_r."""

from __future__ import annotations

from typing import ClassVar

from deepmd_ema.interop.parts import STATISTICS, Names
from deepmd_ema.interop.trees.se_e2_a import SeE2ATree
from deepmd_ema.model.families.se_e2_r.section import SeE2RConfig


class SeE2RTree(SeE2ATree):
    """Tree of se_e2_r, in which DeePMD-kit calls it se_r; but for the shape of the statistics it is that of se_e2_a."""

    type: ClassVar[str] = "se_r"
    modules: ClassVar[Names] = {"pt": STATISTICS, "pt_expt": ()}

    def not_in_pt(self, section: SeE2RConfig) -> str:
        """Return the feature of a section that DeePMD-kit's backend pt lacks, or an empty string."""
        return "" if section.type_one_side else "type_one_side = false of se_e2_r"
