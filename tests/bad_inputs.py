"""A folder with data and a good input, the command line run in it, and what every message must be like."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from helpers import tiny_input, write_system

from deepmd_ema import cli

USER, GOOD = 2, 0  # exit codes
ONE_SCREEN = 24  # lines
_TIME = re.compile(r"^\[[-0-9: ]+\] ", re.MULTILINE)


@dataclass(frozen=True)
class Reported:
    """Exit code of a command and what it wrote to stderr, without the times of log lines."""

    code: int
    text: str

    @property
    def problem(self) -> str:
        """The message itself, without log lines before it."""
        return self.text[f"\n{self.text}".index("\ndp-ema") :]

    def must_say(self, *phrases: str, code: int = USER) -> None:
        """Check the exit code, what it says, that it is no traceback, and that a run that failed fits one screen."""
        assert self.code == code, self.text
        assert "Traceback" not in self.text
        assert "This should not happen" not in self.text
        assert code == GOOD or len(self.text.splitlines()) <= ONE_SCREEN, self.text
        for phrase in phrases:
            assert phrase in self.text, self.text
        if code == USER:
            assert self.problem.startswith("dp-ema: "), self.text


class Desk:
    """The working folder of a user with ``input.json``, ``data`` and ``valid``.

    Args:
        folder: made when it is not there.
        systems: training and validation data to copy.
        capsys: pytest's, or None when only files are made.
    """

    def __init__(self, folder: Path, systems: tuple[Path, Path], capsys=None) -> None:
        self.folder, self._capsys = folder, capsys
        folder.mkdir(exist_ok=True)
        for system, name in zip(systems, ("data", "valid")):
            shutil.copytree(system, folder / name)
        self.write()

    def config(self, **changes):
        """Return a good input with changes ``section__key=value``."""
        changes = {"training__enable_ema": True, "training__ema_decay": 0.5, **changes}
        return tiny_input(["data"], ["valid"], **{"num_steps": 2, **changes})

    def write(self, config=None, **changes):
        """Write ``input.json``."""
        text = json.dumps(self.config(**changes) if config is None else config, indent=4)
        (self.folder / "input.json").write_text(text)

    def change_array(self, name, change, where="data/set.000"):
        """Replace an array by what ``change`` makes of it."""
        file = self.folder / where / f"{name}.npy"
        np.save(file, change(np.load(file)))

    def run(self, *words: str) -> Reported:
        """Run ``dp-ema`` with ``words`` and return what it reported."""
        self._capsys.readouterr()
        code = cli.main(list(words))
        return Reported(code, _TIME.sub("", self._capsys.readouterr().err))

    def train(self, *words: str) -> Reported:
        """Run ``dp-ema train input.json`` with further ``words``."""
        return self.run("train", "input.json", "--device", "cpu", *words)


def write_systems(home):
    """Return training and validation data, written below ``home``."""
    return write_system(home / "data", frames=8, seed=1, sets=2), write_system(home / "valid", frames=3, seed=2)


def sit_down(folder, systems, monkeypatch, capsys):
    """Return a desk in ``folder``, which becomes the current folder, of a process that no launcher has started."""
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Desk(folder, systems, capsys)
