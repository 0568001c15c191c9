"""Loss, clipping and errors never read a number from the device: they run on tensors that hold no numbers."""

import numpy as np
import pytest
import torch
from flat_batches import flat_batch, predicted, random_frame
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.config.labels import QUANTITIES
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.model.metrics import Errors
from deepmd_ema.optim.build import clip_gradients
from deepmd_ema.training.loss import EnergyLoss

PREFS = {"start_pref_v": 1, "limit_pref_v": 1, "start_pref_ae": 1, "limit_pref_ae": 1}
MAX_OPERATIONS = 40  # of energies, forces and virials with their gradients: each is a kernel on a GPU
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


def test_reading_a_number_would_be_noticed(numberless):
    mode, batch, _ = numberless
    with mode, pytest.raises(DataDependentOutputException):
        batch.num_atoms.sum().item()


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


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function._schema.returns
        self.number += not any(r.alias_info is not None and not r.alias_info.is_write for r in returned)
        return function(*args, **(kwargs or {}))


def test_the_loss_takes_few_operations():
    rng = np.random.default_rng(0)
    frames = [random_frame(rng, 4, np.eye(3)), random_frame(rng, 2)]
    batch = flat_batch(frames)
    guess = {name: value.requires_grad_() for name, value in predicted(frames, batch).items()}
    loss = EnergyLoss(EnerLossConfig(start_pref_v=1), 1e-3, World())
    with Operations() as counted:
        loss(guess, batch, 1e-4)[0].backward()
    assert 20 < counted.number <= MAX_OPERATIONS


def test_errors_add_up_without_waiting(numberless):
    mode, batch, guess = numberless
    with mode:
        errors = Errors()
        errors.add(guess, batch)
        errors.add(guess, batch)
    assert errors.sums.shape == (len(QUANTITIES) + 1, 3)


def test_clipping_does_not_wait():
    with FakeTensorMode():
        weight = nn.Parameter(torch.zeros(3))
        weight.grad = torch.ones(3)
        assert clip_gradients([weight], 1.0).shape == ()
