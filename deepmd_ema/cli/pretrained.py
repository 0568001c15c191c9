"""``dp-ema pretrained``."""

from __future__ import annotations

import argparse
from pathlib import Path

from deepmd_ema.cli.options import path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="a model to download; `download NAME` is the same")
    text = "where the file is written (~/.cache/deepmd/pretrained/models, which DeePMD-kit has too)"
    parser.add_argument("-o", "--cache-dir", metavar="FOLDER", type=path, help=text)


def run(args: argparse.Namespace) -> None:
    """Download models, or print all, and for each file that is here or was downloaded that its digest is right.

    Raises:
        CheckpointError: if such a file has another digest, or cannot be downloaded.
    """
    from deepmd_ema.interop.pretrained import DOWNLOADS, PUBLISHED, check_digest, download

    folder = None if args.cache_dir is None else Path(args.cache_dir)
    for name in args.names[args.names[:1] == ["download"] :]:
        print(f"{download(name, folder)}: {name}, sha256 verified", flush=True)
    if args.names:
        return
    for model in PUBLISHED:
        print(f"{model.name} ({model.descriptor})\n  file    {model.file}\n  from    {model.urls[0]}")
        print(f"  sha256  {model.sha256}", flush=True)
        for place in (folder or Path(), DOWNLOADS):
            if check_digest(place / model.file):
                print(f"  here    {place / model.file}, sha256 verified", flush=True)
    print("Download: dp-ema pretrained NAME. Elements, heads and size of a file: dp-ema show FILE\n"
          "Fine-tune: dp-ema train INPUT --finetune NAME --model-branch HEAD --use-pretrain-script")  # fmt: skip
