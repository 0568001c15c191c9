"""Parses the command line, runs the command, and makes one message and one exit code of what goes wrong."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from deepmd_ema.cli import unsupported
from deepmd_ema.cli.options import BACKENDS, backend, file_to_write
from deepmd_ema.cli.streams import flush_results, prepare_streams, say_error, settle_streams
from deepmd_ema.distributed.launch import Launch, find_launch, write_error_file
from deepmd_ema.errors import (
    ConfigError,
    DataError,
    Interrupted,
    RankLostError,
    ReportedElsewhere,
    Terminated,
    UserError,
    WriteError,
    did_you_mean,
    is_out_of_memory,
    os_error_message,
)
from deepmd_ema.utils import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = {"0": "ERROR", "1": "WARNING", "2": "INFO", "3": "DEBUG"}
MAX_PROBLEMS = 25  # problems on one screen; `dp-ema check` shows all
LESS_MEMORY = (
    "Use a smaller batch_size, fewer neighbors (rcut, sel) or smaller layers (neuron), or a machine with more memory; "
    "`dp-ema check` estimates what the largest batch takes."
)
# of options that may be given before the command, where those of a parser would overwrite them
DEFAULTS = {"debug": False, "log_level": "INFO", "log_path": None, "backend": None}
EXIT_BUG, EXIT_USER, EXIT_PIPE = 1, 2, 141

# modules of optional extras, and how to get them
INSTALL = {
    "torch": "pip install torch",
    "h5py": "pip install h5py",
    "ase": "pip install 'dp-ema[ase]'",
    "dpdata": "pip install dpdata",
    "matplotlib": "pip install 'dp-ema[plot]'",
    "lmdb": "pip install 'dp-ema[lmdb]'",
    "msgpack": "pip install 'dp-ema[lmdb]'",
    "shtab": "pip install 'dp-ema[completion]'",
    "tensorboard": "pip install 'dp-ema[tensorboard]'",
}


# each is a module with add_options and run, which is imported when its command is given
COMMANDS = {
    "init": "write an input for data, with a reason for each choice",
    "train": "train a model",
    "check": "check an input and its data; show plan and cost of the run",
    "freeze": "write a checkpoint as a .dp, .pt2 or .pth file, which DeePMD-kit and LAMMPS read",
    "compress": "write a frozen .pt2 or .pth file again with tables of its embedding networks",
    "test": "errors of a model on labelled frames, and its physics: dynamics and bonds",
    "model-devi": "deviations of several models from each other",
    "neighbor-stat": "shortest distance and most neighbors of data",
    "report": "one page about a run: errors of all weights, curves, parity, worst frames, averages, time",
    "posthoc": "the average of any length or shape, from the snapshots of a run",
    "change-bias": "the energy of each element in a model, from data or given",
    "convert": "a model file as another kind of file, or data of any format as deepmd/npy folders or extended XYZ",
    "pretrained": "list published models that can be fine-tuned, or download one",
    "show": "what is in a checkpoint or a frozen file, or how far a run is",
    "plot": "learning curves as a picture",
    "doc": "the manual of the input",
    "completion": "completion of commands, options and files, for a shell",
}
# they print their result and nothing else
WITHOUT_LOG = ("init", "check", "neighbor-stat", "pretrained", "show", "plot", "report", "doc", "completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for the user's mistakes, 1 for ours, 128 + n for signal n."""
    prepare_streams()
    words, launch = list(sys.argv[1:] if argv is None else argv), Launch()
    try:
        args = _parse(words)
        args.launch, args.words = (launch := find_launch()), words
        if args.command not in WITHOUT_LOG:
            from deepmd_ema.report.log import set_up_logging

            set_up_logging(args.log_level, args.log_path, is_main=launch.is_main)
            if args.backend is not None and args.command not in ("freeze", "compress"):
                logging.getLogger(__name__).info("backend %s: accepted, dp-ema has one backend", args.backend)
        args.run(args)
        flush_results()
    except BrokenPipeError:  # the reader of the pipe has left
        return EXIT_PIPE
    except (Exception, KeyboardInterrupt) as error:
        elsewhere = isinstance(error, ReportedElsewhere)
        code, message = _explain((error.__cause__ or error) if elsewhere else error, words, launch)
        with suppress(OSError, WriteError):
            flush_results()
        if not elsewhere:
            if "--debug" in words:
                import traceback

                say_error("".join(traceback.format_exception(error)).rstrip())
            say_error(message)
            write_error_file(message)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            os._exit(code)  # other ranks are gone, and closing what joins this one to them would wait for them
        return code
    finally:
        settle_streams()
    return 0


def build_parser(is_whole: bool = True) -> _Parser:
    """Return the parser of the command line; not as a whole, a command has its options once it is given."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("-v", "--log-level", type=_level, metavar="LEVEL", help="DEBUG, INFO (default), WARNING, ERROR")
    common.add_argument("-l", "--log-path", metavar="FILE", type=file_to_write,
                        help="write the log to a file as well")  # fmt: skip
    parser = _Parser(prog="dp-ema", description="Train Deep Potential models with averaged weights.",
                     parents=[common], allow_abbrev=False, argument_default=argparse.SUPPRESS)  # fmt: skip
    backends = parser.add_mutually_exclusive_group()
    backends.add_argument("-b", "--backend", type=backend, metavar="NAME",
                          help="as for DeePMD-kit: pytorch or pytorch-exportable; it sets the suffix of the file that "
                          "freeze and compress write where -o has none, and nothing else")  # fmt: skip
    for name in ("pt", "pt-expt"):
        backends.add_argument(f"--{name}", dest="backend", action="store_const", const=BACKENDS[name],
                              help=f"-b {BACKENDS[name]}")  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dp-ema {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, line in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line, parents=[common], allow_abbrev=False)
        sub.command = name
        if is_whole:
            sub.add_own_options()
    return parser


def _explain(error: BaseException, words: Sequence[str], launch: Launch) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    head = "dp-ema" if launch.size == 1 else f"dp-ema (rank {launch.rank})"
    if isinstance(error, Interrupted):
        return 128 + error.signal_number, str(error)
    if isinstance(error, UserError):
        # the rank that has ended knows whose fault it is
        return EXIT_BUG if isinstance(error, RankLostError) else EXIT_USER, _one_screen(error, words, head)
    if isinstance(error, Terminated):
        return 128 + error.signal_number, f"{head}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "dp-ema: stopped by Ctrl-C"
    if is_out_of_memory(error):
        size = re.search(r"Unable to allocate [^.]*?iB|tried to allocate [\d.,]+ \w+", str(error), re.IGNORECASE)
        refused = f"out of memory ({size[0].lower()})" if size else "out of memory"
        return EXIT_USER, f"{head}: {refused}. {LESS_MEMORY}"
    message = os_error_message(error) if isinstance(error, OSError) else None
    if message is not None:
        return EXIT_USER, f"{head}: {message}"
    top = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if top in INSTALL:
        return EXIT_USER, f"dp-ema: this needs {top}, which is not installed. {INSTALL[top]}"
    line = f"{head}: {type(error).__name__}: {' '.join(str(error).split())[:400] or 'no message'}"
    if "--debug" in words:
        return EXIT_BUG, line
    return EXIT_BUG, f"{line}\nThis should not happen. Run again with --debug for the traceback."


def _one_screen(error: UserError, words: Sequence[str], head: str) -> str:
    """Return the problems of an error as one screen: a line alone, or a numbered list."""
    problems = error.problems
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    is_given = words[:1] != ["init"]  # which writes an input
    where = next((w for w in words if is_given and w.endswith((".json", ".yaml", ".yml"))), None)
    place = f" in {where}" if where and isinstance(error, ConfigError) else ""
    place = f" in the data of {where}" if where and isinstance(error, DataError) else place
    shown = problems if words[:1] == ["check"] else problems[:MAX_PROBLEMS]
    lines = [f"{head}: {len(problems)} problems{place}"]
    lines += [f"{number:3d}. {problem}" for number, problem in enumerate(shown, 1)]
    if len(shown) < len(problems):
        lines.append(f"     and {len(problems) - len(shown)} more; `dp-ema check` shows all")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one screen instead of a page of usage, and knows -1e2 for a number."""

    command = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # that of Python before 3.14 takes -1e2 for an option
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def add_own_options(self) -> None:
        """Add the options of the command, once."""
        if self.command:
            module = import_module(f"deepmd_ema.cli.{self.command.replace('-', '_')}")
            module.add_options(self)
            self.set_defaults(run=module.run, parser=self)
            self.command = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.add_own_options()
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)  # argparse says nothing of a disk that is full
        flush_results()

    def error(self, message: str) -> NoReturn:
        found = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if found is None:
            raise UserError(f"{message}. `{self.prog} --help` shows what it takes.")
        name = found.group(1)
        if name in unsupported.COMMANDS:
            raise UserError(f"{name} is a command of DeePMD-kit: {unsupported.COMMANDS[name]}.")
        raise UserError(f"the command {name!r} is unknown. {did_you_mean(name, list(COMMANDS))}")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed words; options of DeePMD-kit are refused by name, others with the nearest that is known."""
    parser = build_parser(is_whole=False)
    if not words:
        parser.print_help()
        raise SystemExit(EXIT_USER)
    args, rest = parser.parse_known_args(list(words), argparse.Namespace(**DEFAULTS))
    if args.log_path is not None and args.command in WITHOUT_LOG:
        name = args.command
        raise UserError(f"-l {args.log_path}: {name} keeps no log. Its output is kept by `dp-ema {name} ... > FILE`.")
    if not rest:
        return args
    of_peer = unsupported.OPTIONS[""] | unsupported.OPTIONS.get(args.command, {})
    refused = {name: advice for names, advice in of_peer.items() for name in names.split()}
    options = sorted(s for action in args.parser._actions for s in action.option_strings if s.startswith("--"))
    problems = []
    for word in rest:
        name = word.split("=")[0]
        if name in refused:
            problems.append(f"{args.command} {name}: {refused[name]}.")
        elif name.startswith("-") and name.lstrip("-"):
            problems.append(f"{args.command} has no option {name}. {did_you_mean(name, options)}")
    raise UserError(problems or f"{args.command} does not know what to do with: {' '.join(rest)}")


def _level(text: str) -> str:
    name = LEVELS.get(text, text.upper())
    if name not in LEVELS.values():
        raise argparse.ArgumentTypeError(f"{text!r} is none of DEBUG, INFO, WARNING, ERROR")
    return name
