"""``dp-ema convert``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.options import add_average, file_to_write, path, start_logging

SUMMARY = "a model file as another kind of model file"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("input", metavar="IN", type=path,
                        help="a .pt of dp-ema or DeePMD-kit, the folder of a run, a .dp, a .yaml")  # fmt: skip
    parser.add_argument("output", metavar="OUT", type=file_to_write,
                        help="a .dp, a .yaml, or a .pt with weights only")  # fmt: skip
    parser.add_argument("--head", "--model-branch", dest="head", metavar="NAME",
                        help="which model of a file of DeePMD-kit that holds several")  # fmt: skip
    add_average(parser)


def run(args: argparse.Namespace) -> None:
    """Write the file and print what was read, what was written, and how far it is from what was read."""
    start_logging(args)
    from deepmd_ema.export import convert
    from deepmd_ema.infer.load import load_model

    loaded = load_model(args.input, use_average=args.use_ema, average=args.average, head=args.head)
    written = convert(loaded, args.output)
    print(f"read {loaded.info.path}: {loaded.info.version}, elements {' '.join(loaded.config.type_map)}, "
          f"{loaded.config.descriptor.summary()}")  # fmt: skip
    print(f"wrote {written.text()}")
