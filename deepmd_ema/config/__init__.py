"""The input of a run: sections, checks and messages. Nothing here loads torch."""

from __future__ import annotations

from deepmd_ema.config.fields import option as option
from deepmd_ema.config.load import InputFile as InputFile
from deepmd_ema.config.load import config_from_dict as config_from_dict
from deepmd_ema.config.load import load_config as load_config
from deepmd_ema.config.load import model_config_from_dict as model_config_from_dict
from deepmd_ema.config.load import read_input as read_input
from deepmd_ema.config.load import saved_config as saved_config
from deepmd_ema.config.load import saved_models as saved_models
from deepmd_ema.config.manual import run_arguments as run_arguments
from deepmd_ema.config.remarks import config_summary as config_summary
from deepmd_ema.config.remarks import config_warnings as config_warnings
from deepmd_ema.config.remarks import ignored_options as ignored_options
from deepmd_ema.config.remarks import rows_of_tasks as rows_of_tasks
from deepmd_ema.config.rules import as_launched as as_launched
from deepmd_ema.config.schema.averaging import CustomAverage as CustomAverage
from deepmd_ema.config.schema.loggers import LoggedRun as LoggedRun
from deepmd_ema.config.schema.loggers import Logger as Logger
from deepmd_ema.config.schema.model import ModelConfig as ModelConfig
from deepmd_ema.config.schema.run import RunConfig as RunConfig
from deepmd_ema.config.schema.run import TaskConfig as TaskConfig
from deepmd_ema.config.schema.run import choose_head as choose_head
from deepmd_ema.config.schema.run import to_dict as to_dict
from deepmd_ema.utils import Check as Check
from deepmd_ema.utils import positive as positive
from deepmd_ema.utils import positive_int as positive_int
