"""The request for a training run. Nothing here loads torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepmd_ema.config import InputFile, read_input
from deepmd_ema.errors import ConfigError, UserError

DEFAULT_INPUT = "input.json"


@dataclass(frozen=True)
class TrainRequest:
    """A request to train: the input, and how the run starts.

    At most one of the three start files is given.

    Attributes:
        input_file: JSON or YAML, or the values of one. None: the config of the checkpoint that is
            restarted, otherwise ``input.json`` of this folder.
        restart: checkpoint to continue exactly.
        init_model: file whose weights, live or averaged, a new run starts from.
        finetune: file whose weights a new run on other data, perhaps of other elements, starts
            from.
        model_branch: name of a model in a file that holds several; ``RANDOM`` is a fresh fitting
            network for fine-tuning.
        use_pretrain_script: whether the section ``model`` is taken from the start file.
        output: file to which the normalized config is written.
        device: ``cpu``, ``cuda`` or ``cuda:1``; chosen automatically if None.
        skip_neighbor_stat: whether ``sel: auto`` is refused; the data are checked all the same.
        allow_config_change: whether a restart with a changed config is allowed.
        max_time: seconds after which the run is saved and ends, data and start included.
    """

    input_file: str | Mapping[str, Any] | None = None
    restart: str | None = None
    init_model: str | None = None
    finetune: str | None = None
    model_branch: str | None = None
    use_pretrain_script: bool = False
    output: str = "out.json"
    device: str | None = None
    skip_neighbor_stat: bool = False
    allow_config_change: bool = False
    max_time: float = math.inf

    @property
    def takes_saved_config(self) -> bool:
        """Whether the run continues with the config of its checkpoint: no input is given."""
        return self.input_file is None and self.restart is not None

    @cached_property
    def input(self) -> InputFile:
        """The input file, parsed once.

        Raises:
            ConfigError: if it cannot be read.
        """
        if isinstance(self.input_file, Mapping):
            return InputFile("input", self.input_file, {})
        file = self.file or DEFAULT_INPUT
        if self.input_file is None and not Path(file).exists():
            raise ConfigError(
                f"no input is given, and this folder has no {DEFAULT_INPUT}. Name the file: "
                "`dp-ema train INPUT`. `dp-ema init DATA -o input.json` writes one for your data."
            )
        return read_input(file)

    @property
    def file(self) -> str | None:
        """The file of the input; None where values were given, or those of the checkpoint count."""
        if isinstance(self.input_file, Mapping) or self.takes_saved_config:
            return None
        return self.input_file or DEFAULT_INPUT

    def heads(self) -> dict[str, str | None]:
        """Return by task the name of a model in the start file, from the command line or the input.

        Raises:
            UserError: if both name one, or no model can be chosen.
        """
        branch = self.model_branch
        # a restart continues all models of its checkpoint, and there is nothing to choose
        has_choice = self.restart is None and (self.init_model or self.finetune)
        if branch is not None and not has_choice:
            raise UserError(
                "--model-branch: chooses a model of the file of --finetune or --init-model. Leave "
                "it out."
            )
        if not (
            self.init_model or self.finetune
        ):  # no file whose models could be chosen
            return {}
        # by task; the only task of an input without `model_dict` has the empty name
        heads = self.input.heads
        if branch is None:
            return heads
        if set(heads) != {""}:
            raise UserError(
                f"--model-branch {branch}: {self.input.path} has several tasks. Name the model "
                "that each starts from, as finetune_head in its section of model.model_dict."
            )
        head = heads[""]
        if head is not None and branch != head:
            raise UserError(
                f'--model-branch {branch}: {self.input.path} has model.finetune_head = "{head}". '
                "Expected one head: remove one of the two."
            )
        return {"": branch}
