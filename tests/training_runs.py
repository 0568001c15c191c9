"""Options of short runs, a run that stops itself, and checkpoints that are read."""

import signal

import torch
from helpers import validated

from deepmd_ema.training.trainer import Callback

OPTIONS = WITH_AVERAGES = validated(4)


class StopAfter(Callback):
    """Requests the run to stop, as SIGTERM does, while it takes a step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, trainer):
        if trainer.step == self.step:
            trainer.stop.request(signal.SIGTERM)


def load(path):
    return torch.load(path, weights_only=True)
