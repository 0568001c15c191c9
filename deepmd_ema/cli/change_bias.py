"""``dp-ema change-bias``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, add_systems, add_weights, chosen_systems, file_to_write, num_frames, path
from deepmd_ema.cli.streams import say
from deepmd_ema.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "input", metavar="INPUT", type=path, help="a .pt checkpoint, the folder of a run, or a .dp or .yaml file"
    )
    what = add_systems(parser, valid_data=False)
    what.add_argument("-b", "--bias-value", metavar="EV", type=float, nargs="+",
                      help="the bias itself, one energy in eV per element in the order of type_map")  # fmt: skip
    parser.add_argument("-n", "--num-frames", "--numb-batch", dest="num_frames", metavar="N", type=num_frames,
                        help="frames of each system, from its first (0: all)")  # fmt: skip
    parser.add_argument("-m", "--mode", choices=("change", "set"),
                        help="change (default): add a fit of label minus prediction; set: fit the labels")  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="OUT", type=file_to_write, help="default: <stem>_updated<suffix> beside INPUT"
    )
    add_weights(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Write the file and print the bias before and after."""
    with loading():
        from deepmd_ema.infer.change_bias import CHANGE, BiasRequest, write_changed

    if args.bias_value is not None:
        if args.mode is not None or args.num_frames is not None:
            raise UserError("-b: the bias is what you give; -m and -n are for a fit to data. Leave them out.")
        request = BiasRequest(values=args.bias_value)
    else:
        systems, _ = chosen_systems(args, ["."])
        request = BiasRequest(args.mode or CHANGE, systems, num_frames=args.num_frames or 0, source=args.datafile or "")
    say(write_changed(args.input, request, args.output, args.use_ema, args.average, args.head, args.device).text())
