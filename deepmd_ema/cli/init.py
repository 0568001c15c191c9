"""``dp-ema init``."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, add_head, file_to_write, num_run_steps, path, positive
from deepmd_ema.cli.streams import say
from deepmd_ema.config.presets import KINDS, SIZES
from deepmd_ema.distributed.files import atomic_write
from deepmd_ema.errors import UserError, command

MODEL_NAMES = ("se_e2_a", "se_atten_v2", "dpa4c")  # of presets/models.yaml, which takes time to read
SUFFIXES = (".yaml", ".yml", ".json")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("systems", metavar="DATA", type=path, nargs="+",
                        help="training data: folders of systems, .extxyz, .h5, .lmdb")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=file_to_write, default="input.yaml",
                        help="the input: .yaml with comments, or .json (input.yaml)")  # fmt: skip
    parser.add_argument("--validation", metavar="DATA", type=path, nargs="+", action="extend", default=[],
                        help="validation data (default: a tenth of the frames, near copies kept together)")  # fmt: skip
    parser.add_argument("--model", choices=MODEL_NAMES,
                        help="which model (default: se_e2_a for up to 4 elements, else se_atten_v2)")  # fmt: skip
    parser.add_argument("--size", choices=SIZES, help="of the model (M)")
    parser.add_argument("--kind", choices=KINDS,
                        help="of the data, which chooses the recipe (default: found by bonds and cells)")  # fmt: skip
    parser.add_argument("--rcut", metavar="R", type=positive, help="cutoff radius in angstrom (6)")
    parser.add_argument("-t", "--type-map", metavar="ELEMENT", nargs="+",
                        help="the elements, where the data have numbers only")  # fmt: skip
    parser.add_argument("--finetune", metavar="FILE", type=path,
                        help="fine-tune the model of this file, at a lower rate")  # fmt: skip
    parser.add_argument("--replay", metavar="DATA", type=path, nargs="+", action="extend", default=[],
                        help="with --finetune: data that the model was trained on, or frames that it has labelled "
                        "(convert --labels-of), in 30 %% of the steps, so that it forgets less")  # fmt: skip
    add_head(parser)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", metavar="N", type=num_run_steps, help="steps of the run (default: those of the recipe)"
    )
    length.add_argument("--hours", metavar="H", type=positive,
                        help="time of the run on this machine; some steps are measured")  # fmt: skip
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Write the input and print what was chosen."""
    file = Path(args.output)
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(f"-o {file}: expected a file that ends in {', '.join(SUFFIXES)}.")
    if file.exists():
        raise UserError(f"{file}: is there already. Name another file with -o, or remove it.")
    if not os.access(file.parent, os.W_OK):  # --hours measures before the file is written
        raise UserError(f"-o {file}: {file.parent} is no folder that can be written to. Make it, or name another.")
    if args.finetune is None:
        idle = {"--replay": args.replay, "--head": args.head}
        why = "is an option for fine-tuning. Name the model with --finetune, or leave it out."
    else:
        idle = {"--model": args.model, "--size": args.size, "--rcut": args.rcut}
        why = "the model is that of --finetune. Leave it out."
    if without_effect := [option for option, value in idle.items() if value]:
        raise UserError(f"init {without_effect[0]}: {why}")
    with loading():
        from deepmd_ema.report.propose import Wishes, propose
    given = {wish.name: getattr(args, wish.name) for wish in fields(Wishes)}
    proposal = propose(Wishes(**{name: value for name, value in given.items() if value is not None}))
    with atomic_write(file) as part:
        part.write_text(proposal.text(file), encoding="utf-8")
    start = ["--finetune", args.finetune] if args.finetune else []
    say("\n".join([f"wrote {file}", *(f"  {line}" for line in proposal.head[1:]),
                   *(f"  warning: {line}" for line in proposal.warnings),
                   f"  next      {command('dp-ema', 'check', file)}",
                   f"            {command('dp-ema', 'train', *start, file)}"]))  # fmt: skip
