"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import option as option
from deepmd_ema.config.rules import as_launched as as_launched
from deepmd_ema.config.rules import config_warnings as config_warnings
from deepmd_ema.config.rules import ignored_options as ignored_options
from deepmd_ema.config.schema.averaging import CustomAverage as CustomAverage
from deepmd_ema.config.schema.loggers import LoggedRun as LoggedRun
from deepmd_ema.config.schema.loggers import Logger as Logger
from deepmd_ema.config.schema.model import ModelConfig as ModelConfig
from deepmd_ema.config.schema.run import RunConfig as RunConfig
from deepmd_ema.config.schema.run import TaskConfig as TaskConfig
from deepmd_ema.config.schema.run import choose_head as choose_head
from deepmd_ema.config.schema.run import to_dict as to_dict
from deepmd_ema.config.summary import config_summary as config_summary
from deepmd_ema.config.summary import rows_of_tasks as rows_of_tasks
from deepmd_ema.utils import Check as Check
from deepmd_ema.utils import positive as positive
from deepmd_ema.utils import positive_int as positive_int

if TYPE_CHECKING:
    from deepmd_ema.config.argcheck import gen_args as gen_args
    from deepmd_ema.config.argcheck import run_arguments as run_arguments
    from deepmd_ema.config.load import InputFile as InputFile
    from deepmd_ema.config.load import config_from_dict as config_from_dict
    from deepmd_ema.config.load import load_config as load_config
    from deepmd_ema.config.load import model_config_from_dict as model_config_from_dict
    from deepmd_ema.config.load import read_input as read_input
    from deepmd_ema.config.load import saved_config as saved_config
    from deepmd_ema.config.load import saved_models as saved_models

# names of the modules that import dargs, which averages in the trainers of others do not need
_LATER = {
    "argcheck": "gen_args run_arguments",
    "load": "InputFile config_from_dict load_config model_config_from_dict read_input saved_config saved_models",
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _LATER.items() if name in names.split()), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
