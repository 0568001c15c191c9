"""Paths: of inputs, data and outputs that are missing, too long, of another kind, or lead round in circles."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bad_inputs.case import CHECK, EITHER, RUN, TRAIN, Case

LONG, DEEP = "x" * 300, "/".join("d" * 40)
STRANGE = {
    "300 letters": LONG, "4,500 letters": "y/" * 2250, "an absolute pattern": "/abs*", "empty": "", "a blank": " ", "a dot": ".",
    "a file below a file": "input.json/data", "a tilde": "~/data", "a star": "data*", "a new line": "a\nb",
    "a hash": "data#x", "a hash alone": "#", "a null device": "/dev/null", "a proc file": "/proc/self/mem",
    "a terminal code": "\x1b[2J", "not ASCII": "données", "a name of 200 wide letters": "é" * 200,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for name, path in STRANGE.items():
        yield Case("paths", f"systems: {name}", CHECK, _systems([path]), EITHER if path in (".",) else "refused")
        yield Case("paths", f"rglob_patterns: {name}", CHECK, _rglob([path]), EITHER)
        if path.strip():
            yield Case("paths", f"test -m: {name}", ("test", "-m", path, "-s", "data"), begins=RUN, expected=EITHER)
            yield Case(
                "paths", f"test -s: {name}", ("test", "-m", "model.ckpt.pt", "-s", path), begins=RUN, expected=EITHER
            )
            yield Case("paths", f"show: {name}", ("show", path), begins=RUN, expected=EITHER)
            yield Case("paths", f"plot: {name}", ("plot", path), begins=RUN, expected=EITHER)
    for name, word in {
        "300 letters": LONG,
        "below a file": "input.json/x",
        "nowhere": "no/where",
        "proc": "/proc/x",
    }.items():
        for option in ("training.disp_file", "training.save_ckpt", "training.save_dir", "training.stat_file",
                       "validating.full_val_file", "validating.save_best_dir"):  # fmt: skip
            yield Case("paths", f"{option}: {name}", TRAIN, _option(option, word), EITHER)
    yield from _made()


def _made() -> Iterator[Case]:
    made: dict[str, tuple[Callable[[], object], object]] = {
        "a link to itself": (lambda: os.symlink("loop", "loop"), "loop"),
        "two links to each other": (lambda: (os.symlink("b", "a"), os.symlink("a", "b")), "a"),
        "a dangling link": (lambda: os.symlink("gone", "link"), "link"),
        "a folder linked into itself": (lambda: (os.mkdir("f"), os.symlink("..", "f/up")), "f"),
        "a pipe": (lambda: os.mkfifo("pipe"), "pipe"),
        "an empty file": (lambda: Path("none").touch(), "none"),
        "an empty folder": (lambda: os.mkdir("none"), "none"),
        "a thousand folders deep": (lambda: _deep(1200), "deep"),
        "bytes that are no UTF-8": (lambda: os.mkdir(b"caf\xe9"), os.fsdecode(b"caf\xe9")),
        "a folder of ten thousand names": (
            lambda: (os.mkdir("many"), [Path(f"many/{n}").touch() for n in range(10_000)]),
            "many",
        ),
    }
    for name, (make, path) in made.items():
        expected = EITHER if name == "a folder linked into itself" else "refused"  # it leads to good systems
        yield Case("paths", f"systems: {name}", CHECK, _both(make, _systems([path])), expected)
        yield Case("paths", f"test -s: {name}", ("test", "-m", "model.ckpt.pt", "-s", path), make, expected, begins=RUN)
        if name not in ("a folder linked into itself", "a folder of ten thousand names"):
            yield Case("paths", f"show: {name}", ("show", path), make, begins=RUN)
            yield Case("paths", f"restart: {name}", (*TRAIN, "--restart", path), make, begins=RUN)
        if name != "a pipe":  # it waits for a writer, as other programs do
            yield Case("paths", f"plot: {name}", ("plot", path), make, begins=RUN)
            yield Case("paths", f"test -f: {name}", ("test", "-m", "model.ckpt.pt", "-f", path), make, begins=RUN)
        yield Case("paths", f"posthoc: {name}", ("posthoc", path), make, begins=RUN)
        yield Case("paths", f"freeze -c: {name}", ("freeze", "-c", path), make, begins=RUN)
    for name, target in {
        "itself": "input.json",
        "nothing": "gone.json",
        "endless zeros": "/dev/zero",
        "a folder": "data",
    }.items():
        yield Case("paths", f"the input is a link to {name}", CHECK, _link_input(target), memory=1 << 30)
    yield Case("paths", "the input is a folder", CHECK, lambda: (os.remove("input.json"), os.mkdir("input.json")))


def _deep(levels: int) -> None:
    here = os.getcwd()
    os.mkdir("deep")
    os.chdir("deep")
    for _ in range(levels):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)


def _link_input(target: str):
    return lambda: (os.remove("input.json"), os.symlink(target, "input.json"))


def _both(*steps):
    return lambda: [step() for step in steps]


def _option(path: str, value: object):
    def change() -> None:
        config = json.loads(Path("input.json").read_text())
        section, key = path.split(".")
        config.setdefault(section, {})[key] = value
        Path("input.json").write_text(json.dumps(config))

    return change


def _systems(systems: list[str]):
    def change() -> None:
        config = json.loads(Path("input.json").read_text())
        config["training"]["training_data"]["systems"] = systems
        Path("input.json").write_text(json.dumps(config))

    return change


def _rglob(patterns: list[str]):
    def change() -> None:
        config = json.loads(Path("input.json").read_text())
        config["training"]["training_data"] |= {"systems": ["."], "rglob_patterns": patterns}
        shutil.rmtree("valid")
        del config["training"]["validation_data"]
        config["validating"] = {}
        Path("input.json").write_text(json.dumps(config))

    return change
