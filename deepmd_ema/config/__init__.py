"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import option
from deepmd_ema.config.rules import as_launched, config_warnings, ignored_options
from deepmd_ema.config.schema.averaging import CustomAverage
from deepmd_ema.config.schema.loggers import LoggedRun, Logger
from deepmd_ema.config.schema.model import ModelConfig
from deepmd_ema.config.schema.run import RunConfig, TaskConfig, choose_head, to_dict
from deepmd_ema.config.summary import config_summary, rows_of_tasks
from deepmd_ema.utils import Check, positive, positive_int

if TYPE_CHECKING:
    from deepmd_ema.config.argcheck import gen_args, run_arguments
    from deepmd_ema.config.load import (
        InputFile,
        config_from_dict,
        load_config,
        model_config_from_dict,
        read_input,
        saved_config,
        saved_models,
    )

__all__ = [
    "Check",
    "CustomAverage",
    "InputFile",
    "LoggedRun",
    "Logger",
    "ModelConfig",
    "RunConfig",
    "TaskConfig",
    "as_launched",
    "choose_head",
    "config_from_dict",
    "config_summary",
    "config_warnings",
    "gen_args",
    "ignored_options",
    "load_config",
    "model_config_from_dict",
    "option",
    "positive",
    "positive_int",
    "read_input",
    "rows_of_tasks",
    "run_arguments",
    "saved_config",
    "saved_models",
    "to_dict",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # these two modules import dargs and all sections: averages that are used in the trainers of
    # others need neither, and `import deepmd_ema.config` stays fast
    module = "argcheck" if name in ("gen_args", "run_arguments") else "load"
    return getattr(import_module(f"{__name__}.{module}"), name)
