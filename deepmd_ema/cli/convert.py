"""``dp-ema convert``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_deepmd_kit, add_weights, number_below, path, seed_number
from deepmd_ema.cli.streams import say
from deepmd_ema.errors import UserError

if TYPE_CHECKING:
    from deepmd_ema.data.convert import Predictor
    from deepmd_ema.data.formats.properties import StoredFrame
    from deepmd_ema.geometry import Array

_OF_MODELS = ("to", "head", "use_ema", "average", "dp")
_OF_DATA = ("labels_of", "validation", "mixed", "format", "seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("input", metavar="IN", type=path, nargs="+",
                        help="a model: a .pt of dp-ema or DeePMD-kit, the folder of a run, a .dp, a .yaml; or data: "
                        "what `train` reads (folders, a.xyz#energy=REF_energy), and files that ASE reads")  # fmt: skip
    parser.add_argument(
        "output",
        metavar="OUT",
        type=path,
        help="of a model: a .dp, a .yaml, a .pt2, a .pt (see --to), or a .pth (written by an installed "
        "DeePMD-kit); of data: a new folder, or a new .xyz or .extxyz",
    )
    models = parser.add_argument_group("models")
    models.add_argument("--to", choices=("dp-ema", "deepmd"), help="whose .pt is written: a file of dp-ema with the "
                        "weights of a model (default), or a checkpoint of DeePMD-kit (backend pt) with all models of "
                        "IN, or that of --head")  # fmt: skip
    add_weights(models)
    add_deepmd_kit(models)
    data = parser.add_argument_group("data")
    data.add_argument("--labels-of", metavar="MODEL", type=path,
                      help="write energies, forces and virials of a model in place of the labels of IN, which needs "
                      "none; --use-ema, --average and --head choose its weights")  # fmt: skip
    data.add_argument("--validation", metavar="SHARE", type=number_below(1, "a share of the frames, such as 0.1"),
                      help="keep this share of the frames of each kind apart, near copies together")  # fmt: skip
    data.add_argument("--seed", metavar="N", type=seed_number, help="of the random choice of these frames (1)")
    data.add_argument(
        "--mixed",
        action="store_true",
        help="one system for all frames of one size (real_atom_types.npy), not per composition",
    )
    data.add_argument(
        "--format", metavar="NAME", help="of ASE (vasp-out, vasp-xml, db, ...) or dpdata (cp2k/output, ...)"
    )


def run(args: argparse.Namespace) -> None:
    """Write the files and print lines about the content that was read and written."""
    from deepmd_ema.data.convert import convert_data, is_data

    takes_data = args.format is not None or any(is_data(name, args.output) for name in args.input)
    refused, kind = (_OF_MODELS, "models, and these are data") if takes_data else (
        _OF_DATA, f"data, and {args.input[0]} is a model or does not exist")  # fmt: skip
    weights = ("head", "use_ema", "average") if takes_data and args.labels_of is not None else ()
    for name in refused:
        if name not in weights and getattr(args, name) not in (None, False):
            raise UserError(f"convert --{name.replace('_', '-')}: is an option for {kind}. Remove it.")
    if takes_data:
        seed = 1 if args.seed is None else args.seed
        predict = None if args.labels_of is None else _predictor(args)
        lines = convert_data(args.input, args.output, args.validation or 0.0, args.mixed, args.format, seed, predict)
        say("\n".join(lines))
    else:
        if len(args.input) > 1:
            raise UserError(f"convert {' '.join(args.input)}: several models. Expected one, or files of data.")
        _convert_model(args)


def _predictor(args: argparse.Namespace) -> Predictor:
    """Return the function that evaluates the model of ``--labels-of`` for one frame."""
    with loading():
        from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
        from deepmd_ema.infer.load import load_model
        from deepmd_ema.infer.potential import Potential

    loaded = load_model(args.labels_of, args.use_ema, args.average, args.head)
    potential = Potential(loaded)
    say(f"labels of {loaded.info.path}: {loaded.info.describe()}, in place of those of the data")

    def predict(frame: StoredFrame, fparam: Array | None, aparam: Array | None) -> dict[str, Array]:
        found = potential.evaluate(frame.coord, frame.symbols, frame.box, fparam, aparam)
        labels = {ENERGY: found.energy[0], FORCE: found.force[0]}
        return labels if frame.box is None else {**labels, VIRIAL: found.virial[0]}

    return predict


def _convert_model(args: argparse.Namespace) -> None:
    """Write the file and print its source, its size, and the largest difference between the two."""
    with loading():
        from deepmd_ema.config import choose_head
        from deepmd_ema.infer.load import load_models
        from deepmd_ema.interop.freeze import WEIGHTS, convert

    is_weights = args.output.lower().endswith(WEIGHTS)
    if args.to is not None and not is_weights:
        raise UserError(f"--to {args.to}: chooses between files {WEIGHTS}, and OUT is {args.output}. Leave it out.")
    if args.dp is not None and is_weights:
        raise UserError(f"--dp {args.dp}: {args.output} is written without DeePMD-kit. Leave it out.")
    source, takes_all = args.input[0], args.to == "deepmd" and args.head is None
    file = load_models(source, args.use_ema, args.average,
                       lambda names: names if takes_all else [choose_head(names, args.head, source)])  # fmt: skip
    loaded = next(iter(file.models.values()))
    written = convert(file, args.output, args.to == "deepmd", args.dp)
    say(f"read {loaded.info.path}: {loaded.info.version}, elements {' '.join(loaded.config.type_map)}, "
        f"{loaded.config.descriptor.summary()}")  # fmt: skip
    say(f"wrote {written.text()}")
