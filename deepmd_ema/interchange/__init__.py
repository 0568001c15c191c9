"""Models in the files of other programs, written from ours and read into them; compiled files are in ``pt2``."""

from deepmd_ema.interchange.deepmd_pt import WrittenModel as WrittenModel
from deepmd_ema.interchange.deepmd_pt import heads_of as heads_of
from deepmd_ema.interchange.deepmd_pt import is_deepmd_checkpoint as is_deepmd_checkpoint
from deepmd_ema.interchange.deepmd_pt import read_deepmd_pt as read_deepmd_pt
from deepmd_ema.interchange.deepmd_pt import write_deepmd_pt as write_deepmd_pt
from deepmd_ema.interchange.dp.model import EXTRA as EXTRA
from deepmd_ema.interchange.dp.model import file_tree as file_tree
from deepmd_ema.interchange.dp.model import read_dp as read_dp
from deepmd_ema.interchange.dp.model import rewrite_bias as rewrite_bias
from deepmd_ema.interchange.dp.model import write_dp as write_dp
