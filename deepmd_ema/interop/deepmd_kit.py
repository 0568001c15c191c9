"""An installed DeePMD-kit, called as a program for file formats that only it reads and writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepmd_ema.errors import UserError
from deepmd_ema.files import atomic_write

# formats of `dp convert-backend` that are one file: TorchScript, torch.export, TensorFlow
SUFFIXES = (".pth", ".pte", ".pb")
PROGRAM = "dp"
INSTALL = (
    "Install it (pip install 'deepmd-kit[torch]==3.2.0', best in another environment) and put "
    "`dp` on the PATH, or name it with --dp (freeze, compress, convert)"
)
_MAX_LINES = 3  # of an error of the program


@dataclass(frozen=True)
class DeepmdKit:
    """An installed DeePMD-kit.

    Attributes:
        command: path of its command ``dp``.
        version: that it prints.
    """

    command: str
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.command})"

    def write(
        self,
        arguments: Sequence[str],
        path: Path,
        edit: Callable[[Path, Path], object] = shutil.copyfile,
    ) -> None:
        """Run a command of DeePMD-kit that writes a file, which is moved to ``path`` when complete.

        Args:
            arguments: the command; ``{}`` is the file that it writes.
            path: whose suffix is that of the file.
            edit: called with this file and the path of the copy that it writes.

        Raises:
            UserError: if the command fails; an older file of that name stays.
            WriteError: if the file cannot be written.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"model{path.suffix}"
            command = [self.command, *(text.format(file) for text in arguments)]
            done = _run(command, folder)
            if done.returncode or not file.is_file():
                shown = " ".join([PROGRAM, *(text.format(path) for text in arguments)])
                raise UserError(
                    f"{path}: `{shown}` of {self} failed: {_last_lines(done.stderr or done.stdout)}"
                )
            with atomic_write(path, "Choose another -o, or make room.") as part:
                edit(file, part)


def find_deepmd_kit(path: Path, program: str | None = None) -> DeepmdKit:
    """Return the DeePMD-kit that reads or writes ``path``.

    Args:
        path: for the message.
        program: its command, or None: ``dp`` on the PATH.

    Raises:
        UserError: if there is none, or what the command is does not say that it is DeePMD-kit.
    """
    command = shutil.which(program or PROGRAM)
    if command is None:
        missing = (
            "there is no `dp` on the PATH"
            if program is None
            else f"--dp {program} is no program"
        )
        raise UserError(
            f"{path}: DeePMD-kit reads and writes {path.suffix} files, and {missing}. {INSTALL}; "
            "or use a .pt2 file, which LAMMPS with DeePMD-kit 3.2 reads as well."
        )
    command = str(Path(command).absolute())
    try:
        done = _run([command, "--version"])
    except OSError as error:
        raise UserError(
            f"{path}: {command} cannot be run ({error.strerror}). {INSTALL}."
        ) from error
    version = re.search(r"DeePMD-kit v(\S+)", done.stdout + done.stderr)
    if version is None:
        raise UserError(
            f"{path}: {command} --version does not say that it is DeePMD-kit: "
            f"{_last_lines(done.stderr or done.stdout)}. {INSTALL}."
        )
    return DeepmdKit(command, f"DeePMD-kit {version[1]}")


def copy_with_task_dim(source: Path, target: Path) -> None:
    """Copy a ``.pth`` of a dipole model, with the method ``get_task_dim``.

    LAMMPS of DeePMD-kit 3.2.0 calls it (``DeepTensorPT::init``), and the files that DeePMD-kit
    writes do not have it.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("/dipole_model.py") and b"def get_task_dim" not in content:
                method = rb"  def get_task_dim(\1) -> int:\n    return 3\n\g<0>"
                content = re.sub(
                    rb"(?m)^  def get_type_map\((.*?)\)", method, content, count=1
                )
            new.writestr(name, content)


def _run(
    command: Sequence[str], folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run DeePMD-kit with its own backends; with ``DP_BACKEND=ema`` it would call dp-ema again."""
    environment = {
        name: value for name, value in os.environ.items() if name != "DP_BACKEND"
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


def _last_lines(text: str) -> str:
    """Return the end of the output of a program, where a traceback names the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-_MAX_LINES:])[-400:] or "it printed nothing"
