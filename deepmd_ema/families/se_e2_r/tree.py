"""The tree of the descriptor se_e2_r."""

from __future__ import annotations

from typing import ClassVar

from deepmd_ema.families.se_e2_a.tree import SeE2ATree


class SeE2RTree(SeE2ATree):
    """Tree of se_e2_r, in which DeePMD-kit calls it se_r; but for the shape of the statistics it is that of se_e2_a."""

    type: ClassVar[str] = "se_r"
