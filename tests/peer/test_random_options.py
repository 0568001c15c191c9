"""Random options of every descriptor are known here."""

from __future__ import annotations

import numpy as np
import pytest
import random_options

from deepmd_ema.config import model_config_from_dict

TABLE = [[0.3 + 0.1 * k, *[1.0 - k / 34] * 6] for k in range(35)]


@pytest.mark.parametrize("kind", random_options.KINDS)
def test_options_drawn_at_random_are_known_here(kind):
    rng = np.random.default_rng(1)
    for _ in range(5):
        section, _ = random_options.draw_set(kind, rng, TABLE)
        assert model_config_from_dict(section).type_map == section["type_map"]
