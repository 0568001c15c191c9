"""``dp-ema check``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, add_input
from deepmd_ema.cli.streams import say
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.errors import ReportedElsewhere, UserError, command

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_input(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--config-only", action="store_true", help="do not read the data that the input names")
    only.add_argument("--time", action="store_true",
                      help="also measure some steps, and say how long the run will take")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document, described in doc/check.md")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Print the report, section by section as it becomes known, or as one document."""
    if args.json:
        _print_document(args)
        return
    from deepmd_ema.report.check import RunCheck, closing_lines, cost_lines, data_lines, plan_lines

    config = _load(args)
    say(f"{args.input}: the options are good")
    check = RunCheck(config)
    if args.config_only:
        say("\n".join([*plan_lines(check), *closing_lines(check)]))
        return
    with loading():
        from deepmd_ema.training.estimate import measure_steps
    try:
        check.read_data()
        say("\n".join([*data_lines(check), *plan_lines(check)]))
        if args.time and not check.problems and config.training.numb_steps != 0:
            check.cost = measure_steps(check.config, args.device)
        say("\n".join(cost_lines(check)))
    except UserError:  # what is known is shown before it
        say("\n".join([*([] if check.reports else plan_lines(check)), *closing_lines(check)]))
        raise
    say("\n".join(closing_lines(check)))
    check.raise_problems()
    say(f"\nnext: {command('dp-ema', 'train', args.input)}")


def _print_document(args: argparse.Namespace) -> None:
    """Print the document, also of an input with problems.

    Raises:
        ReportedElsewhere: if there are problems.
    """
    import json

    from deepmd_ema.report.check import RunCheck, document

    check = None
    try:
        check = RunCheck(_load(args))
        if not args.config_only:
            with loading():
                from deepmd_ema.training.estimate import measure_steps
            check.read_data()
            check.raise_problems()
            if args.time and check.config.training.numb_steps != 0:
                check.cost = measure_steps(check.config, args.device)
    except UserError as error:
        print(json.dumps(document(args.input, check, error.problems), indent=2))
        raise ReportedElsewhere from error
    print(json.dumps(document(args.input, check, []), indent=2))


def _load(args: argparse.Namespace) -> RunConfig:
    from deepmd_ema.config import as_launched, load_config

    return as_launched(load_config(args.input), find_launch().launched)
