"""``dp-ema plot``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.options import file_to_write, path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("files", metavar="FILE", type=path, nargs="+",
                        help="lcurve.out, val.log, val_ema.log, ..., or folders of runs")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="PNG", default="curves.png", type=file_to_write,
                        help="curves.png")  # fmt: skip
    parser.add_argument("--log-steps", action="store_true", help="a logarithmic axis of steps")


def run(args: argparse.Namespace) -> None:
    """Draw the curves."""
    from deepmd_ema.report.plots import plot_curves

    print(f"wrote {plot_curves(args.files, args.output, args.log_steps)}")
