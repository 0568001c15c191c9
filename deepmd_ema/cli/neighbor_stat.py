"""``dp-ema neighbor-stat``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_systems, chosen_systems, positive
from deepmd_ema.cli.streams import say


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_systems(parser)
    parser.add_argument("-r", "--rcut", metavar="RCUT", type=positive, required=True, help="cutoff radius in angstrom")
    parser.add_argument("-t", "--type-map", metavar="ELEMENT", nargs="+",
                        help="the elements, in the order of the numbers (default: those of type_map.raw)")  # fmt: skip
    parser.add_argument("--mixed-type", action="store_true", help="count neighbors of all elements together")


def run(args: argparse.Namespace) -> None:
    """Print the numbers."""
    with loading():
        from deepmd_ema.infer.neighbors import describe_neighbors

    systems, patterns = chosen_systems(args, ["."])
    say(describe_neighbors(systems, args.rcut, args.type_map, args.mixed_type, patterns))
