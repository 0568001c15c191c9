"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from deepmd_ema.config.argcheck import run_arguments
from deepmd_ema.config.load import (
    InputFile,
    config_from_dict,
    load_config,
    model_config_from_dict,
    model_configs,
    read_input,
    saved_config,
    saved_models,
)
from deepmd_ema.config.remarks import config_summary, config_warnings, ignored_options, rows_of_tasks
from deepmd_ema.config.rules import as_launched, launch_problems
from deepmd_ema.config.schema.model import ModelConfig
from deepmd_ema.config.schema.run import RunConfig, TaskConfig, choose_head, to_dict

__all__ = [
    "InputFile",
    "ModelConfig",
    "RunConfig",
    "TaskConfig",
    "as_launched",
    "choose_head",
    "config_from_dict",
    "config_summary",
    "config_warnings",
    "ignored_options",
    "launch_problems",
    "load_config",
    "model_config_from_dict",
    "model_configs",
    "read_input",
    "rows_of_tasks",
    "run_arguments",
    "saved_config",
    "saved_models",
    "to_dict",
]
