"""``dp-ema train``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING

from deepmd_ema.cli.loading import libraries_of_torch, loading
from deepmd_ema.cli.options import add_device, add_input, file_to_write, path
from deepmd_ema.distributed.launch import END_SIGNALS, TURN_S, handling, launch_ranks, terminate
from deepmd_ema.errors import ReportedElsewhere, Terminated, show_text
from deepmd_ema.utils import keep_freed_memory

if TYPE_CHECKING:
    from deepmd_ema.training.request import TrainRequest


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_input(parser, " (default: input.json of this folder; with --restart the config of the checkpoint)")
    parser.epilog = (
        "on several processes: --nproc-per-node N, or `export PET_NO_PYTHON=1` once in the shell and then "
        "`torchrun --nproc_per_node=N dp-ema train INPUT`"
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("-r", "--restart", metavar="CKPT", type=path, help="continue exactly from a checkpoint")
    start.add_argument("-i", "--init-model", "-f", "--init-frz-model", dest="init_model", metavar="FILE", type=path,
                       help="start from the weights of a .pt (live or averaged) or of a frozen model")  # fmt: skip
    start.add_argument("-t", "--finetune", metavar="FILE", type=path,
                       help="fine-tune such a file, or a published model by its name, on other data, perhaps of other "
                       "elements")  # fmt: skip
    parser.add_argument("--model-branch", "--head", dest="model_branch", metavar="NAME",
                        help="which model of a file with several; RANDOM: a fresh fitting network")  # fmt: skip
    parser.add_argument("--use-pretrain-script", action="store_true", help="take the section model from that file")
    parser.add_argument("-o", "--output", metavar="FILE", default="out.json", type=file_to_write,
                        help="normalized input (out.json)")  # fmt: skip
    parser.add_argument("--skip-neighbor-stat", action="store_true", help="take sel as given, not counted in the data")
    parser.add_argument("--allow-config-change", action="store_true",
                        help="restart although the input differs from that of the checkpoint")  # fmt: skip
    parser.add_argument("--max-time", metavar="TIME", type=_seconds, default=math.inf,
                        help="save and end after this time, e.g. 90m, 23.5h or 23:30:00; the start counts")  # fmt: skip
    parser.add_argument("--nproc-per-node", metavar="N", type=_num_processes,
                        help="train on N processes of this machine, as torchrun starts them; gpu: one per GPU, auto: "
                        "the same, or one where there is no GPU")  # fmt: skip
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Train."""
    if args.nproc_per_node is not None:
        _request(args)  # its mistakes are reported once, before any process is started
        launch_ranks(args.nproc_per_node, args.launch, args.words, args.device)
    keep_freed_memory()
    if args.launch.launched:
        # torch's own remarks, on every rank, would hide the one message that matters; read when torch is loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    interval = sys.getswitchinterval()
    with handling(END_SIGNALS if args.launch.size > 1 else (), terminate), ExitStack() as stack:
        # the threads of a run, which loads and writes beside training, take turns
        sys.setswitchinterval(TURN_S)
        stack.callback(sys.setswitchinterval, interval)
        try:
            with loading():
                request = _request(args)
                from deepmd_ema.training.run import run_training
        except KeyboardInterrupt as error:  # loading torch takes seconds, and the ranks cannot agree yet who reports it
            # a launcher ends the others when one was killed, which may be rank 0: then rank 1 is there to say so
            if args.launch.rank <= isinstance(error, Terminated):
                raise
            raise ReportedElsewhere from error
        run_training(request, launch=args.launch)


def _request(args: argparse.Namespace) -> TrainRequest:
    """Return the request, with its input checked before torch is imported, so that mistakes are reported at once."""
    with libraries_of_torch():
        from deepmd_ema.training.request import TrainRequest

        options = {f.name: getattr(args, f.name) for f in fields(TrainRequest) if f.name != "input_file"}
        request = TrainRequest(args.input, **options)
        # several ranks agree on the mistakes later; with the two options the input is not complete
        is_complete = not (args.use_pretrain_script or args.model_branch or request.takes_saved_config)
        if args.launch.size == 1 and is_complete:
            _ = request.input.config
        return request


def _seconds(text: str) -> float:
    """Return the seconds of a time that is given on the command line: ``90m``, or ``[days-]hours:minutes:seconds``."""
    if found := re.fullmatch(r"(\d+\.?\d*)([smhd])", text):
        seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    elif found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        seconds = ((24.0 * days + hours) * 60 + minutes) * 60 + rest
    else:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        expected = "a time above 0 with its unit (300s, 90m, 23.5h, 2d), or hours:minutes:seconds (23:30:00)"
        raise argparse.ArgumentTypeError(f"{show_text(text)}: expected {expected}")
    return seconds


def _num_processes(text: str) -> str:
    """Return the number of processes that is given on the command line: a number, ``gpu`` or ``auto``."""
    if text not in ("gpu", "auto") and not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"{show_text(text)}: expected a number of processes, gpu or auto")
    return text
