"""Models in the files of other programs, written from ours and read into them; compiled files are in ``pt2``."""

from deepmd_ema.interchange.deepmd_pt import heads_of, is_deepmd_checkpoint, read_deepmd_pt
from deepmd_ema.interchange.dp.model import EXTRA, file_tree, read_dp, rewrite_bias, write_dp

__all__ = [
    "EXTRA",
    "file_tree",
    "heads_of",
    "is_deepmd_checkpoint",
    "read_deepmd_pt",
    "read_dp",
    "rewrite_bias",
    "write_dp",
]
