"""Commands about files of models: freeze, compress, convert, show, change-bias, pretrained."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.streams import say
from deepmd_ema.config.outputs import is_sharded
from deepmd_ema.errors import UserError
from deepmd_ema.text import command

if TYPE_CHECKING:
    from deepmd_ema.data.convert import Predictor
    from deepmd_ema.data.formats.properties import StoredFrame
    from deepmd_ema.geometry import Array

_SUFFIXES = (
    ".dp",
    ".yaml",
    ".yml",
    ".pt2",
    ".pth",
    ".pte",
    ".pb",
    ".savedmodel",
    ".savedmodeltf",
)
# suffixes of the files that `dp freeze` writes where the output has none
BACKEND_SUFFIXES = {"pytorch": ".pth", "pytorch-exportable": ".pte", None: ".dp"}
# options of `convert` for models, and for data
_OF_MODELS = ("to", "head", "use_ema", "average", "dp")
_OF_DATA = ("labels_of", "validation", "mixed", "format", "units", "seed", "sel_type")


def freeze(args: argparse.Namespace) -> None:
    """Write the file and print what it holds."""
    with loading():
        from deepmd_ema.commands.freeze import freeze
        from deepmd_ema.infer.load import load_model

    output = with_suffix_of_backend(args.output, args.backend)
    if args.lower_kind == "graph":
        raise UserError(
            f"--lower-kind graph: {output} takes neighbor lists (nlist), which LAMMPS gives to "
            "every descriptor that dp-ema has. Use --lower-kind nlist, or leave it out."
        )
    if args.lower_kind is not None and output.endswith((".dp", ".yaml", ".yml")):
        raise UserError(
            f"--lower-kind {args.lower_kind}: {output} holds the model, not a graph of it. Leave "
            "it out."
        )
    loaded = load_model(
        args.checkpoint, use_average=args.use_ema, average=args.average, head=args.head
    )
    say(
        freeze(
            loaded, output, device=args.device, compress=args.compress, program=args.dp
        ).text()
    )


def compress(args: argparse.Namespace) -> None:
    """Write the file and print what it holds."""
    backend = args.backend or "pytorch"
    source = Path(with_suffix_of_backend(args.input, backend))
    target = Path(with_suffix_of_backend(args.output, backend))
    suffix = source.suffix.lower()
    if suffix not in (".pt2", ".pth", ".pte"):
        raise UserError(
            f"-i {source}: expected a .pt2, .pth or .pte file. The networks of a .dp or a "
            "checkpoint need no tables in the file: dp-ema makes them when it evaluates; `dp-ema "
            "freeze -o model.pt2` compiles them."
        )
    if target.suffix.lower() != suffix:
        raise UserError(
            f"-o {target}: expected a name that ends in {suffix}, as {source} does."
        )
    if not source.is_file():
        raise UserError(
            f"-i {source}: is not there. Freeze a model first: "
            f"{command('dp-ema', 'freeze', '-o', source)}"
        )
    with loading():
        from deepmd_ema.commands.freeze import compress

    say(compress(source, target, args.device, args.dp))


def change_bias(args: argparse.Namespace) -> None:
    """Write the file and print the bias before and after."""
    with loading():
        from deepmd_ema.commands.change_bias import CHANGE, BiasRequest, write_changed

    if args.bias_value is not None:
        if args.mode is not None or args.num_frames is not None:
            raise UserError(
                "-b: the bias is what you give; -m and -n are for a fit to data. Leave them out."
            )
        request = BiasRequest(values=args.bias_value)
    else:
        request = BiasRequest(
            args.mode or CHANGE,
            args.systems,
            args.num_frames or 0,
            source=args.datafile or "",
        )
    change = write_changed(
        args.input,
        request,
        args.output,
        args.use_ema,
        args.average,
        args.head,
        args.device,
    )
    say(change.text())


def convert(args: argparse.Namespace) -> None:
    """Write the files and print lines about the content that was read and written."""
    from deepmd_ema.data.convert import convert_data, is_data

    if args.output is None:
        if len(args.input) < 2:
            raise UserError(
                f"convert {args.input[0]}: no output is named. Name it after the input, or with -o."
            )
        args.output = args.input.pop()
    takes_data = args.format is not None or any(
        is_data(name, args.output) for name in args.input
    )
    refused = _OF_MODELS if takes_data else _OF_DATA
    kind = f"data, and {args.input[0]} is a model or does not exist"
    if takes_data:
        kind = "models, and these are data"
    # options of the model that makes labels for data
    weights = (
        ("head", "use_ema", "average")
        if takes_data and args.labels_of is not None
        else ()
    )
    for name in refused:
        if name not in weights and getattr(args, name) not in (None, False):
            raise UserError(
                f"convert --{name.replace('_', '-')}: is an option for {kind}. Remove it."
            )
    if takes_data:
        seed = 1 if args.seed is None else args.seed
        predict = None if args.labels_of is None else _predictor(args)
        lines = convert_data(
            args.input,
            args.output,
            args.validation or 0.0,
            args.mixed,
            args.format,
            seed,
            predict,
            args.units,
            args.sel_type,
        )
        say("\n".join(lines))
    else:
        if len(args.input) > 1:
            raise UserError(
                f"convert {' '.join(args.input)}: several models. Expected one, or files of data."
            )
        _convert_model(args)


def _predictor(args: argparse.Namespace) -> Predictor:
    """Return the function that evaluates the model of ``--labels-of`` for one frame."""
    with loading():
        from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
        from deepmd_ema.infer.load import load_model
        from deepmd_ema.infer.potential import Potential

    loaded = load_model(args.labels_of, args.use_ema, args.average, args.head)
    potential = Potential(loaded)
    say(
        f"labels of {loaded.info.path}: {loaded.info.describe()}, in place of those of the data"
    )

    def predict(
        frame: StoredFrame, fparam: Array | None, aparam: Array | None
    ) -> dict[str, Array]:
        prediction = potential.evaluate(
            frame.coord, frame.symbols, frame.box, fparam, aparam
        )
        labels = {ENERGY: prediction.energy[0], FORCE: prediction.force[0]}
        return labels if frame.box is None else {**labels, VIRIAL: prediction.virial[0]}

    return predict


def _convert_model(args: argparse.Namespace) -> None:
    """Write the file and print its source, its size, and the largest difference between the two."""
    with loading():
        from deepmd_ema.commands.freeze import WEIGHTS, convert
        from deepmd_ema.config import choose_head
        from deepmd_ema.infer.load import load_models

    is_weights = args.output.lower().endswith(WEIGHTS)
    if args.to is not None and not is_weights:
        raise UserError(
            f"--to {args.to}: chooses between files {WEIGHTS}, and OUT is {args.output}. Leave it "
            "out."
        )
    if args.dp is not None and is_weights:
        raise UserError(
            f"--dp {args.dp}: {args.output} is written without DeePMD-kit. Leave it out."
        )
    source = args.input[0]
    # a checkpoint of DeePMD-kit can hold all models of a file, other formats hold one
    takes_all = args.to == "deepmd" and args.head is None
    file = load_models(
        source,
        args.use_ema,
        args.average,
        lambda names: names if takes_all else [choose_head(names, args.head, source)],
    )
    loaded = next(iter(file.models.values()))
    written = convert(file, args.output, args.to == "deepmd", args.dp)
    say(
        f"read {loaded.info.path}: {loaded.info.version}, elements "
        f"{' '.join(loaded.config.type_map)}, {loaded.config.descriptor.summary()}"
    )
    say(f"wrote {written.text()}")


def show(args: argparse.Namespace) -> None:
    """Print the content of the file, or the status of the run."""
    folder = Path(args.file)
    if folder.is_dir() and not args.config and not is_sharded(folder):
        from deepmd_ema.report.status import RunStatus

        status = RunStatus(folder)
        if args.json:
            say(json.dumps(status.to_dict(), indent=2))
        else:
            say(status.text())
        return
    if args.json:
        raise UserError(
            f"--json {args.file}: prints the status of a run. Give its folder, or leave --json out."
        )
    with loading():
        from deepmd_ema.commands.show import describe

    text = describe(args.file, whole_config=args.config)
    say(text, is_fitted=not args.config)


def pretrained(args: argparse.Namespace) -> None:
    """Download models, or print all, and the files of which the digest was verified.

    Raises:
        CheckpointError: if such a file has another digest, or cannot be downloaded.
    """
    from deepmd_ema.interop.pretrained import (
        DOWNLOADS,
        PUBLISHED,
        check_digest,
        download,
    )

    folder = None if args.cache_dir is None else Path(args.cache_dir)
    # DeePMD-kit has `dp pretrained download NAME`
    names = args.names[1:] if args.names[:1] == ["download"] else args.names
    for name in names:
        say(f"{download(name, folder)}: {name}, sha256 verified")
    if args.names:
        return
    for model in PUBLISHED:
        say(
            f"{model.name} ({model.descriptor})\n  file    {model.file}\n  from    {model.urls[0]}"
        )
        say(f"  sha256  {model.sha256}")
        for place in (folder or Path(), DOWNLOADS):
            if check_digest(place / model.file):
                say(f"  here    {place / model.file}, sha256 verified")
    say(
        "Download: dp-ema pretrained NAME. Elements, heads and size of a file: dp-ema show FILE\n"
        "Fine-tune: dp-ema train INPUT --finetune NAME --model-branch HEAD --use-pretrain-script"
    )


def with_suffix_of_backend(name: str, backend: str | None) -> str:
    """Return the name of a model file, with the suffix of the backend if it has none."""
    # a name such as water.v2 has no suffix
    return (
        name
        if Path(name).suffix.lower() in _SUFFIXES
        else name + BACKEND_SUFFIXES[backend]
    )
