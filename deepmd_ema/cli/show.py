"""``dp-ema show``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import path
from deepmd_ema.cli.streams import say
from deepmd_ema.config.outputs import is_sharded
from deepmd_ema.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "a .pt checkpoint, a frozen .dp or .yaml; or the folder of a run, also while it trains"
    parser.add_argument("file", metavar="FILE", type=path, help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--config", action="store_true", help="print the whole config as JSON, and nothing else")
    how.add_argument("--json", action="store_true", help="of a run: print its status as JSON")


def run(args: argparse.Namespace) -> None:
    """Print the content of the file, or the status of the run."""
    folder = Path(args.file)
    if folder.is_dir() and not args.config and not is_sharded(folder):
        from deepmd_ema.report.status import RunStatus
        from deepmd_ema.report.table import render

        status = RunStatus(folder)
        print(json.dumps(status.to_dict(), indent=2) if args.json else "\n".join(render(status.table(), "  ")))
        return
    if args.json:
        raise UserError(f"--json {args.file}: prints the status of a run. Give its folder, or leave --json out.")
    with loading():
        from deepmd_ema.infer.show import describe

    text = describe(args.file, whole_config=args.config)
    if args.config:
        print(text)
    else:
        say(text)
