"""Loss, clipping and errors never read a number from the device: they run on tensors that hold no numbers."""

import numpy as np
import pytest
from flat_batches import flat_batch, predicted, random_frame
from torch._subclasses.fake_tensor import FakeTensorMode

from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.training.loss import EnergyLoss

PREFS = {"start_pref_v": 1, "limit_pref_v": 1, "start_pref_ae": 1, "limit_pref_ae": 1}
PREF_PF = {"start_pref_pf": 1, "limit_pref_pf": 1, "use_default_pf": True}


@pytest.fixture
def numberless():
    """A mode, a batch and a prediction without numbers: reading one raises."""
    rng = np.random.default_rng(0)
    frames = [random_frame(rng, 4, np.eye(3)), random_frame(rng, 2, names=("energy",))]
    batch = flat_batch(frames)
    mode = FakeTensorMode()
    guess = {name: mode.from_tensor(value.requires_grad_()) for name, value in predicted(frames, batch).items()}
    return mode, batch._map(mode.from_tensor), guess


@pytest.mark.parametrize(
    "options",
    [PREF_PF, {"use_huber": True}, {"loss_func": "mae", "f_use_norm": True} | PREF_PF, {"relative_f": 0.1} | PREF_PF],
)
def test_the_loss_and_its_gradient_do_not_wait(numberless, options):
    mode, batch, guess = numberless
    with mode:
        total, shown = EnergyLoss(EnerLossConfig(**PREFS, **options), 1e-3, World())(guess, batch, 1e-4)
        total.backward()
    assert total.shape == ()
    assert all(value.shape == () for value in shown.values())
