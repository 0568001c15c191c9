"""From a file or a dictionary to a checked, frozen ``RunConfig``, with all mistakes at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.average_rules import average_problems
from deepmd_ema.config.explain import Walk
from deepmd_ema.config.messages import Path as ConfigPath
from deepmd_ema.config.messages import render
from deepmd_ema.config.rules import launch_problems, rule_problems
from deepmd_ema.config.schema.run import RunConfig
from deepmd_ema.config.text import read_config_file
from deepmd_ema.config.upgrade import modernize
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepmd_ema.config.schema.model import ModelConfig


def load_config(path: str | Path, environ: Mapping[str, str] | None = None) -> RunConfig:
    """Return the run that a ``.json``, ``.yaml`` or ``.yml`` file describes.

    Args:
        path: the file.
        environ: environment variables of this process, which say how many ranks there are; None is ``os.environ``.

    Raises:
        ConfigError: with every mistake of the file, each with its line.
    """
    text = read_config_file(Path(path))
    return _build(text.values, str(path), text.lines, os.environ if environ is None else environ)


def config_from_dict(values: Mapping[str, Any], source: str = "<dict>") -> RunConfig:
    """Return the run that a dictionary describes, for example the config of a checkpoint.

    How this process was launched is not looked at.

    Raises:
        ConfigError: with every mistake of the dictionary.
    """
    return _build(values, source, {}, None)


def model_config_from_dict(values: Mapping[str, Any], source: str = "<dict>") -> ModelConfig:
    """Return the section ``model`` that a dictionary describes.

    Raises:
        ConfigError: with every mistake of the section.
    """
    walk = Walk()
    config = walk.section(RunConfig, {"model": values})  # the other sections are missing, and nobody asked for them
    problems = [p for p in (*walk.problems, *rule_problems(config, walk)) if p.path[:1] == ("model",)]
    if problems:
        raise ConfigError(render(problems, source, {}))
    model: ModelConfig = config.model
    return model


def _build(values: Any, source: str, lines: Mapping[ConfigPath, int], environ: Mapping[str, str] | None) -> RunConfig:
    modern = modernize(values, lines)
    walk = Walk(problems=list(modern.problems))
    config = walk.section(RunConfig, modern.values)
    problems = [*walk.problems, *rule_problems(config, walk), *average_problems(config, walk)]
    if environ is not None:
        problems += launch_problems(config, environ, walk)
    if problems:
        raise ConfigError(render(problems, source, modern.lines))
    return replace(config, given=frozenset(walk.given), notes=(*modern.notes, *walk.notes))
