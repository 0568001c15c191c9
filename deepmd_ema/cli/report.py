"""``dp-ema report``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, file_to_write, num_frames, path
from deepmd_ema.utils import keep_freed_memory


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="RUN", type=path, nargs="?", default=".",
                        help="the folder of a run, which may still be training (this folder)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="HTML", default="report.html", type=file_to_write,
                        help="the page, with all pictures in it (report.html)")  # fmt: skip
    parser.add_argument("-n", "--numb-test", metavar="N", type=num_frames, default=0,
                        help="most frames of the validation data, and of the training data (0: all for validation, as "
                        "many for training)")  # fmt: skip
    parser.add_argument("--average", metavar="NAME", help="the average of which details are shown (the first one)")
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Write the page."""
    keep_freed_memory()
    with loading():
        from deepmd_ema.report.page import write_report

    remarks = write_report(args.folder, args.output, args.numb_test, args.device, args.average)
    print("\n".join([f"wrote {args.output}", *remarks]))
