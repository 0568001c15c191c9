"""Models in the files of other programs, written from ours and read into them."""

from deepmd_ema.interchange.deepmd_pt import heads_of, is_deepmd_checkpoint, read_deepmd_pt
from deepmd_ema.interchange.dp.model import EXTRA, file_tree, read_dp, rewrite_bias, write_dp
from deepmd_ema.interchange.pt2 import load_compiled, write_pt2

__all__ = [
    "EXTRA",
    "file_tree",
    "heads_of",
    "is_deepmd_checkpoint",
    "load_compiled",
    "read_deepmd_pt",
    "read_dp",
    "rewrite_bias",
    "write_dp",
    "write_pt2",
]
