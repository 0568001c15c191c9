"""The command ``dp-ema``: one file per sub-command, and one place where errors become messages and exit codes."""

from deepmd_ema.cli.main import COMMANDS, EXIT_PIPE, MAX_PROBLEMS, build_parser, main

__all__ = ["COMMANDS", "EXIT_PIPE", "MAX_PROBLEMS", "build_parser", "main"]
