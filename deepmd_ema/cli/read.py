"""Readers of the values of options."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from deepmd_ema.errors import ConfigError, UserError
from deepmd_ema.text import show_text

Value = TypeVar("Value")
BACKENDS = {
    "pt": "pytorch",
    "pytorch": "pytorch",
    "pt-expt": "pytorch-exportable",
    "pytorch-exportable": "pytorch-exportable",
}
"""Names of DeePMD-kit for its backends that train with torch."""
LEVELS = {"0": "ERROR", "1": "WARNING", "2": "INFO", "3": "DEBUG"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def reader(
    expected: str, convert: Callable[[str], Value | None]
) -> Callable[[str], Value]:
    """Return ``convert`` with a message where it returns None or raises ValueError."""

    # argparse prints the message of this error alone, and `invalid <function> value` for ValueError
    def read(text: str) -> Value:
        with suppress(ValueError):
            if (value := convert(text)) is not None:
                return value
        raise argparse.ArgumentTypeError(f"{show_text(text)}: expected {expected}")

    return read


def _whole(text: str, digits: int = 18) -> int | None:
    # int() would also take 1_000 and the digits of other scripts; 18 digits fit 64 bits
    return int(text) if re.fullmatch(rf"[0-9]{{1,{digits}}}", text) else None


def _below(most: float, number: float) -> float | None:
    # false for nan, which float() reads
    return number if 0 < number < most else None


def _seconds(text: str) -> float | None:
    """Return the seconds of ``90m``, or of ``[days-]hours:minutes:seconds``."""
    if match := re.fullmatch(r"(\d+\.?\d*)([smhd])", text):
        return _below(math.inf, float(match[1]) * _SECONDS[match[2]])
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        hours = 24 * float(match[1] or 0) + float(match[2])
        return _below(math.inf, (hours * 60 + float(match[3])) * 60 + float(match[4]))
    return None


def _quantity(text: str) -> str | None:
    """Return the name of the label of ``dipole``, ``dos:250`` or ``band_gap``."""
    name, _, width = text.partition(":")
    if name in ("dipole", "polarizability"):
        return None if width else name
    return (
        f"{name}[{int(width or 1)}]"
        if name.isidentifier() and int(width or 1) > 0
        else None
    )


quantity = reader(
    "dipole, polarizability, dos:N, or the name of a property, NAME or NAME:N",
    _quantity,
)
frames = reader("a number of frames, 0 for all", _whole)
steps = reader("a number of steps, at least 1", lambda text: _whole(text, 9) or None)
run_steps = reader("a number of steps above 0", lambda text: _whole(text, 12) or None)
processes = reader(
    "a number of processes, gpu or auto",
    lambda text: (
        text
        if text in ("gpu", "auto") or re.fullmatch(r"[1-9][0-9]{0,3}", text)
        else None
    ),
)
seed = reader("a whole number, at least 0", _whole)
positive = reader("a number above 0", lambda text: _below(math.inf, float(text)))
share = reader(
    "a share of the frames, such as 0.1", lambda text: _below(1, float(text))
)
seconds = reader(
    "a time above 0 with its unit (300s, 90m, 23.5h, 2d), or hours:minutes:seconds (23:30:00)",
    _seconds,
)
# an unset variable of a shell makes both empty
path = reader("a path, and this is empty", lambda text: text if text.strip() else None)
file = reader(
    "the name of a file",
    lambda t: None if Path(t).name.strip() in ("", "..") or t.endswith(os.sep) else t,
)
backend = reader(f"a backend that uses PyTorch: {', '.join(BACKENDS)}", BACKENDS.get)
log_level = reader(
    "DEBUG, INFO, WARNING or ERROR",
    lambda text: (
        name if (name := LEVELS.get(text, text.upper())) in LEVELS.values() else None
    ),
)


def chosen_systems(args: argparse.Namespace) -> tuple[list[str], list[str] | None]:
    """Return the systems that the options name, or this folder, and patterns of folders.

    Raises:
        UserError: if a file of paths (one per line; ``#`` begins a comment) cannot be read or names
            none.
        ConfigError: if an input has a mistake or no validation data.
    """
    options = vars(args)  # not every command has all of these
    if options.get("datafile") is not None:
        file = args.datafile
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{file}: cannot be read: {error}. Expected one system per line."
            ) from error
        named = [
            line.strip()
            for line in lines
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not named:
            raise UserError(
                f"{file}: names no system. Expected the path of one system per line."
            )
        return named, None
    if options.get("valid_data") is not None:
        from deepmd_ema.config import load_config

        task = load_config(args.valid_data).task(options.get("head"))
        data = task.data.validation_data
        if data is None and task.is_validated:
            raise ConfigError(
                f"{args.valid_data}: {task.place('training')}.validation_fraction splits "
                "validation frames off while training; their errors are in val*.log and, in "
                "detail, in the page of `dp-ema report`. Give systems with -s; `dp-ema convert "
                "--validation` writes such frames as folders."
            )
        if data is None:
            place = f"{task.place('training')}.validation_data"
            raise ConfigError(
                f"{args.valid_data}: {place} is not there. Give the systems with -s."
            )
        return list(data.systems), data.rglob_patterns
    return args.system or ["."], None
