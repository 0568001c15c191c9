"""The report of ``dp-ema check``: data, plan, cost and files of a run before it is started."""
