"""World of a run that something goes wrong on: each is a process with the environment of a launcher
and a fault.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from helpers import tiny_input, write_system
from parallel_runs import PRELOADED

LAST, SAVE_EVERY, AT_STEP = 20, 10, 12
HELD_UP_S = 1.5
STAMP = "fault"  # file that is made when the fault happens
SPOKEN = (
    "dp-ema",
    "stopped by",
    "This should",
    "  1. ",
)  # how the lines begin that a run ends with


def make_run(folder, stage=0, **changes):
    """Write data and an input whose steps are short and whose validations have many batches; return
    the folder.
    """
    folder.mkdir(parents=True)
    write_system(folder / "data", frames=16, natoms=6, seed=1)
    write_system(folder / "valid", frames=30, natoms=72, seed=2)
    options = {
        "training__save_freq": SAVE_EVERY,
        "training__zero_stage": stage,
        "validating__full_validation": True,
        "validating__validation_freq": AT_STEP + 2,
        "validating__full_val_start": AT_STEP + 2,
        "validating__save_best": False,
        **changes,
    }
    config = tiny_input(["data"], ["valid"], num_steps=LAST, **options)
    (folder / "input.json").write_text(json.dumps(config))
    return folder


def start_rank(
    folder, environ, fault="", words=("train", "input.json", "--device", "cpu")
):
    """Start a process in ``folder`` that is what ``environ`` says; what it says goes to
    ``reported.txt`` there.

    Returns:
        Its number. It leads a group of processes of its own.
    """
    _load_once()
    pid = os.fork()  # as a fork: loading torch anew would take seconds
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        os.chdir(folder)
        said = os.open("reported.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(said, number)
        # of pytest's until now
        sys.stdout = open(1, "w", 1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in environ.items() if value})
        code = be_a_rank(fault, words)
    finally:
        os._exit(code)


def be_a_rank(fault, words):
    """Run the command line with faults, whose names are separated by spaces."""
    from deepmd_ema import cli

    for name in fault.split():
        FAULTS[name]()
    return cli.main(list(words))


def wait_for(pids, limit):
    """Return the exit codes, negative for a signal; a process that is there after ``limit`` seconds
    is killed: None.
    """
    codes, end = {}, time.monotonic() + limit
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def last_words(folder):
    """Return the lines beside the log: what the run has ended with."""
    lines = (folder / "reported.txt").read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith((*SPOKEN, "Traceback"))]


def run_out_of_time(trainer):
    if trainer.step == AT_STEP:
        trainer.deadline = 0.0


def lose_input():
    """Not have the input on this machine."""
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")


def have_another_force():
    """Read a copy of the data and of the input in which one force is another."""
    shutil.copytree(".", "elsewhere")
    os.chdir("elsewhere")
    file = next(Path("data").rglob("force.npy"))
    forces = np.load(file)
    forces[len(forces) // 2, 0] += 0.1
    np.save(file, forces)


def have_another_input():
    """Read a copy of the data and of the input with another length."""
    shutil.copytree(".", "elsewhere")
    os.chdir("elsewhere")
    values = json.loads(Path("input.json").read_text())
    values["training"]["numb_steps"] += 1
    Path("input.json").write_text(json.dumps(values))


def have_another_step():
    """Read a checkpoint that another step has written."""
    shutil.copytree(".", "elsewhere")
    os.chdir("elsewhere")
    shutil.copyfile(f"model.ckpt-{LAST}.pt", "start.pt")


def have_other_moments():
    """Read a checkpoint whose optimizer has another state."""
    from deepmd_ema import checkpoint

    shutil.copytree(".", "elsewhere")
    os.chdir("elsewhere")
    payload = checkpoint.load("start.pt")
    next(iter(payload["optimizer"]["state"].values()))["exp_avg"].mul_(2)
    checkpoint.save("start.pt", payload)


def fill_disk():
    """Have a disk that takes no more than a few kB in one file."""

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    _after_step(fill)


def lose_weights():
    """Hold weights that are not finite, so that the loss of its own frames is not."""

    def lose(trainer):
        if trainer.step == AT_STEP:
            with torch.no_grad():
                next(iter(trainer.saver.builder.models.parameters())).fill_(
                    float("nan")
                )

    _watch("after_update", lose)


def train_before():
    """Train in the same process before the run that is looked at."""
    from deepmd_ema import cli

    assert cli.main(["train", "input.json", "--device", "cpu"]) == 0


def be_quick():
    """Wait seconds, not minutes, for ranks that do not come."""
    from deepmd_ema.distributed import rendezvous

    rendezvous.JOIN_S = 2.0


def _load_once():
    """Load what training needs, before the fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            importlib.import_module(name)


def _hold_up(module, name, seconds=HELD_UP_S):
    """Let the function ``name`` of ``module`` begin later."""
    *owners, last = name.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, last)

    @functools.wraps(function)
    def late(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    setattr(owner, last, late)


def _at_start(action):
    from deepmd_ema.distributed.world import World

    def act(*_arguments):
        _note()
        action()

    World.broadcast_from_rank0 = act


def _after_step(action):
    def after_step(trainer):
        if trainer.step == AT_STEP:
            trainer.saver.writer.wait()  # the files of the last checkpoint are there
            _note()
            action()

    _watch("after_step", after_step)


def _in_validation(action):
    def in_validation(_trainer, _weights):
        _note()
        action()

    _watch("in_validation", in_validation)


def _watch(when, act):
    """Have the next run call ``act`` where a callback is called."""
    from deepmd_ema.training import run
    from deepmd_ema.training.trainer import Callback

    callback = Callback()
    setattr(callback, when, act)
    run.run_training = functools.partial(run.run_training, callback=callback)


def _note():
    with contextlib.suppress(OSError):
        Path(STAMP).touch()


def _raise():
    raise ValueError("something that nobody has thought of")


def _send(number, times=1):
    """Return a function that sends this process a signal."""
    return lambda: [os.kill(os.getpid(), number) for _ in range(times)]


_die = _send(signal.SIGKILL)
FAULTS = {
    "fail": lambda: _after_step(_raise),
    "die": lambda: _after_step(_die),
    "hang": lambda: _after_step(
        lambda: time.sleep(1e6)
    ),  # as the main thread does in a collective of NCCL
    "be_stopped": lambda: _after_step(_send(signal.SIGSTOP)),
    "die_early": lambda: _at_start(_die),
    "be_terminated_at_start": lambda: _at_start(
        _send(signal.SIGTERM)
    ),  # as by torchrun when another rank has ended
    "ask_to_stop": lambda: _after_step(_send(signal.SIGTERM)),
    "ask_in_validation": lambda: _in_validation(_send(signal.SIGTERM)),
    "ask_often": lambda: _after_step(
        _send(signal.SIGINT, 2)
    ),  # as torchrun and the terminal do
    "run_out_of_time": lambda: _watch("after_step", run_out_of_time),
    "come_late": lambda: time.sleep(HELD_UP_S),
    "never_connect": lambda: _hold_up("torch.distributed", "init_process_group", 1e6),
    # while it connects to one that never does
    "be_terminated_soon": lambda: threading.Timer(
        3 * HELD_UP_S, _send(signal.SIGTERM)
    ).start(),
    "meet_late": lambda: _hold_up("torch.distributed", "init_process_group"),
    "speak_late": lambda: _hold_up(
        "deepmd_ema.distributed.rendezvous", "Rendezvous.report_of"
    ),
    "leave_late": lambda: _hold_up("torch.distributed", "destroy_process_group"),
    **{
        act.__name__: act
        for act in (
            lose_input,
            fill_disk,
            lose_weights,
            train_before,
            be_quick,
            have_another_force,
            have_another_input,
            have_another_step,
            have_other_moments,
        )
    },
}
