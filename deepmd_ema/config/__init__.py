"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from deepmd_ema.config.averaging import Average, EmaAverage, PowerAverage, SwaAverage
from deepmd_ema.config.descriptor import DESCRIPTORS, DescriptorConfig, SeE2AConfig
from deepmd_ema.config.effects import config_summary, config_warnings, ignored_options
from deepmd_ema.config.load import config_from_dict, load_config, model_config_from_dict
from deepmd_ema.config.model import EnerFittingConfig, ModelConfig
from deepmd_ema.config.optim import (
    LKF,
    Adam,
    AdaMuon,
    AdamW,
    CosineSchedule,
    EnerLoss,
    ExpSchedule,
    HybridMuon,
    WsdSchedule,
)
from deepmd_ema.config.run import RunConfig, TaskConfig, to_dict
from deepmd_ema.config.training import Training, TrainingData, Validating, ValidationData

__all__ = [
    "DESCRIPTORS",
    "LKF",
    "AdaMuon",
    "Adam",
    "AdamW",
    "Average",
    "CosineSchedule",
    "DescriptorConfig",
    "EmaAverage",
    "EnerFittingConfig",
    "EnerLoss",
    "ExpSchedule",
    "HybridMuon",
    "ModelConfig",
    "PowerAverage",
    "RunConfig",
    "SeE2AConfig",
    "SwaAverage",
    "TaskConfig",
    "Training",
    "TrainingData",
    "Validating",
    "ValidationData",
    "WsdSchedule",
    "config_from_dict",
    "config_summary",
    "config_warnings",
    "ignored_options",
    "load_config",
    "model_config_from_dict",
    "to_dict",
]
