"""``dp-ema train``."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING

from deepmd_ema.cli.loading import libraries_of_torch, loading
from deepmd_ema.distributed.launch import (
    END_SIGNALS,
    TURN_S,
    handling,
    launch_ranks,
    terminate,
)
from deepmd_ema.errors import ReportedElsewhere, Terminated
from deepmd_ema.utils import keep_freed_memory

if TYPE_CHECKING:
    from deepmd_ema.training.request import TrainRequest


def train(args: argparse.Namespace) -> None:
    """Train."""
    if args.nproc_per_node is not None:
        _request(args)  # its mistakes are reported once, before any process is started
        launch_ranks(args.nproc_per_node, args.launch, args.argv, args.device)
    keep_freed_memory()
    if args.launch.launched:
        # remarks of torch on every rank would hide the one message that matters; torch reads this
        # when it is loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    interval = sys.getswitchinterval()
    with (
        handling(END_SIGNALS if args.launch.size > 1 else (), terminate),
        ExitStack() as stack,
    ):
        # the threads of a run, which loads and writes beside training, take turns
        sys.setswitchinterval(TURN_S)
        stack.callback(sys.setswitchinterval, interval)
        try:
            with loading():
                request = _request(args)
                from deepmd_ema.training.run import run_training
        except KeyboardInterrupt as error:
            # Loading torch takes seconds, and the ranks cannot agree yet on who reports it. Ctrl-C
            # reaches all, and rank 0 reports it. A launcher ends the others when one was killed,
            # which may be rank 0: rank 1 reports a signal as well.
            if args.launch.rank <= isinstance(error, Terminated):
                raise
            raise ReportedElsewhere from error
        run_training(request, launch=args.launch)


def _request(args: argparse.Namespace) -> TrainRequest:
    """Return the request, with its input checked before torch is imported.

    Mistakes are reported at once.
    """
    with libraries_of_torch():
        from deepmd_ema.training.request import TrainRequest

        options = {
            f.name: getattr(args, f.name)
            for f in fields(TrainRequest)
            if f.name != "input_file"
        }
        request = TrainRequest(args.input, **options)
        # several ranks agree on the mistakes later; with the two options the input is not complete
        is_complete = not (
            args.use_pretrain_script or args.model_branch or request.takes_saved_config
        )
        if args.launch.size == 1 and is_complete:
            if request.input.mistakes and request.input.readable is not None:
                from deepmd_ema.data.run import checked_config  # loads torch

                checked_config(request.input)
            _ = request.input.config
        return request
