"""Input of a run, read from a file or dictionary and checked, with all mistakes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dargs.dargs import ArgumentError

from deepmd_ema.config.argcheck import (
    Field,
    find_mistakes,
    run_arguments,
    take_options,
    to_section,
)
from deepmd_ema.config.messages import (
    Place,
    Reading,
    Values,
    in_order,
    is_comment,
    section_at,
)
from deepmd_ema.config.rules import findings_of
from deepmd_ema.config.schema.averaging import AVERAGES
from deepmd_ema.config.schema.model import Link, ModelConfig
from deepmd_ema.config.schema.run import RunConfig, to_dict
from deepmd_ema.config.text import read_config_file
from deepmd_ema.config.unsupported import without_removed
from deepmd_ema.config.upgrade import has_tasks, upgrade
from deepmd_ema.errors import ConfigError
from deepmd_ema.findings import ERROR, Finding, error, inside, with_severity

# options that inputs of DeePMD-kit 0.x have at the top
_OF_VERSION_0 = frozenset(
    {
        "sel_a",
        "filter_neuron",
        "n_neuron",
        "use_smooth",
        "rcut",
        "systems",
        "stop_batch",
    }
)
_NO_SECTIONS = (
    "an input of DeePMD-kit 0.x, with all options at the top. Expected the sections model, "
    "learning_rate, loss and training. `dp-ema init DATA` writes an input for your data."
)


@dataclass(frozen=True)
class InputFile:
    """A parsed input file, which is checked when ``config`` is read for the first time.

    Attributes:
        path: the file, or another name for messages.
        values: its content, right or wrong.
        lines: lines of the keys.
    """

    path: str
    values: Any
    lines: Mapping[Place, int]

    @cached_property
    def config(self) -> RunConfig:
        """The run that the file describes.

        Raises:
            ConfigError: with every mistake of the file, each with its line.
        """
        config, mistakes = self._judged
        ConfigError.raise_if_any(mistakes)
        assert config is not None, "without mistakes all of it can be read"
        return config

    @property
    def mistakes(self) -> list[Finding]:
        """Every mistake of the file, in its order."""
        return self._judged[1]

    @property
    def readable(self) -> RunConfig | None:
        """The run with defaults in place of wrong options, to check its data.

        None if a required option is wrong.
        """
        return self._judged[0]

    @cached_property
    def _judged(self) -> tuple[RunConfig | None, list[Finding]]:
        names = set(self.values) if isinstance(self.values, Mapping) else set()
        # three, because one or two of these names at the top may be misplaced options of today
        if "model" not in names and len(names & _OF_VERSION_0) > 2:
            return None, [error("", f"{self.path}: {_NO_SECTIONS}")]
        reading, links = upgrade(self.path, self.values, self.lines)
        root = run_arguments(reading.has_tasks)
        values = _accepted(root, reading)
        if values is None:
            return None, in_order(reading.mistakes)
        config: RunConfig = to_section(
            root,
            values,
            source=reading.source,
            notes=tuple(reading.notes),
            unused=tuple(reading.unused),
            links=links,
        )
        # no rules beside mistakes: they would judge defaults in place of wrong options
        return config, in_order(
            reading.mistakes or with_severity(ERROR, findings_of(config))
        )

    @cached_property
    def heads(self) -> dict[str, str | None]:
        """``finetune_head`` of each task, before anything is checked; None where there is none.

        The only task of an input of one is called ``""``.
        """
        model = section_at(self.values, "model")
        models = (
            section_at(model, "model_dict") if has_tasks(self.values) else {"": model}
        )
        # keys beside model_dict hold for every model that does not have them itself
        heads: dict[str, str | None] = {}
        for task, section in models.items():
            if is_comment(task):
                continue
            options = {**model, **section} if isinstance(section, Mapping) else {}
            head = options.get("finetune_head")
            heads[str(task)] = head if isinstance(head, str) and head else None
        return heads

    def with_model(self, section: Callable[[Any], Any]) -> InputFile:
        """Return the input with another section ``model``, which ``section`` makes of its own."""
        if not isinstance(self.values, Mapping):
            return self
        return replace(
            self, values={**self.values, "model": section(self.values.get("model"))}
        )


def read_input(path: str | Path) -> InputFile:
    """Parse a ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ConfigError: if it cannot be read.
    """
    return InputFile(str(path), *read_config_file(Path(path)))


def load_config(path: str | Path) -> RunConfig:
    """Return the run that a ``.json``, ``.yaml`` or ``.yml`` file describes.

    Raises:
        ConfigError: with every mistake of the file, each with its line.
    """
    return read_input(path).config


def config_from_dict(values: Mapping[str, Any], source: str = "<dict>") -> RunConfig:
    """Return the run that a dictionary describes, for example the config of a checkpoint.

    Raises:
        ConfigError: with every mistake of the dictionary.
    """
    return InputFile(source, values, {}).config


def saved_config(
    values: Mapping[str, Any], source: str = "<dict>", whole: bool = False
) -> RunConfig:
    """Return the run that the config of a checkpoint describes, with removed values replaced.

    Unless the ``whole`` config is requested, it has no loggers, and no average of a type whose
    package is not installed: the weights in the file can be used without.

    Raises:
        ConfigError: with every mistake of the config.
    """
    values, notes = without_removed(values)
    training = values.get("training")
    if isinstance(training, Mapping):
        training = {
            name: value
            for name, value in training.items()
            if whole or name != "loggers"
        }
        if isinstance(averages := training.get("averaging"), list):
            # A checkpoint holds whole averages, however the ranks held them: one of the removed
            # layout rank_range can be read as one of today.
            sections = [
                {**a, "layout": "local_shard"} if a.get("layout") == "rank_range" else a
                for a in averages
            ]
            training["averaging"] = [
                a for a in sections if whole or a.get("type", "ema") in AVERAGES
            ]
        values = {**values, "training": training}
    config = config_from_dict(values, source)
    return replace(config, notes=(*config.notes, *notes))


def model_config_from_dict(
    values: Mapping[str, Any], source: str = "<dict>"
) -> ModelConfig:
    """Return the section ``model`` that a dictionary describes.

    Raises:
        ConfigError: with every mistake of the section.
    """
    reading, _ = upgrade(source, {"model": values}, {})
    root = Field("", dict, sub_fields=[run_arguments().sub_fields["model"]])
    accepted = _accepted(root, reading)
    ConfigError.raise_if_any(in_order(reading.mistakes))
    assert accepted is not None, "without mistakes all of it can be read"
    model: ModelConfig = to_section(root.sub_fields["model"], accepted["model"])
    mistakes = with_severity(ERROR, inside("model", model.findings()))
    ConfigError.raise_if_any(in_order(map(reading.source.locate, mistakes)))
    return model


def _accepted(root: Field, reading: Reading) -> Values | None:
    """Return the values of an input with all defaults as dargs accepts them.

    Mistakes are added to ``reading``. Wrong options then have their defaults; the result is None if
    an option without a default is wrong or missing.
    """
    take_options(root, reading)
    # The second pass is without the keys that find_mistakes has refused in the first. It fails
    # where a required key is missing; a third one could not do better.
    for is_repaired in (False, True):
        try:
            values: Values = root.normalize_value(reading.values)
            root.check_value(values, strict=True)
            return values
        except ArgumentError as refusal:
            if is_repaired:
                break
            find_mistakes(root, reading)
            # There is none where the check of an option does not judge a value twice in the same
            # way, such as one that reads a file. The refusal of dargs must not be lost.
            if not reading.mistakes:
                reading.refuse(tuple(refusal.path.split("/")), f": {refusal.message}")
        for section, key in reading.wrong:
            section.pop(key, None)
    return None


@dataclass(frozen=True)
class SavedModels:
    """The models of a config, by name of the task.

    Attributes:
        configs: their sections ``model``.
        links: parts that they share.
        runs: for each, the config of a run that trains this model only, as plain values.
    """

    configs: dict[str, ModelConfig]
    links: tuple[Link, ...]
    runs: dict[str, Values]


def saved_models(values: Mapping[str, Any], source: str = "<dict>") -> SavedModels:
    """Return the models of a config of a whole run, or of one that has the section ``model`` only.

    The latter names no shared parts: several models without a run are each a model of their own.

    Raises:
        ConfigError: with every mistake of the config.
    """
    if not has_tasks(values):
        return SavedModels(
            {"": model_config_from_dict(values["model"], source)},
            (),
            {"": dict(values)},
        )
    if "training" not in values:
        sections = values["model"]["model_dict"]
        configs = {
            name: model_config_from_dict(section, source)
            for name, section in sections.items()
        }
        runs = {name: {"model": section} for name, section in sections.items()}
        return SavedModels(configs, (), runs)
    run = saved_config(values, source)
    configs = {name: task.model for name, task in run.tasks.items()}
    runs = {name: to_dict(run.of_task(task)) for name, task in run.tasks.items()}
    return SavedModels(configs, run.links, runs)
