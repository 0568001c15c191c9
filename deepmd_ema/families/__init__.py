"""Kinds of descriptors and models, one folder each: section, module and tree."""

import deepmd_ema.config  # noqa: F401  (the registry there imports the sections)
