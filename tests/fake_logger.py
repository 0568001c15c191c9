"""Loggers of another distribution: one that appends lines of JSON to a file, and one that
raises.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config import Logger, option


@dataclass(kw_only=True)
class LinesLogger(Logger):
    """A file with a line for each call."""

    type: ClassVar[str] = "lines"
    path: str = option("lines.txt", doc="File of the lines.")

    def start(self, run):
        self._file = (run.folder / self.path).open("a")
        self._write("start", run.step, run.id, run.config["training"]["numb_steps"])
        return run.id or f"id-{run.step}"

    def log(self, step, values):
        self._write("log", step, dict(values))

    def finish(self, status):
        self._write("finish", status)
        self._file.close()

    def _write(self, *what):
        print(json.dumps(what), file=self._file, flush=True)


@dataclass(kw_only=True)
class RaisingLogger(Logger):
    """A logger that fails in one of its methods."""

    type: ClassVar[str] = "raising"
    needs: ClassVar[dict[str, str]] = {}
    where: str = option(choices=("start", "log", "finish"), doc="Method that raises.")

    def start(self, run):
        self._raise("start")

    def log(self, step, values):
        self._raise("log")

    def finish(self, status):
        self._raise("finish")

    def _raise(self, where):
        if where == self.where:
            raise ConnectionError(f"no answer in {where}")
