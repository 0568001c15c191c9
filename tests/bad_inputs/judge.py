"""Runs a case in a process of its own, with limits, and says whether it was answered as it must be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bad_inputs.case import ACCEPTED, EITHER, REFUSED, RUN, TINY, Case
from bad_inputs.desk import ONE_SCREEN, Desk, write_systems

ROOT = Path(__file__).parents[2]
RIGHT, BUG, ENDLESS, KILLED, TAKEN, WRONG = (
    "right",
    "reported as a bug",
    "without end",
    "killed",
    "accepted wrongly",
    "other",
)
VERDICTS = (RIGHT, BUG, ENDLESS, KILLED, TAKEN, WRONG)
MAX_FILE = 200 << 20
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@dataclass(frozen=True)
class Answer:
    """The report of a command.

    Attributes:
        code: exit code; minus the signal that ended it; None when it was ended at its time limit.
        out: its stdout.
        err: its stderr.
        seconds: that it took.
        lost: files of the user that are not as they were, and half-written files that it has left.
        lacks: what an accepted one has not made, or not as it is made of a good input.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    lost: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


class Judge:
    """Keeps the folders that cases begin with, and runs cases.

    Args:
        scratch: an empty folder.
    """

    def __init__(self, scratch: Path) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in LAUNCHERS:
            os.environ.pop(name, None)
        _load_everything()
        self._scratch, self._number = scratch, 0
        self._good: dict[tuple[str, ...], dict[str, str]] = {}  # what commands make of good inputs
        systems = write_systems(scratch / "systems")
        self._folders = {name: scratch / name for name in (TINY, RUN)}
        self._used = _memory_in_use()
        changes = {"training__save_freq": 2, "validating__full_validation": True, "validating__validation_freq": 2,
                   "validating__ema_full_validation": True, "validating__full_val_start": 0}  # fmt: skip
        for name, folder in self._folders.items():
            Desk(folder, systems).write(num_steps=2 if name == TINY else 4, **changes)
        made = self._in_child(["train", "input.json", "--device", "cpu", "-v", "ERROR"], self._folders[RUN], 120)
        assert made.code == 0, made.err
        self._in_child(["freeze", "-o", "frozen.dp", "-v", "ERROR"], self._folders[RUN], 60)
        self._in_child(["freeze", "-o", "frozen.yaml", "-v", "ERROR"], self._folders[RUN], 60)

    def try_out(self, case: Case) -> tuple[str, Answer]:
        """Return the verdict on a case and what was reported."""
        answer, made = self._run(case)
        if answer.code == 0 and case.same:
            key = (case.begins, case.shell, *case.words)
            if key not in self._good:
                self._good[key] = self._run(replace(case, prepare=lambda: None, env={}, memory=8 << 30))[1]
            good = self._good[key]
            other = tuple(name for name in made | good if made.get(name) != good.get(name))
            answer = replace(answer, lacks=answer.lacks + other)
        return verdict(case, answer), answer

    def _run(self, case: Case) -> tuple[Answer, dict[str, str]]:
        """Return the report, and stdout and digests of the models that were written."""
        self._number += 1
        folder = self._scratch / f"case{self._number}"
        shutil.copytree(self._folders[case.begins], folder, symlinks=True)
        try:
            prepared = self._in_child(case.prepare, folder, 60)
            assert prepared.code == 0, f"{case.title} cannot be made: {prepared.err}"
            before = _content(folder)
            answer = (
                self._shell(case, folder)
                if case.shell
                else self._in_child(list(case.words), folder, case.seconds, case)
            )
            after, changed = _content(folder), []
            if answer.code or (case.words and case.words[0] != "train"):
                changed = [name for name in before if after.get(name) != before[name] and name not in case.leaves]
            changed += [name for name in after.keys() - before.keys() if name.endswith(".part")]
            lacks = [] if answer.code else [name for name in case.makes if not (folder / name).is_file()]
            compared = case.same and answer.code == 0
            models = [n for n in after if compared and (n.endswith(".pt") or after[n] != before.get(n))]
            made = {"stdout": answer.out} | {name: w for name in models if (w := _weights(folder / name))}
            return replace(answer, lost=tuple(changed), lacks=tuple(lacks)), made
        finally:
            _remove(folder)

    def _in_child(self, what, folder: Path, seconds: float, case: Case | None = None) -> Answer:
        """Call ``what``, or the command line with these words, in a fork of this process."""
        streams = [_stream(), _stream()]
        sys.stdout.flush()
        sys.stderr.flush()
        began, pid = time.monotonic(), os.fork()
        if pid == 0:
            _be_child(what, folder, streams, case, self._used)
        code = _wait(pid, seconds)
        return Answer(code, *(_text(s) for s in streams), time.monotonic() - began)

    def _shell(self, case: Case, folder: Path) -> Answer:
        env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {"PYTHONPATH": str(ROOT)}
        env |= {"DP": f"{shlex.quote(sys.executable)} -m deepmd_ema"}
        for name, value in case.env.items():
            env.pop(name, None)
            env |= {} if value is None else {name: value}
        streams = [_stream(), _stream()]
        began = time.monotonic()
        run = subprocess.Popen(["bash", "-c", case.shell], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                               stdout=streams[0], stderr=streams[1], start_new_session=True)  # fmt: skip
        code = _wait(run.pid, case.seconds)
        run.returncode = code if code is not None else -signal.SIGKILL  # it was waited for
        return Answer(code, *(_text(s) for s in streams), time.monotonic() - began)


def verdict(case: Case, answer: Answer) -> str:
    """Return one of ``VERDICTS``."""
    reported = answer.out + answer.err
    if answer.code is None:
        return ENDLESS
    if answer.code < 0:
        return KILLED
    if "Traceback" in reported or "This should not happen" in reported or answer.code in (1, 70):
        return RIGHT if answer.code == case.code == 1 and "should not happen" not in reported else BUG
    if answer.code == 0:
        if case.expected == REFUSED or answer.lacks:
            return TAKEN
        return WRONG if answer.lost or not all(phrase in reported for phrase in case.says) else RIGHT
    if case.expected == ACCEPTED or answer.code != case.code or answer.lost:
        return WRONG
    message = answer.err[max(0, answer.err.rfind("dp-ema")) :] if case.expected == EITHER else answer.err
    screen = len(message.splitlines()) <= ONE_SCREEN + 8
    named = re.search(r"^dp-ema", answer.err, re.MULTILINE) is not None
    return RIGHT if screen and named and all(phrase in reported for phrase in case.says) else WRONG


def _be_child(what, folder: Path, streams, case: Case | None, used: int) -> None:
    """Do the work of a fork, and end it."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        for stream, number in zip(streams, (1, 2)):
            os.dup2(stream.fileno(), number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if callable(what):
            what()
            code = 0
        else:
            from deepmd_ema import cli

            if case is not None:
                for name, value in case.env.items():
                    os.environ.pop(name, None)
                    os.environ.update({} if value is None else {name: value})
                resource.setrlimit(resource.RLIMIT_AS, (used + case.memory,) * 2)
                resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE,) * 2)
            code = cli.main(what)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
    handle = os.pidfd_open(pid)
    try:
        ended = select.select([handle], [], [], seconds)[0]
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(status) if ended else None


def _stream():
    return tempfile.TemporaryFile()


def _text(stream) -> str:
    stream.seek(0)
    text = stream.read(200_000).decode("utf-8", "backslashreplace")
    stream.close()
    return re.sub(r"^\[[-0-9: ]+\] ", "", text, flags=re.MULTILINE)


def _content(folder: Path) -> dict[str, str]:
    """Return every regular file and link of a folder with a digest of what it holds."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            found[path.name] = os.readlink(path)
        elif path.is_file():
            found[path.name] = hashlib.blake2b(path.read_bytes()).hexdigest() if path.stat().st_size < 1 << 24 else ""
    return found


def _weights(file: Path) -> str:
    """Return a digest of the weights in a model file; nothing for other files and links to it."""
    if file.is_symlink() or file.suffix not in (".pt", ".dp"):
        return ""
    if file.suffix == ".dp":
        return hashlib.blake2b(file.read_bytes()).hexdigest()
    from deepmd_ema import checkpoint

    digest = hashlib.blake2b()
    for name, tensor in sorted(checkpoint.load(file)["model"].items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _remove(folder: Path) -> None:
    subprocess.run(["rm", "-rf", str(folder)], check=False)  # folders in folders, deeper than Python goes


def _memory_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _load_everything() -> None:
    """Import what the commands import, so that a fork need not."""
    import h5py  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch
    import yaml  # noqa: F401

    import deepmd_ema.averaging.posthoc.run
    import deepmd_ema.cli
    import deepmd_ema.config.manual
    import deepmd_ema.infer.change_bias
    import deepmd_ema.infer.evaluate
    import deepmd_ema.infer.show
    import deepmd_ema.interop.freeze
    import deepmd_ema.report.plots
    import deepmd_ema.training.run  # noqa: F401

    torch.set_num_threads(1)
