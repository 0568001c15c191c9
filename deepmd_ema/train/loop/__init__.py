"""The training loop and its parts."""

from deepmd_ema.train.loop.averages import Hook, build_bank
from deepmd_ema.train.loop.interpolation import InterpolationControl
from deepmd_ema.train.loop.refit_bias import refit
from deepmd_ema.train.loop.reporter import Reporter
from deepmd_ema.train.loop.saver import Saver, StateBuilder, build_store
from deepmd_ema.train.loop.sharding import parallelize
from deepmd_ema.train.loop.step import GradientStep, Step, context_of_products
from deepmd_ema.train.loop.task import TaskMixture
from deepmd_ema.train.loop.trainer import Callback, Trainer
from deepmd_ema.train.loop.validate import FullValidation, build_rows

__all__ = [
    "Callback",
    "FullValidation",
    "GradientStep",
    "Hook",
    "InterpolationControl",
    "Reporter",
    "Saver",
    "StateBuilder",
    "Step",
    "TaskMixture",
    "Trainer",
    "build_bank",
    "build_rows",
    "build_store",
    "context_of_products",
    "parallelize",
    "refit",
]
