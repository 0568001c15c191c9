"""``dp-ema test``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import (
    EVALUATED,
    add_device,
    add_systems,
    add_weights,
    chosen_systems,
    file_to_write,
    num_frames,
    num_steps,
    path,
    positive,
)
from deepmd_ema.errors import UserError
from deepmd_ema.utils import keep_freed_memory

if TYPE_CHECKING:
    from deepmd_ema.infer.evaluate import ErrorReport
    from deepmd_ema.infer.physics import PhysicsReport
    from deepmd_ema.model.metrics import Errors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-m", "--model", metavar="MODEL", type=path, default="frozen_model.dp",
                        help=f"a .pt checkpoint or a frozen .dp, .yaml or {EVALUATED} (frozen_model.dp)")  # fmt: skip
    add_systems(parser)
    parser.add_argument("-n", "--numb-test", metavar="N", type=num_frames, default=0,
                        help="frames of each system, from its first (0: all)")  # fmt: skip
    parser.add_argument("-d", "--detail-file", metavar="PREFIX", type=file_to_write,
                        help="write PREFIX.e.out, .f.out, .v.out, ... per frame")  # fmt: skip
    parser.add_argument("-a", "--atomic", action="store_true", help="test atomic energies as well")
    parser.add_argument("--plot", metavar="PNG", nargs="?", const="parity.png", type=file_to_write,
                        help="parity plots (parity.png)")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="compile the model first: for many frames; needs g++")
    parser.add_argument("--physics", action="store_true",
                        help="dynamics, bond scans and cutoff as well (doc/physics.md)")  # fmt: skip
    parser.add_argument("--temperature", metavar="K", type=positive,
                        help="with --physics: of the run without thermostat, half of the other (300)")  # fmt: skip
    parser.add_argument("--md-steps", metavar="N", type=num_steps, help="with --physics: steps of each run (1 ps)")
    parser.add_argument("--time-step", metavar="FS", type=positive,
                        help="with --physics: in femtoseconds (0.5 with hydrogen, else 1)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    add_weights(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Print the errors, and the physics where requested, and write the requested files."""
    names = ("temperature", "md_steps", "time_step")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if options and not args.physics:
        problems = [f"--{name.replace('_', '-')}: no effect without --physics." for name in options]
        raise UserError([f"{problem} Add it, or leave this out." for problem in problems])
    keep_freed_memory()
    with loading():
        from deepmd_ema.infer.evaluate import measure, refuse_details
        from deepmd_ema.infer.physics import PhysicsOptions, measure_physics

    if args.detail_file is not None:
        refuse_details(args.detail_file)
    if args.plot is not None:
        from deepmd_ema.report.plots import picture_file

        picture_file(args.plot, "--plot")
    systems, patterns = chosen_systems(args, ["."])
    weights = (args.use_ema, args.average, args.head, args.device)
    report = measure(args.model, systems, args.numb_test, args.atomic, *weights, patterns, args.compile)
    if not args.json:
        print(report.text(), flush=True)
    physics = None
    if args.physics:
        physics = measure_physics(args.model, report, PhysicsOptions(**options), *weights)
    if args.json:
        print(json.dumps(_document(report, physics), indent=2))
    elif physics is not None:
        print(physics.text())
    written = [] if args.detail_file is None else report.write_details(args.detail_file)
    written += [] if args.plot is None else [report.plot(args.plot)]
    if written:
        print(f"wrote {', '.join(map(str, written))}", file=sys.stderr if args.json else sys.stdout)


def _document(report: ErrorReport, physics: PhysicsReport | None) -> dict[str, Any]:
    """Return errors in the units of ``labels.QUANTITIES``, and physics, as values of JSON; None where there is none."""

    def numbers(errors: Errors) -> dict[str, float | None]:
        return {name: None if math.isnan(value) else value for name, value in errors.summary().items()}

    return {
        "model": str(report.info.path),
        "weights": report.info.describe(),
        "errors": numbers(report.total),
        "systems": {name: numbers(errors) for name, errors in report.by_system.items()},
        "physics": None if physics is None else physics.document(),
    }
