"""``dp-ema freeze``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_weights, file_to_write, path

SUMMARY = "write a checkpoint as a .dp file that DeePMD-kit reads, or compile it to a .pt2 file"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-c", "--checkpoint", "--checkpoint-folder", metavar="CKPT", type=path, default=".",
                        help="checkpoint, or the folder of a run with its latest (default: this folder)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", default="frozen_model.dp", type=file_to_write,
                        help="frozen_model.dp; a name that ends in .pt2 is compiled, which takes minutes")  # fmt: skip
    parser.add_argument("--device", metavar="D", help="of a .pt2: cpu, cuda (default: CUDA when there is one)")
    parser.add_argument("--compress", action=argparse.BooleanOptionalAction, default=None,
                        help="of a .pt2: tables of the embedding networks instead of the networks, or not (default: "
                        "on a CPU, where they are faster)")  # fmt: skip
    add_weights(parser)


def run(args: argparse.Namespace) -> None:
    """Write the file and print what it holds."""
    with loading():
        from deepmd_ema.export import freeze
        from deepmd_ema.infer.load import load_model

    loaded = load_model(args.checkpoint, use_average=args.use_ema, average=args.average, head=args.head)
    print(freeze(loaded, args.output, device=args.device, compress=args.compress).text())
