"""Commands about inputs: init, check, doc."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.streams import say, say_error
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.errors import ReportedElsewhere, UserError
from deepmd_ema.files import atomic_write
from deepmd_ema.text import command, first_few

SUFFIXES = (".yaml", ".yml", ".json")
_MAX_LINES = 20  # lines about a conversion


def init(args: argparse.Namespace) -> None:
    """Write the input and print the choices."""
    file = Path(args.output)
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"-o {file}: expected a file that ends in {', '.join(SUFFIXES)}."
        )
    if file.exists():
        raise UserError(
            f"{file}: is there already. Name another file with -o, or remove it."
        )
    if not os.access(
        file.parent, os.W_OK
    ):  # --hours measures before the file is written
        raise UserError(
            f"-o {file}: {file.parent} is no folder that can be written to. Make it, or name "
            "another."
        )
    if args.finetune is None:
        idle = {"--replay": args.replay, "--head": args.head, "--train": args.train}
        why = "is an option for fine-tuning. Name the model with --finetune, or leave it out."
    else:
        idle = {"--model": args.model, "--size": args.size, "--rcut": args.rcut}
        why = "the model is that of --finetune. Leave it out."
    if without_effect := [option for option, value in idle.items() if value]:
        raise UserError(f"init {without_effect[0]}: {why}")
    with loading():
        from deepmd_ema.commands.propose import Wishes, propose
    wishes = {wish.name: getattr(args, wish.name) for wish in fields(Wishes)}
    # data, and the end of the name of the folder that they are converted to
    for name, ending in (
        ("systems", "data"),
        ("validation", "validation"),
        ("test", "test"),
        ("replay", "replay"),
    ):
        wishes[name] = _converted(wishes[name], file, ending, args.format, args.units)
    # None leaves the choice, or the default of Wishes
    wishes = {name: value for name, value in wishes.items() if value is not None}
    proposal = propose(Wishes(**wishes))
    with atomic_write(file) as part:
        part.write_text(proposal.text(file), encoding="utf-8")
    start = ["--finetune", args.finetune] if args.finetune else []
    lines = [
        f"wrote {file}",
        *(f"  {line}" for line in proposal.head[1:]),
        *(f"  warning: {line}" for line in proposal.warnings),
        f"  next      {command('dp-ema', 'check', file)}",
        f"            {command('dp-ema', 'train', *start, file)}",
    ]
    say("\n".join(lines))


def _converted(
    paths: Sequence[str],
    file: Path,
    ending: str,
    file_format: str | None,
    units: str | None,
) -> list[str]:
    """Return data to train on: files of other programs become one folder beside the input.

    Args:
        paths: paths of data; with a format or units all of them are converted.
        file: the input.
        ending: end of the name of the new folder.
        file_format: as for ``convert_data``.
        units: as for ``convert_data``.

    Raises:
        UserError: if the folder is there, or files cannot be read.
    """
    from deepmd_ema.data.convert import convert_data
    from deepmd_ema.data.formats.discover import split_address
    from deepmd_ema.data.formats.programs import needs_conversion

    foreign = [path for path in paths if file_format or units or needs_conversion(path)]
    if not foreign:
        return list(paths)
    stem = split_address(foreign[0])[0].stem
    folder = str(file.with_name(f"{stem}_{ending}"))
    files = first_few(foreign, 3)
    if os.path.lexists(folder):
        problem = f"{folder}: is there already, and {files} would be converted to it"
        raise UserError(
            f"{problem}. Give the folder in place of the files, or remove it."
        )
    lines = convert_data(foreign, folder, file_format=file_format, units=units)
    shown = [f"converted {files} to {folder}, as `dp-ema convert` does"]
    shown += [f"  {line}" for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        shown.append(f"  ... and {len(lines) - _MAX_LINES} more lines")
    say("\n".join(shown))
    return list(dict.fromkeys(folder if path in foreign else path for path in paths))


def check(args: argparse.Namespace) -> None:
    """Print the report, section by section as it becomes known, or as one document.

    An input with problems has a report too.

    Raises:
        UserError: if there are problems, with ``--json`` as the cause of a
            :class:`ReportedElsewhere`.
    """
    from deepmd_ema.commands.check import (
        RunCheck,
        closing_lines,
        cost_lines,
        data_lines,
        document,
        plan_lines,
    )
    from deepmd_ema.config import as_launched, read_input

    def show(*parts: Iterable[str]) -> None:
        if not args.json:
            say("\n".join(line for part in parts for line in part))

    run = None
    problem = None
    try:
        file = read_input(args.input)
        # the data of a wrong input are checked as far as they are known, and the mistakes in them
        # reported with those of the input
        if file.mistakes and not args.config_only:
            with loading():
                from deepmd_ema.data.run import checked_config
            checked_config(file)
        run = RunCheck(as_launched(file.config, find_launch().launched))
        show([f"{args.input}: the options are good"])
        if args.config_only:
            show(plan_lines(run))
        else:
            with loading():
                from deepmd_ema.training.estimate import measure_steps
            run.read_data()
            show(data_lines(run), plan_lines(run))
            if args.time and not run.problems and run.config.training.numb_steps != 0:
                run.cost = measure_steps(run.config, args.device)
            show(cost_lines(run))
            run.raise_problems()
    except UserError as error:
        problem = error
        # the plan comes after the data, unless these could not be read
        if run is not None and not run.reports:
            show(plan_lines(run))
    if run is not None:
        show(closing_lines(run))
    if args.json:
        findings = problem.findings if problem else []
        say(json.dumps(document(args.input, run, findings), indent=2), is_fitted=False)
    if problem is not None:
        if args.json:
            raise ReportedElsewhere from problem
        raise problem
    if not args.json and not args.config_only:
        say(f"\nnext: {command('dp-ema', 'train', args.input)}")


def doc(args: argparse.Namespace) -> None:
    """Print the manual, one option of it, or the schema."""
    from deepmd_ema.config.manual import json_schema_text, manual
    from deepmd_ema.config.schema.averaging import AVERAGES
    from deepmd_ema.config.schema.descriptor import DESCRIPTORS
    from deepmd_ema.config.schema.loggers import LOGGERS

    for what, section, registry in (
        ("descriptor", "descriptor", DESCRIPTORS),
        ("average", "averaging", AVERAGES),
        ("logger", "loggers", LOGGERS),
    ):
        for name, fault in (
            registry.faults.items() if section in (args.option or section) else ()
        ):
            say_error(f'{what} "{name}" is not listed: {fault}')
    say(
        json_schema_text() if args.json_schema else manual(args.option), is_fitted=False
    )
