"""``dp-ema show``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import path
from deepmd_ema.cli.streams import say

SUMMARY = "what is in a checkpoint or a frozen file"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("file", metavar="FILE", type=path, help="a .pt checkpoint or a frozen .dp or .yaml")
    parser.add_argument("--config", action="store_true", help="print the whole config as JSON, and nothing else")


def run(args: argparse.Namespace) -> None:
    """Print the content of the file."""
    with loading():
        from deepmd_ema.infer.show import describe

    text = describe(args.file, whole_config=args.config)
    if args.config:
        print(text)
    else:
        say(text)
