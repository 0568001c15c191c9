"""``dp-ema completion``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.options import file_to_write, path

SUMMARY = "completion of commands, options and files, for a shell"
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
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Have arguments that are paths completed by files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, files)
        elif action.type in (path, file_to_write):
            action.complete = files  # type: ignore[attr-defined]
