"""Names of the sets of weights that a run has."""

LIVE = "live"  # the weights that are trained; no average may have this name
POSTHOC = "posthoc"  # the average that `dp-ema posthoc` makes
