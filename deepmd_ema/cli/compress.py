"""``dp-ema compress``."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_deepmd_kit, file_to_write, path, with_suffix_of_backend
from deepmd_ema.cli.streams import say
from deepmd_ema.errors import UserError, command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("-i", "--input", metavar="FILE", type=path, default="frozen_model",
                        help="a .pt2, or a .pth or .pte, which an installed DeePMD-kit compresses "
                        "(frozen_model.pth)")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=file_to_write, default="frozen_model_compressed",
                        help="of the same kind (frozen_model_compressed.pth)")  # fmt: skip
    parser.add_argument("--device", metavar="D", help="of a .pt2: cpu, cuda (default: CUDA when there is one)")
    add_deepmd_kit(parser)


def run(args: argparse.Namespace) -> None:
    """Write the file and print what it holds."""
    source, target = (
        Path(with_suffix_of_backend(name, args.backend or "pytorch")) for name in (args.input, args.output)
    )
    suffix = source.suffix.lower()
    if suffix not in (".pt2", ".pth", ".pte"):
        raise UserError(
            f"-i {source}: expected a .pt2, .pth or .pte file. The networks of a .dp or a checkpoint need no tables in "
            "the file: dp-ema makes them when it evaluates; `dp-ema freeze -o model.pt2` compiles them."
        )
    if target.suffix.lower() != suffix:
        raise UserError(f"-o {target}: expected a name that ends in {suffix}, as {source} does.")
    if not source.is_file():
        raise UserError(f"-i {source}: is not there. Freeze a model first: {command('dp-ema', 'freeze', '-o', source)}")
    with loading():
        from deepmd_ema.interop.freeze import compress

    say(compress(source, target, args.device, args.dp))
