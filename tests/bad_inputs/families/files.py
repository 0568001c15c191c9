"""Files: outputs that are inputs, links, folders, pipes; damaged learning curves, logs, pointers, and files of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from bad_inputs.case import ACCEPTED, REFUSED, RUN, TRAIN, Case, write

WRITERS = {
    "train -o": (*TRAIN, "-o"), "freeze -o": ("freeze", "-o"), "change-bias -o": ("change-bias", "model.ckpt.pt", "-b", "1", "2", "-o"),
    "plot -o": ("plot", "val.log", "-o"), "test --plot": ("test", "-m", "model.ckpt.pt", "-s", "valid", "--plot"),
}  # fmt: skip
TAKEN = ("input.json", "model.ckpt-4.pt", "model.ckpt.pt", "model_ema.ckpt-4.pt", "frozen.dp", "checkpoint", "lcurve.out",
         "data/type.raw", "data/set.000/coord.npy", "val.log", "out.json")  # fmt: skip
CURVES = {
    "no rows": "# step rmse_trn lr\n", "no header": "1 2 3\n", "empty": "", "step nan": "# step rmse_trn lr\nnan 1 1\n2 1 1\n",
    "step inf": "# step rmse_trn lr\ninf 1 1\n2 1 1\n", "step 1e300": "# step rmse_trn lr\n1e300 1 1\n", "step -1":
    "# step rmse_trn lr\n-1 1 1\n", "step 1.5": "# step rmse_trn lr\n1.5 1 1\n", "a word": "# step rmse_trn lr\n1 x 1\n",
    "a column less": "# step rmse_trn lr\n1 1\n", "no UTF-8": b"# step rmse_trn lr\n\xff\xfe\n", "NUL": "# step rmse_trn lr\n\0\n",
}  # fmt: skip
ODD_CURVES = {
    "only nan": "# step rmse_trn lr\n1 nan nan\n2 nan nan\n", "only zeros": "# step rmse_trn lr\n1 0 0\n2 0 0\n",
    "only inf": "# step rmse_trn lr\n1 inf inf\n2 inf inf\n", "negative": "# step rmse_trn lr\n1 -1 -1\n2 -1 -1\n",
    "1e300": "# step rmse_trn lr\n1 1e300 1e-300\n2 1e-300 1e300\n", "one row": "# step rmse_trn lr\n1 1 1\n",
    "no columns": "# step\n1\n2\n", "a step of 1e15": "# step rmse_trn lr\n1 1 1\n1000000000000000 1 1\n", "the same column twice":
    "# step lr lr\n1 1 2\n",
}  # fmt: skip


def cases() -> Iterator[Case]:
    for name, words in WRITERS.items():
        for target in (
            *TAKEN,
            "folder",
            "loop",
            "",
            " ",
            "no/where.x",
            "/proc/x",
            "x" * 300,
            "input.json/x",
            "folder/",
        ):
            if (name, target) == ("train -o", "out.json"):
                continue
            made = _made(name, target)
            links = {"folder": lambda: os.mkdir("folder"), "loop": lambda: os.symlink("loop", "loop")}
            yield Case("files", f"{name} {target[:20]!r}", (*words, target), links.get(target, lambda: None), begins=RUN,
                       expected=ACCEPTED if made else REFUSED, makes=[made] if made else [])  # fmt: skip
    for name, text in CURVES.items():
        yield Case(
            "files", f"plot a curve: {name}", ("plot", "curve.out"), write("curve.out", text), says=["curve.out"]
        )
    for name, text in ODD_CURVES.items():
        drawn = name not in ("only nan", "only inf", "no columns")
        yield Case("files", f"plot a curve: {name}", ("plot", "curve.out"), write("curve.out", text),
                   ACCEPTED if drawn else REFUSED, makes=["curves.png"] * drawn)  # fmt: skip
    for name, content in {"no text": b"\xff\xfe", "empty": b"", "NUL": b"a\0b", "a folder": b".", "itself": b"checkpoint", "long": b"x" * 5000,
                          "nowhere": b"gone.pt", "two lines": b"model.ckpt-4.pt\nmodel.ckpt-2.pt"}.items():  # fmt: skip
        for words in (("freeze",), ("posthoc", "."), (*TRAIN, "--restart", "."), ("test", "-m", ".", "-s", "valid")):
            yield Case("files", f"pointer is {name}: {words[0]}", words, write("checkpoint", content), begins=RUN)
    restart = (*TRAIN, "--restart", "model.ckpt.pt")
    for file in ("lcurve.out", "val.log", "val_ema.log", "out.json"):
        for name, content in {"no text": b"\xff\xfe\0", "empty": b"", "a line without end": b"# step"}.items():
            # what is begun and empty is what a crash leaves; other text may be the user's
            lost = name == "no text" or (file, name) == ("out.json", "a line without end")
            yield Case("files", f"restart, {file} is {name}", restart, write(file, content), REFUSED if lost else ACCEPTED,
                       same=True, begins=RUN)  # fmt: skip
        yield Case(
            "files",
            f"restart, {file} is a folder",
            restart,
            lambda file=file: (os.remove(file), os.mkdir(file)),
            begins=RUN,
        )
        yield Case("files", f"restart, {file} is gone", restart, lambda file=file: os.remove(file), ACCEPTED, same=True,
                   begins=RUN)  # fmt: skip
    yield Case("files", "a new run over a finished one", TRAIN, expected=ACCEPTED, begins=RUN,
               makes=["earlier-1/model.ckpt-4.pt", "earlier-1/lcurve.out", "model.ckpt-4.pt"])  # fmt: skip
    yield Case(
        "files",
        "plot without a suffix",
        ("plot", "val.log", "-o", "va"),
        begins=RUN,
        expected=ACCEPTED,
        says=["va.png"],
    )
    yield Case("files", "plot the folder of a run", ("plot", "."), begins=RUN, expected=ACCEPTED)
    yield Case("files", "plot as a document", ("plot", "val.log", "-o", "va.docx"), begins=RUN)
    yield Case(
        "files", "no disk for the log", (*TRAIN, "-l", "/dev/full"), expected=ACCEPTED, makes=["model.ckpt-2.pt"]
    )
    yield Case(
        "files", "a folder called as statistics", TRAIN, lambda: shutil.copytree("data", "stat"), ACCEPTED, same=True
    )


def _made(writer: str, target: str) -> str:
    """Return the file that a command makes of the name of an output; nothing where it must refuse the name."""
    if target in ("no/where.x", "loop") and writer == "train -o":  # a run makes its folders
        return target
    if target in ("", " ", "folder/", "no/where.x") or target.startswith(("/proc", "x" * 300, "input.json/")):
        return ""
    if writer == "freeze -o":
        return target if target.endswith(".dp") else f"{target}.dp"
    if writer in ("plot -o", "test --plot") and "." not in target:  # no picture has such a name
        return f"{target}.png"
    return ""
