"""``dp-ema test``."""

from __future__ import annotations

import argparse

from deepmd_ema.allocator import keep_freed_memory
from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import (
    EVALUATED,
    add_device,
    add_systems,
    add_weights,
    chosen_systems,
    file_to_write,
    num_frames,
    path,
)

SUMMARY = "errors of a model on labelled frames"


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
    add_weights(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Print the errors and write the requested files."""
    keep_freed_memory()
    with loading():
        from deepmd_ema.infer.evaluate import measure, refuse_details

    if args.detail_file is not None:
        refuse_details(args.detail_file)
    if args.plot is not None:
        from deepmd_ema.report.plots import picture_file

        picture_file(args.plot, "--plot")
    systems, patterns = chosen_systems(args, ["."])
    report = measure(
        args.model,
        systems,
        num_frames=args.numb_test,
        atomic=args.atomic,
        use_average=args.use_ema,
        average=args.average,
        head=args.head,
        device=args.device,
        rglob_patterns=patterns,
        compiled=args.compile,
    )
    print(report.text())
    if args.detail_file is not None:
        print(f"wrote {', '.join(map(str, report.write_details(args.detail_file)))}")
    if args.plot is not None:
        print(f"wrote {report.plot(args.plot)}")
