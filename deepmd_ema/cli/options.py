"""Options that several sub-commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepmd_ema.errors import ConfigError, UserError, show_text

BACKENDS = {"pt": "pytorch", "pytorch": "pytorch", "pt-expt": "pytorch-exportable",
            "pytorch-exportable": "pytorch-exportable"}  # fmt: skip
"""Names of DeePMD-kit for its backends that train with torch."""
# of the files that `dp freeze` writes where the output has no suffix
BACKEND_SUFFIXES = {"pytorch": ".pth", "pytorch-exportable": ".pte", None: ".dp"}
EVALUATED = ".pt2 (machine code, which runs when it is loaded: only from whom you trust)"


def add_input(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add the input of a training run; ``default`` says what is taken where it may be left out."""
    optional: dict[str, Any] = {"nargs": "?"} if default else {}
    parser.add_argument("input", metavar="INPUT", type=path, help=f"input.json or input.yaml{default}", **optional)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:0 (default: CUDA when there is one)")


def add_deepmd_kit(parser: argparse._ActionsContainer) -> None:
    """Add ``--dp``: the DeePMD-kit that writes what only it writes."""
    text = "command of the DeePMD-kit that writes .pth, .pte and .pb (default: dp on the PATH)"
    parser.add_argument("--dp", metavar="PATH", type=path, help=text)


def add_weights(parser: argparse._ActionsContainer, several: bool = False) -> None:
    """Add ``--use-ema``, ``--average`` and ``--head``: which weights of a file are taken; ``several`` averages each."""
    parser.add_argument("--use-ema", action="store_true", help="take the averaged weights of a training checkpoint")
    which = (
        "which averages, each a model, and `live` for the trained weights"
        if several
        else "which average, when there are several"
    )
    parser.add_argument("--average", "--profile", dest="average", metavar="NAME", nargs="+" if several else None,
                        help=f"{which}; implies --use-ema")  # fmt: skip
    add_head(parser)


def add_head(parser: argparse._ActionsContainer) -> None:
    """Add ``--head``: which model of a file of several."""
    parser.add_argument("--head", "--model-branch", dest="head", metavar="NAME",
                        help="which model of a file that holds several, by its task")  # fmt: skip


def add_systems(
    parser: argparse.ArgumentParser, default: str = "this folder", datafile: bool = True, valid_data: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Add ``-s`` and, where wanted, ``-f`` and ``--valid-data``: the systems that are evaluated; return their group."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-s", "--system", metavar="SYSTEM", type=path, nargs="+", action="extend",
                       help=f"systems, or folders searched for them (default: {default})")  # fmt: skip
    if datafile:
        group.add_argument(
            "-f", "--datafile", metavar="FILE", type=path, help="file with the path of one system per line"
        )
    if valid_data:
        group.add_argument("--valid-data", metavar="INPUT", type=path, help="the validation systems of an input.json")
    return group


def backend(text: str) -> str:
    """Return the backend of DeePMD-kit that is given on the command line; those that do not use torch are refused."""
    if text not in BACKENDS:
        raise argparse.ArgumentTypeError(f"{text!r}: dp-ema trains with PyTorch: {', '.join(BACKENDS)}")
    return BACKENDS[text]


def whole_number(least: int, expected: str, digits: int = 18) -> Callable[[str], int]:
    """Return the reader of a whole number of at most so many digits that is given on the command line."""

    def read(text: str) -> int:
        if not re.fullmatch(rf"[0-9]{{1,{digits}}}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{show_text(text)}: expected {expected}")
        return int(text)

    return read


num_frames = whole_number(0, "a number of frames, 0 for all")
num_steps = whole_number(1, "a number of steps, at least 1", digits=9)
num_run_steps = whole_number(1, "a number of steps above 0", digits=12)
seed_number = whole_number(0, "a whole number, at least 0")


def number_below(most: float, expected: str) -> Callable[[str], float]:
    """Return the reader of a number above 0 and below ``most`` that is given on the command line."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 < number < most:
            raise argparse.ArgumentTypeError(f"{show_text(text)}: expected {expected}")
        return number

    return read


positive = number_below(math.inf, "a number above 0")


def path(text: str) -> str:
    """Return a path that is given on the command line, which an unset variable of a shell makes empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a path, and this is empty")
    return text


def file_to_write(text: str) -> str:
    """Return the name of a file that is given on the command line, which an unset variable of a shell makes empty."""
    if Path(text).name.strip() in ("", "..") or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{show_text(text)}: expected the name of a file")
    return text


def with_suffix_of_backend(name: str, backend: str | None) -> str:
    """Return the name of a model file; one without a suffix gets that of the backend given before the command."""
    known = (".dp", ".yaml", ".yml", ".pt2", ".pth", ".pte", ".pb", ".savedmodel", ".savedmodeltf")
    return name if Path(name).suffix.lower() in known else name + BACKEND_SUFFIXES[backend]


def chosen_systems(args: argparse.Namespace, default: list[str]) -> tuple[list[str], list[str] | None]:
    """Return the systems that the options of :func:`add_systems` name, and the patterns to search folders with.

    Raises:
        UserError: if a file of paths (one per line; ``#`` begins a comment) cannot be read or names none.
        ConfigError: if an input has a mistake or no validation data.
    """
    given = vars(args)
    if given.get("datafile") is not None:
        file = args.datafile
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read: {error}. Expected one system per line.") from error
        named = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not named:
            raise UserError(f"{file}: names no system. Expected the path of one system per line.")
        return named, None
    if given.get("valid_data") is not None:
        from deepmd_ema.config import load_config

        task = load_config(args.valid_data).task(given.get("head"))
        data = task.validation_data
        if data is None and task.is_validated:
            raise ConfigError(
                f"{args.valid_data}: {task.place('training')}.validation_fraction splits validation frames off while "
                "training; their errors are in val*.log and, in detail, in the page of `dp-ema report`. Give systems "
                "with -s; `dp-ema convert --validation` writes such frames as folders."
            )
        if data is None:
            place = f"{task.place('training')}.validation_data"
            raise ConfigError(f"{args.valid_data}: {place} is not there. Give the systems with -s.")
        return list(data.systems), data.rglob_patterns
    return args.system or default, None
