"""Rows of results that a later process adds to or reads: one JSON object a line.

A row has a ``part`` and, in ``key``, what was measured; the last row of a key counts.
"""

import json
import os
import platform
from pathlib import Path

FILE_NAME = "results.jsonl"


class Results:
    """Rows in a file, written as soon as they are known.

    Args:
        file: need not exist.
        part: of the rows that are added.
    """

    def __init__(self, file, part=""):
        self.file = Path(file)
        self.part = part

    def add(self, key, **values):
        """Add a row, which replaces an older one with its key; ``error`` among the values marks a
        failure.
        """
        row = {"part": self.part, "key": key, **values}
        line = json.dumps(row) + "\n"
        with self.file.open("a") as out:
            if self.ends_within_a_line():
                out.write("\n")
            out.write(line)
            out.flush()
            os.fsync(out.fileno())
        shown = ", ".join(
            f"{name} {value}" for name, value in values.items() if name != "operations"
        )
        print(f"{self.part} {' '.join(map(str, key))}: {shown[:400]}", flush=True)

    def has(self, key):
        """Whether there is a result of ``key`` that is complete and no failure."""
        row = self.rows().get((self.part, *key))
        return row is not None and not row.get("error") and not row.get("unfinished")

    def rows(self):
        """Return the last row of each key, by part and key, in the order in which the keys came."""
        rows = {}
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # a process was killed within a line
                continue
            rows[(row["part"], *row["key"])] = row
        return rows

    def ends_within_a_line(self):
        """Whether a process was killed while it wrote the last line."""
        if not self.file.exists() or not self.file.stat().st_size:
            return False
        with self.file.open("rb") as text:
            text.seek(-1, os.SEEK_END)
            return text.read(1) != b"\n"


def add_arguments(parser, part):
    """Add the options of every part."""
    parser.add_argument(
        "--results", type=Path, default=Path(FILE_NAME), help="file of the rows"
    )
    parser.add_argument("--part", default=part, help="name of the rows")


def describe_machine():
    """Return the card and the versions, which stand in each row that compares times."""
    import torch

    card = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "CPU"
    )
    return f"{card}, torch {torch.__version__}"
