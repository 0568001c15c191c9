"""The backend ``ema`` of DeePMD-kit's command ``dp``, which finds it by an entry point.

Nothing else imports this module.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# the classes below are subclasses of DeePMD-kit's: there is no later moment to import them
from deepmd.backend.backend import Backend
from deepmd.backend.pt_expt import PyTorchExportableBackend
from deepmd.backend.pytorch import PyTorchBackend

_CLAIM = 3  # claim on a file, the largest wins; DeePMD-kit's own backends have 1 and 2


class TrainedHere:
    """A backend with the commands train, freeze, compress and change-bias of dp-ema."""

    option = "--pt"  # sets the suffix of frozen files

    def entry_point_hook(self, args: argparse.Namespace) -> None:
        """Run the command that ``dp`` has parsed, and exit with the exit code of dp-ema."""
        from deepmd.main import main_parser

        from deepmd_ema.cli.main import main

        (commands,) = (
            a
            for a in main_parser()._actions
            if isinstance(a, argparse._SubParsersAction)
        )
        # the command line is written again from the values that differ from their defaults
        argv = [
            self.option,
            args.command,
            "--log-level",
            logging.getLevelName(args.log_level),
        ]
        for action in commands.choices[args.command]._actions:
            value = getattr(args, action.dest, action.default)
            if value == action.default or action.dest == "log_level":
                continue
            # a long name means the same in both programs, and dp-ema refuses one that it does not
            # have
            argv += [name for name in action.option_strings if name.startswith("--")][
                :1
            ]
            if action.nargs != 0:
                argv += map(str, value if isinstance(value, list) else [value])
        # the `dp` that writes a .pth is this one, on the PATH or not
        os.environ["PATH"] = os.pathsep.join(
            [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
        )
        raise SystemExit(main(argv))


@Backend.register("ema")
class EmaBackend(TrainedHere, PyTorchBackend):
    """The backend ``ema``, to which files of dp-ema belong by their content.

    Data are read by the backend ``pt``.
    """

    name = "ema"

    @classmethod
    def match_filename(cls, filename: str) -> int:
        """Return the claim on a ``.pt`` of dp-ema, or on a name of a ``.pt`` that is no file yet.

        Only dp-ema converts to such a name.
        """
        path = Path(filename)
        if path.suffix.lower() != ".pt":
            return 0
        if not path.exists():
            return _CLAIM
        import torch

        try:
            payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # whatever is in it, another backend has to say so
            return 0
        return _CLAIM * (
            isinstance(payload, dict) and {"format", "kind"} <= payload.keys()
        )

    @property
    def deep_eval(self) -> type:
        """Return the evaluator of the backend ``pt``, with files converted for DeePMD-kit."""
        evaluator: Any = super().deep_eval

        class DeepEval(evaluator):
            def __init__(self, model_file: str, *args: Any, **options: Any) -> None:
                with TemporaryDirectory() as folder:
                    checkpoint = _converted(
                        model_file, f"{folder}/model.pt", for_deepmd=True
                    )
                    super().__init__(checkpoint, *args, **options)

        return DeepEval

    @staticmethod
    def serialize_hook(model_file: str) -> dict[str, Any]:
        """Return the model of a file, as DeePMD-kit's other backends write it."""
        from deepmd_ema.infer.load import load_model
        from deepmd_ema.interop.dp import file_tree

        loaded = load_model(model_file)
        info = loaded.info
        return file_tree(
            loaded.model, loaded.config, info.min_nbor_dist, info.as_dict()
        )

    @staticmethod
    def deserialize_hook(model_file: str, data: dict[str, Any]) -> None:
        """Write a file of dp-ema from what ``serialize_hook`` of any backend returns."""
        from deepmd.dpmodel.utils.serialization import save_dp_model

        with TemporaryDirectory() as folder:
            save_dp_model(f"{folder}/model.dp", data)
            _converted(f"{folder}/model.dp", model_file)


# DP-GEN and dpgen2 write `dp --pt`, which overrides the variable: the backends of that option are
# replaced by ones with the commands of dp-ema
if os.environ.get("DP_BACKEND", "").lower() == "ema":
    for replaced, names in (
        (PyTorchBackend, ("pt", "pytorch")),
        (PyTorchExportableBackend, ("pt-expt", "pytorch-exportable")),
    ):
        kind = type(
            replaced.__name__, (TrainedHere, replaced), {"option": f"--{names[0]}"}
        )
        for key in names:
            Backend.register(key)(kind)


def _converted(source: str, target: str, for_deepmd: bool = False) -> str:
    """Write a file as ``dp-ema convert`` does, and return its name."""
    from deepmd_ema.commands.freeze import convert
    from deepmd_ema.errors import CheckpointError
    from deepmd_ema.infer.load import load_models

    try:
        convert(load_models(source), target, for_deepmd)
    except CheckpointError as error:
        raise CheckpointError(
            [text.replace(target, str(source)) for text in error.problems]
        ) from None
    return target
