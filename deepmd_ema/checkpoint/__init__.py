"""Model files, single and sharded; the names that others use."""

from deepmd_ema.checkpoint.content import FORMAT as FORMAT
from deepmd_ema.checkpoint.content import choose_profile as choose_profile
from deepmd_ema.checkpoint.content import payload_head as payload_head
from deepmd_ema.checkpoint.content import refitted as refitted
from deepmd_ema.checkpoint.content import weights_in as weights_in
from deepmd_ema.checkpoint.file import DeepmdCheckpointError as DeepmdCheckpointError
from deepmd_ema.checkpoint.file import ensure_writable as ensure_writable
from deepmd_ema.checkpoint.file import is_sharded as is_sharded
from deepmd_ema.checkpoint.file import load as load
from deepmd_ema.checkpoint.file import load_facts as load_facts
from deepmd_ema.checkpoint.file import load_shards as load_shards
from deepmd_ema.checkpoint.file import refuse_to_replace as refuse_to_replace
from deepmd_ema.checkpoint.file import require_training as require_training
from deepmd_ema.checkpoint.file import resolve as resolve
from deepmd_ema.checkpoint.file import save as save
