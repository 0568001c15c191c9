"""``dp-ema posthoc``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, add_head, add_systems, chosen_systems, file_to_write, path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=path, help="the folder in which the run was started")
    parser.add_argument("--sigma-rel", metavar="S", nargs="+", action="extend",
                        help="lengths: 0.05, several, or a range: 0.02:0.2, 0.02:0.2:9 (9 lengths)")  # fmt: skip
    parser.add_argument("--shapes", metavar="SHAPE", nargs="+", action="extend",
                        help="decays of the learning rate over the last part of the run: linear, cosine, 1-sqrt, "
                        "linear:0.2 (over the last 20 %%), or none (default: all, unless --sigma-rel is "
                        "given)")  # fmt: skip
    parser.add_argument("--step", metavar="N", type=int,
                        help="the last step to average over (default: newest snapshot)")  # fmt: skip
    parser.add_argument("--metric", metavar="M", default="overall",
                        help="what best means: E:RMSE, F:RMSE, V:RMSE, S:RMSE, ...:MAE, or overall, the mean RMSE of "
                        "E, F and V as a part of that of the live weights (overall)")  # fmt: skip
    add_systems(parser, "validation data of the run", datafile=False)
    parser.add_argument("-o", "--output", metavar="FILE", type=file_to_write,
                        help="model of the best average (RUN_DIR/model_posthoc.pt)")  # fmt: skip
    parser.add_argument(
        "--plot", metavar="PNG", type=file_to_write, help="errors over the length (RUN_DIR/posthoc.png)"
    )
    parser.add_argument("--table", metavar="CSV", type=file_to_write, help="all numbers (RUN_DIR/posthoc.csv)")
    add_head(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Print the errors over the length, and write the best average, the table and the picture."""
    with loading():
        from deepmd_ema.averaging.posthoc.run import run_posthoc

    systems, patterns = chosen_systems(args, [])
    run_posthoc(
        args.run_dir,
        args.sigma_rel,
        args.step,
        shapes=args.shapes,
        metric=args.metric,
        systems=systems or None,
        rglob_patterns=patterns,
        output=args.output,
        plot=args.plot,
        table=args.table,
        head=args.head,
        device=args.device,
        say=print,
    )
