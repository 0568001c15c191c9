"""``dp-ema pretrained``."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "list published models that can be fine-tuned; nothing is downloaded"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command: it has none."""


def run(args: argparse.Namespace) -> None:
    """Print the models, and for each file that is in this folder or was downloaded by ``dp`` that its digest is right.

    Raises:
        CheckpointError: if such a file has another digest.
    """
    from deepmd_ema.interchange.pretrained import DOWNLOADS, PUBLISHED, check_digest

    for model in PUBLISHED:
        print(f"{model.name} ({model.descriptor})\n  file    {model.file}\n  from    {model.url}")
        print(f"  sha256  {model.sha256}", flush=True)
        for path in (Path(model.file), DOWNLOADS / model.file):
            if check_digest(path):
                print(f"  here    {path}, sha256 verified", flush=True)
    print("Elements, heads and size of a file: dp-ema show FILE\n"
          "Fine-tune: dp-ema train INPUT --finetune FILE --model-branch HEAD --use-pretrain-script")  # fmt: skip
