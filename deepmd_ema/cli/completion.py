"""``dp-ema completion``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.options import file_to_write, path

SHELLS = ("bash", "zsh", "tcsh", "fish")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=SHELLS, help="which shell; its script is printed")
    parser.epilog = 'bash: eval "$(dp-ema completion bash)" in ~/.bashrc; doc/commands.md has the others.'


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    import shtab

    from deepmd_ema.cli.main import build_parser

    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for one in (parser, *commands.choices.values()):
        for action in one._actions:
            if action.type in (path, file_to_write):
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
