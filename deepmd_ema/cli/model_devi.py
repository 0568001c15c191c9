"""``dp-ema model-devi``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import (
    EVALUATED,
    add_device,
    add_systems,
    add_weights,
    chosen_systems,
    file_to_write,
    num_steps,
    path,
    positive,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-m", "--models", metavar="MODEL", type=path, nargs="+", action="extend", required=True,
                        help=f".pt checkpoints, folders of runs, frozen files: .dp, .yaml or {EVALUATED}")  # fmt: skip
    add_systems(parser, datafile=False)
    parser.add_argument("-o", "--output", metavar="FILE", type=file_to_write, default="model_devi.out",
                        help="table of all frames (model_devi.out)")  # fmt: skip
    parser.add_argument("-f", "--frequency", metavar="N", type=num_steps, default=1,
                        help="steps between two frames, for the column step (1)")  # fmt: skip
    parser.add_argument("--real_error", "--real-error", action="store_true",
                        help="root mean square errors of the models, not their deviations")  # fmt: skip
    parser.add_argument("--atomic", action="store_true", help="write the deviation of the force of each atom as well")
    parser.add_argument("--relative", metavar="LEVEL", type=positive,
                        help="divide by the length of the force plus LEVEL, in eV/angstrom")  # fmt: skip
    parser.add_argument("--relative_v", "--relative-v", metavar="LEVEL", type=positive,
                        help="divide by the length of the virial per atom plus LEVEL, in eV")  # fmt: skip
    add_weights(parser, several=True)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Write the table and print the models and the largest deviations."""
    with loading():
        from deepmd_ema.infer.deviation import DeviationOptions, measure_deviation, refuse_output

    refuse_output(args.output, args.models)
    options = DeviationOptions(args.real_error, args.atomic, args.relative, args.relative_v, args.frequency)
    systems, patterns = chosen_systems(args, ["."])
    averages = args.average or ()
    report = measure_deviation(
        args.models, systems, options, args.use_ema, averages, args.head, device=args.device, rglob_patterns=patterns
    )
    print(report.text())
    print(f"wrote {report.write(args.output)}")
