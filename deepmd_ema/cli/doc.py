"""``dp-ema doc``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.streams import say_error


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("option", metavar="OPTION.PATH", nargs="?", help="one option or section, as training.ema_decay")
    parser.add_argument("--json-schema", action="store_true", help="a JSON schema for editors")


def run(args: argparse.Namespace) -> None:
    """Print the manual, one option of it, or the schema."""
    from deepmd_ema.config.manual import json_schema_text, manual
    from deepmd_ema.config.schema.averaging import AVERAGES
    from deepmd_ema.config.schema.descriptor import DESCRIPTORS
    from deepmd_ema.config.schema.loggers import LOGGERS

    for what, section, registry in (
        ("descriptor", "descriptor", DESCRIPTORS), ("average", "averaging", AVERAGES), ("logger", "loggers", LOGGERS)
    ):  # fmt: skip
        for name, fault in registry.faults.items() if section in (args.option or section) else ():
            say_error(f'{what} "{name}" is not listed: {fault}')
    print(json_schema_text() if args.json_schema else manual(args.option))
