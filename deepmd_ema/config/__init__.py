"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from deepmd_ema.config.argcheck import run_arguments
from deepmd_ema.config.descriptor import DESCRIPTORS, DescriptorConfig, SeE2AConfig
from deepmd_ema.config.load import config_from_dict, load_config, model_config_from_dict
from deepmd_ema.config.notices import config_summary, config_warnings, ignored_options
from deepmd_ema.config.rules import launch_problems
from deepmd_ema.config.schema.averaging import AverageConfig, EmaAverageConfig, PowerAverageConfig, SwaAverageConfig
from deepmd_ema.config.schema.model import EnerFittingConfig, ModelConfig
from deepmd_ema.config.schema.optim import (
    AdamConfig,
    AdaMuonConfig,
    AdamWConfig,
    CosineScheduleConfig,
    EnerLossConfig,
    ExpScheduleConfig,
    HybridMuonConfig,
    LKFConfig,
    WsdScheduleConfig,
)
from deepmd_ema.config.schema.run import RunConfig, TaskConfig, to_dict
from deepmd_ema.config.schema.training import TrainingConfig, TrainingDataConfig, ValidatingConfig, ValidationDataConfig

__all__ = [
    "DESCRIPTORS",
    "AdaMuonConfig",
    "AdamConfig",
    "AdamWConfig",
    "AverageConfig",
    "CosineScheduleConfig",
    "DescriptorConfig",
    "EmaAverageConfig",
    "EnerFittingConfig",
    "EnerLossConfig",
    "ExpScheduleConfig",
    "HybridMuonConfig",
    "LKFConfig",
    "ModelConfig",
    "PowerAverageConfig",
    "RunConfig",
    "SeE2AConfig",
    "SwaAverageConfig",
    "TaskConfig",
    "TrainingConfig",
    "TrainingDataConfig",
    "ValidatingConfig",
    "ValidationDataConfig",
    "WsdScheduleConfig",
    "config_from_dict",
    "config_summary",
    "config_warnings",
    "ignored_options",
    "launch_problems",
    "load_config",
    "model_config_from_dict",
    "run_arguments",
    "to_dict",
]
