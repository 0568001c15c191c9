"""Models in the files of other programs, written from ours and read into them."""

from deepmd_ema.interchange.deepmd_pt import heads_of, is_deepmd_checkpoint, read_deepmd_pt
from deepmd_ema.interchange.dp.model import EXTRA, read_dp, rewrite_bias, write_dp

__all__ = ["EXTRA", "heads_of", "is_deepmd_checkpoint", "read_deepmd_pt", "read_dp", "rewrite_bias", "write_dp"]
