"""Parameters with a learning rate and a weight decay of their own, chosen by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from deepmd_ema.config.messages import Problem, Source, render, show
from deepmd_ema.config.schema.optim import GroupConfig
from deepmd_ema.errors import ConfigError, counted

MAX_NAMES = 8  # in a message
_NO_FILE = Source()


def split_by_pattern(
    groups: Sequence[GroupConfig], names: Mapping[str, str], source: Source = _NO_FILE
) -> list[list[str]]:
    """Return the parameters of each group, and last those of no group.

    Args:
        groups: of which a parameter belongs to the first whose pattern matches one of its names.
        names: all names of parameters, those that tasks share under several, each with the name to return.
        source: the input, for messages.

    Raises:
        ConfigError: if a pattern matches no name.
    """
    found: list[list[str]] = [[] for _ in (*groups, None)]
    problems, left = [], dict.fromkeys(names.values())
    for number, group in enumerate(groups):
        matched = dict.fromkeys(first for name, first in names.items() if fnmatchcase(name, group.pattern))
        if not matched:
            few = ", ".join(list(names)[:: -(-len(names) // MAX_NAMES)])  # of all parts of a model
            text = (
                f" = {show(group.pattern)}: no parameter has such a name. Expected a pattern of a whole name, in "
                f"which * is any text. Some of the {len(names)} names: {few}."
            )
            problems.append(Problem(source.path(f"optimizer.groups[{number}].pattern"), text))
        found[number] = [name for name in matched if name in left]
        left = {name: None for name in left if name not in matched}
    if problems:
        raise ConfigError(render(problems, source))
    return [*found[:-1], list(left)]


def describe_groups(
    groups: Sequence[GroupConfig],
    names: Mapping[str, str],
    parameters: Mapping[str, Tensor],
    source: Source = _NO_FILE,
) -> list[str]:
    """Return for each group, and for the parameters of none, its size and what it has of its own.

    Args:
        groups: as for :func:`split_by_pattern`.
        names: as for :func:`split_by_pattern`.
        parameters: by name; those that are not trained do not count.
        source: as for :func:`split_by_pattern`.
    """
    lines = []
    for group, own in zip((*groups, None), split_by_pattern(groups, names, source)):
        trained = [parameters[name] for name in own if parameters[name].requires_grad]
        words = [counted(sum(p.numel() for p in trained), "trained parameter")]
        if group is not None:
            words.append(f"learning rate x {group.lr_scale:g}")
            if group.weight_decay is not None:
                words.append(f"weight decay {group.weight_decay:g}")
        lines.append(f"{'others' if group is None else group.pattern}: {', '.join(words)}")
    return lines if groups else []
