"""``dp-ema freeze``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_deepmd_kit, add_weights, file_to_write, path, with_suffix_of_backend
from deepmd_ema.cli.streams import say
from deepmd_ema.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-c", "--checkpoint", "--checkpoint-folder", metavar="CKPT", type=path, default=".",
                        help="checkpoint, or the folder of a run with its latest (default: this folder)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", default="frozen_model", type=file_to_write,
                        help="frozen_model.dp (`dp-ema --pt freeze`: frozen_model.pth); a name that ends in .pt2 is "
                        "compiled, which takes minutes; .pth, .pte and .pb are written by DeePMD-kit")  # fmt: skip
    parser.add_argument("--device", metavar="D", help="of a .pt2: cpu, cuda (default: CUDA when there is one)")
    parser.add_argument("--compress", action=argparse.BooleanOptionalAction, default=None,
                        help="of a .pt2: tables of the embedding networks instead of the networks, or not (default: "
                        "on a CPU, where they are faster)")  # fmt: skip
    parser.add_argument("--lower-kind", choices=["nlist", "graph"], default=None,
                        help="of a .pt2, as DeePMD-kit calls it: nlist is the one that is written")  # fmt: skip
    add_deepmd_kit(parser)
    add_weights(parser)


def run(args: argparse.Namespace) -> None:
    """Write the file and print what it holds."""
    with loading():
        from deepmd_ema.infer.load import load_model
        from deepmd_ema.interop.freeze import freeze

    output = with_suffix_of_backend(args.output, args.backend)
    if args.lower_kind == "graph":
        raise UserError(
            f"--lower-kind graph: {output} takes neighbor lists (nlist), which LAMMPS gives to every descriptor that "
            "dp-ema has. Use --lower-kind nlist, or leave it out."
        )
    if args.lower_kind is not None and output.endswith((".dp", ".yaml", ".yml")):
        raise UserError(f"--lower-kind {args.lower_kind}: {output} holds the model, not a graph of it. Leave it out.")
    loaded = load_model(args.checkpoint, use_average=args.use_ema, average=args.average, head=args.head)
    say(freeze(loaded, output, device=args.device, compress=args.compress, program=args.dp).text())
