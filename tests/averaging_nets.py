"""A small network, the ways it moves, and what the tests of averages compare."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile

PLAIN = EmaProfile("ema", 0.9, warmup=False)
WARM = EmaProfile("ema", 0.99)
POWER = PowerProfile.from_sigma_rel("ema", 0.1)
SWA = SwaProfile("ema")


class Net(nn.Module):
    """Two layers, a floating buffer, an integer buffer, a temporary buffer."""

    def __init__(self, width=5, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(3, width, dtype=dtype)
        self.second = nn.Linear(width, 1, dtype=dtype)
        self.register_buffer("mean", torch.ones(3, dtype=dtype))
        self.register_buffer("atomic_number", torch.tensor([1, 8]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def make_net(**how):
    """Return the same network every time."""
    torch.manual_seed(0)
    return Net(**how)


def move(module, seed):
    """Change every trained parameter as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
                parameter.add_(0.1 * noise.to(parameter.dtype))


def train(module, bank, steps):
    """Move the module and update its bank for each number in ``steps``."""
    for step in steps:
        move(module, step)
        bank.update()


def copies(module):
    """Return the state dict, copied."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(left, right):
    """Two dictionaries of tensors agree to the bit."""
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


class Steps(nn.Module):
    """Its only parameter is, after step k, the unit vector k: an average of it is the list of its
    own weights.
    """

    def __init__(self, num_steps):
        super().__init__()
        self.unit = nn.Parameter(torch.zeros(num_steps + 1, dtype=torch.float64))
        self.stand_at(0)

    def stand_at(self, step):
        with torch.no_grad():
            self.unit.zero_()[step] = 1


def weights_of_steps(profile, num_steps, skipped=()):
    """Return the weight of each step in the average after ``num_steps`` steps (num_steps + 1), and
    the bank's facts.
    """
    net = Steps(num_steps)
    bank = AverageBank(net, [profile])
    for step in range(1, num_steps + 1):
        net.stand_at(step)
        bank.update(torch.tensor(float(step not in skipped)))
    return bank.weights(profile.name)["unit"], bank.info(profile.name)


@contextmanager
def on_device():
    """Inside, the fate of a step is known to the device only, as on a GPU."""
    with mock.patch.object(
        AverageBank,
        "update",
        lambda bank, ok=None, epoch=None: bank.apply(bank.begin(epoch), ok),
    ):
        yield


@contextmanager
def through_staging():
    """Inside, averages that are made get their weights through staged copies, as those of a GPU in
    host memory do.
    """
    with mock.patch("deepmd_ema.averaging.average.needs_staging", return_value=True):
        yield


class EveryOther:
    """A hook that takes the steps of one parity, from an epoch on."""

    def __init__(self, parity, from_epoch):
        self.parity, self.from_epoch = parity, from_epoch

    def __call__(self, step, epoch):
        return step % 2 == self.parity and epoch >= self.from_epoch


class Recorded(TorchDispatchMode):
    """Remembers the operations that reach the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))
