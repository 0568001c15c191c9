"""Names of the sets of weights that a run has, and what an average of them may be set to."""

from __future__ import annotations

import math

LIVE = "live"  # the weights that are trained; no average may have this name
POSTHOC = "posthoc"  # the average that `dp-ema posthoc` makes

DEVICES = (LIVE, "cpu")
DTYPES = ("float32", "float64")
LAYOUTS = ("local_shard", "full_tensor")
BUFFERS = ("copy", "average")

# width of equal weights over the run, the widest of a power average (EDM2, arXiv:2312.02696, section 3.1)
WIDEST_SIGMA_REL = 1 / math.sqrt(12)
