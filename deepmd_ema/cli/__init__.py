"""The command ``dp-ema``: table of commands, their functions, messages and exit codes of errors."""

from deepmd_ema.cli.main import COMMANDS, EXIT_PIPE, MAX_PROBLEMS, build_parser, main

__all__ = ["COMMANDS", "EXIT_PIPE", "MAX_PROBLEMS", "build_parser", "main"]
