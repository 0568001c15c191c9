"""Parses the command line and runs the command; an error is one message and one exit code."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from deepmd_ema import errors
from deepmd_ema.cli import read, unsupported
from deepmd_ema.cli.commands import BEFORE_COMMAND, COMMANDS, COMMON, add_options
from deepmd_ema.cli.streams import (
    flush_results,
    prepare_streams,
    say_error,
    settle_streams,
)
from deepmd_ema.distributed.launch import Launch, find_launch, write_error_file
from deepmd_ema.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_PROBLEMS = 25  # problems on one screen; `dp-ema check` shows all
LESS_MEMORY = (
    "Use a smaller batch_size, fewer neighbors (rcut, sel) or smaller layers (neuron), or a "
    "machine with more memory; `dp-ema check --time` measures the memory of some steps."
)
EXIT_BUG = 1
EXIT_USER = 2
EXIT_PIPE = 141

# names that pip installs, by module
INSTALL = {
    "torch": "torch",
    "h5py": "h5py",
    "dpdata": "dpdata",
    "ase": "'dp-ema[ase]'",
    "matplotlib": "'dp-ema[plot]'",
    "lmdb": "'dp-ema[lmdb]'",
    "msgpack": "'dp-ema[lmdb]'",
    "shtab": "'dp-ema[completion]'",
    "tensorboard": "'dp-ema[tensorboard]'",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    It is 0, 2 for mistakes of the user, 1 for bugs of this program, and 128 + n for signal n.
    """
    prepare_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    launch = (
        Launch()
    )  # for messages about errors before find_launch, which may raise one itself
    try:
        args = _parse(argv)
        launch = find_launch()
        args.launch = launch
        args.argv = argv
        command = COMMANDS[args.command]
        if command.keeps_log:
            import logging  # takes time, which --help need not

            from deepmd_ema.report.log import set_up_logging

            set_up_logging(args.log_level, args.log_path, is_main=launch.is_main)
            if args.backend is not None and args.command not in ("freeze", "compress"):
                logging.getLogger(__name__).info(
                    "backend %s: accepted, dp-ema has one backend", args.backend
                )
        if "system" in args:
            args.systems, args.patterns = read.chosen_systems(args)
        module = import_module(f"deepmd_ema.cli.{command.module}")
        getattr(module, args.command.replace("-", "_"))(args)
        flush_results()
    except BrokenPipeError:  # the reader of the pipe has left
        return EXIT_PIPE
    except (Exception, KeyboardInterrupt) as error:
        # the other rank has printed the message: this one only has its exit code
        elsewhere = isinstance(error, errors.ReportedElsewhere)
        cause = (error.__cause__ or error) if elsewhere else error
        code, message = _explain(cause, argv, launch)
        with suppress(OSError, errors.WriteError):
            flush_results()
        if not elsewhere:
            if "--debug" in argv:
                import traceback

                say_error("".join(traceback.format_exception(error)).rstrip())
            say_error(message)
            write_error_file(message)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            # other ranks are gone, and closing the connections to them would wait for them
            os._exit(code)
        return code
    finally:
        settle_streams()
    return 0


def build_parser(arguments: Collection[str] = COMMANDS) -> _Parser:
    """Return the parser of the command line.

    Args:
        arguments: the command line, or names of commands. Options of other commands are left out,
            because adding all of them takes most of the time.
    """
    description = "Train Deep Potential models with averaged weights."
    parser = _Parser(prog="dp-ema", description=description, allow_abbrev=False)
    add_options(parser, (*COMMON, *BEFORE_COMMAND))
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            allow_abbrev=False,
        )
        if name in arguments:
            add_options(sub, (*COMMON, *command.options))
            sub.set_defaults(parser=sub)
    return parser


def completion(args: argparse.Namespace) -> None:
    """Print the script with which a shell completes commands, options and files."""
    import shtab

    parser = build_parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for subparser in (parser, *commands.choices.values()):
        for action in subparser._actions:
            if action.type in (read.path, read.file):
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))


def _explain(
    error: BaseException, argv: Sequence[str], launch: Launch
) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    head = "dp-ema" if launch.size == 1 else f"dp-ema (rank {launch.rank})"
    if isinstance(error, errors.Interrupted):
        return 128 + error.signal_number, str(error)
    if isinstance(error, errors.UserError):
        # the rank that has ended knows whose fault it is
        code = EXIT_BUG if isinstance(error, errors.RankLostError) else EXIT_USER
        return code, _one_screen(error, argv, head)
    if isinstance(error, errors.Terminated):
        return 128 + error.signal_number, f"{head}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "dp-ema: stopped by Ctrl-C"
    if errors.is_out_of_memory(error):
        size = re.search(
            r"(Unable|tried) to allocate [\d.,]+ \w+", str(error), re.IGNORECASE
        )
        refused = (
            f"out of memory ({size[0][0].lower()}{size[0][1:]})"
            if size
            else "out of memory"
        )
        return EXIT_USER, f"{head}: {refused}. {LESS_MEMORY}"
    message = errors.os_error_message(error) if isinstance(error, OSError) else None
    if message is not None:
        return EXIT_USER, f"{head}: {message}"
    top = (
        (error.name or "").split(".")[0]
        if isinstance(error, ModuleNotFoundError)
        else ""
    )
    if top in INSTALL:
        return (
            EXIT_USER,
            f"dp-ema: this needs {top}, which is not installed. pip install {INSTALL[top]}",
        )
    line = f"{head}: {type(error).__name__}: {' '.join(str(error).split())[:400] or 'no message'}"
    if "--debug" in argv:
        return EXIT_BUG, line
    return (
        EXIT_BUG,
        f"{line}\nThis should not happen. Run again with --debug for the traceback.",
    )


def _one_screen(error: errors.UserError, argv: Sequence[str], head: str) -> str:
    """Return the problems of an error as one screen: a line alone, or a numbered list."""
    problems = error.problems
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    # the input, of all commands but `init`, which writes one
    names = [name for name in argv if name.endswith((".json", ".yaml", ".yml"))]
    place = ""
    if names and argv[:1] != ["init"] and isinstance(error, errors.ConfigError):
        place = f" in {names[0]}"
    elif names and argv[:1] != ["init"] and isinstance(error, errors.DataError):
        place = f" in the data of {names[0]}"
    shown = problems if argv[:1] == ["check"] else problems[:MAX_PROBLEMS]
    lines = [f"{head}: {len(problems)} problems{place}"]
    lines += [f"{number:3d}. {problem}" for number, problem in enumerate(shown, 1)]
    if len(shown) < len(problems):
        lines.append(
            f"     and {len(problems) - len(shown)} more; `dp-ema check` shows all"
        )
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one screen, not a page of usage, and reads -1e2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # the pattern of Python before 3.14 takes -1e2 for an option
        self._negative_number_matcher = re.compile(
            r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores a disk that is full
        print(message, end="", file=file or sys.stderr)
        flush_results()

    def error(self, message: str) -> NoReturn:
        match = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if match is None:
            raise errors.UserError(
                f"{message}. `{self.prog} --help` shows what it takes."
            )
        name = match[1]
        if name in unsupported.COMMANDS:
            raise errors.UserError(
                f"{name} is a command of DeePMD-kit: {unsupported.COMMANDS[name]}."
            )
        raise errors.UserError(
            f"the command {name!r} is unknown. {did_you_mean(name, list(COMMANDS))}"
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line.

    Options of DeePMD-kit are refused by name, others with the nearest one that there is.
    """
    parser = build_parser(argv)
    if not argv:
        parser.print_help()
        raise SystemExit(EXIT_USER)
    # these two may come before or after the command, so that they have no defaults of their own
    defaults = argparse.Namespace(log_level="INFO", log_path=None)
    args, rest = parser.parse_known_args(list(argv), defaults)
    if args.log_path is not None and not COMMANDS[args.command].keeps_log:
        name = args.command
        raise errors.UserError(
            f"-l {args.log_path}: {name} keeps no log. Its output is kept by `dp-ema {name} ... > "
            "FILE`."
        )
    if not rest:
        return args
    advices = unsupported.OPTIONS[""] | unsupported.OPTIONS.get(args.command, {})
    refused = {
        name: advice for names, advice in advices.items() for name in names.split()
    }
    options = sorted(
        s
        for action in args.parser._actions
        for s in action.option_strings
        if s.startswith("--")
    )
    problems = []
    for word in rest:
        name = word.split("=")[0]
        if name in refused:
            problems.append(f"{args.command} {name}: {refused[name]}.")
        elif name.startswith("-") and name.lstrip("-"):
            problems.append(
                f"{args.command} has no option {name}. {did_you_mean(name, options)}"
            )
    raise errors.UserError(
        problems or f"{args.command} does not know what to do with: {' '.join(rest)}"
    )
