"""Tampered checkpoints: parts that are missing or of another kind, whole files cut or changed, files of other programs."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bad_inputs.case import EITHER, RUN, TRAIN, Case
from deepmd_ema import checkpoint

FILE = "model.ckpt-4.pt"
RESTART = (*TRAIN, "--restart", FILE)
USES = {
    "restart": RESTART,
    "show": ("show", FILE),
    "test": ("test", "-m", FILE, "-s", "valid"),
    "freeze": ("freeze", "-c", FILE),
}
# parts of a training checkpoint, as paths of keys; a digest covers what is further inside
PARTS = [("format",), ("version",), ("kind",), ("weights",), ("step",), ("config",), ("model",), ("optimizer",), ("streams",), ("display",),
         ("averages",), ("best",), ("validation_pending",), ("min_nbor_dist",), ("run",), ("config", "model"), ("config", "training"),
         ("config", "model", "descriptor"), ("config", "model", "descriptor", "sel"),
         ("model", "fitting.bias_atom_e"), ("model", "out_bias"), ("averages", "steps")]  # fmt: skip
VALUES: dict[str, Any] = {"None": None, "a text": "x", "-1": -1, "a huge number": 10**30, "nan": float("nan"), "a list": [1, "x"],
                          "a section": {"x": 1}, "a tensor": torch.zeros(2, 3), "a tensor of nothing": torch.zeros(0)}  # fmt: skip


def cases() -> Iterator[Case]:
    for part in PARTS:
        name = ".".join(part)
        for number, use in enumerate(USES):
            words = USES[use]
            yield Case(
                "checkpoints", f"{use}, without {name}", words, _tampered(part, None, remove=True), EITHER, begins=RUN
            )
            for what in list(VALUES)[number::4] if use != "restart" else VALUES:
                # tasks are compared with those of the input when the run has begun
                leaves = ["run_record.json"] if part == ("streams",) else []
                tampered = _tampered(part, VALUES[what])
                yield Case(
                    "checkpoints", f"{use}, {name} is {what}", words, tampered, EITHER, leaves=leaves, begins=RUN
                )
    for use, words in USES.items():
        for name, change in _bytes().items():
            # a bit between two parts of the archive means nothing
            expected, says = (EITHER, []) if name.startswith("bit ") else ("refused", [FILE])
            yield Case("checkpoints", f"{use}, {name}", words, change, expected, says, begins=RUN)
    for name, make in _others().items():
        yield Case("checkpoints", f"show, {name}", ("show", "other.pt"), make, begins=RUN, says=["other.pt"])
        yield Case(
            "checkpoints",
            f"init-model, {name}",
            (*TRAIN, "--init-model", "other.pt"),
            make,
            begins=RUN,
            says=["other.pt"],
        )


def _tampered(part: tuple[str, ...], value: Any, remove: bool = False) -> Callable[[], None]:
    def tamper() -> None:
        content = checkpoint.load(FILE)
        place = content
        for key in part[:-1]:
            place = place[key] if isinstance(place, dict) and key in place else {}
        if remove:
            place.pop(part[-1], None)
        else:
            place[part[-1]] = value
        checkpoint.save(FILE, content)

    return tamper


def _bytes() -> dict[str, Callable[[], object]]:
    def changed(change: Callable[[bytes], bytes]) -> Callable[[], object]:
        return lambda: Path(FILE).write_bytes(change(Path(FILE).read_bytes()))

    ways = {
        f"cut off at {part:g}": changed(lambda b, p=part: b[: int(p * len(b))])
        for part in (0, 0.001, 0.1, 0.5, 0.9, 0.999)
    }
    ways |= {
        f"zeros from {part:g}": changed(lambda b, p=part: b[: int(p * len(b))] + bytes(int((1 - p) * len(b))))
        for part in (0.2, 0.7)
    }
    ways |= {f"bit {n} flipped": changed(lambda b, n=n: _flip(b, n)) for n in (1003, 30011, 200003)}
    ways["an entry is a folder for some readers"] = _folder_entry
    return ways


def _flip(content: bytes, bit: int) -> bytes:
    spoiled = bytearray(content)
    spoiled[(bit // 8 * 97) % len(spoiled)] ^= 1 << bit % 8
    return bytes(spoiled)


def _folder_entry() -> None:
    """Set the bit of the external attributes that makes an entry a folder for one of two readers of archives."""
    with zipfile.ZipFile(FILE) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size).filename.encode()
    content = bytearray(Path(FILE).read_bytes())
    place = content.rindex(largest) - 46
    assert content[place : place + 4] == b"PK\x01\x02"
    content[place + 38] |= 0x10
    Path(FILE).write_bytes(bytes(content))


class _Code:
    def __reduce__(self):
        return os.system, ("touch broken",)


def _others() -> dict[str, Callable[[], object]]:
    def zipped() -> None:
        with zipfile.ZipFile("other.pt", "w") as archive:
            archive.writestr("a.txt", "x")

    return {
        "text": lambda: Path("other.pt").write_text("hello"),
        "nothing": lambda: Path("other.pt").touch(),
        "a pickle that runs code": lambda: Path("other.pt").write_bytes(pickle.dumps(_Code())),
        "torch.save of code": lambda: torch.save(_Code(), "other.pt"),
        "torch.save of a list": lambda: torch.save([1, 2], "other.pt"),
        "torch.save of a tensor": lambda: torch.save(torch.zeros(3), "other.pt"),
        "torch.save of an empty section": lambda: torch.save({}, "other.pt"),
        "torch.save in the old format": lambda: torch.save(
            {"model": {}}, "other.pt", _use_new_zipfile_serialization=False
        ),
        "a checkpoint of DeePMD-kit": lambda: torch.save({"model": {"_extra_state": {}}}, "other.pt"),
        "an archive of another kind": zipped,
        "a format of the future": lambda: torch.save({**checkpoint.load(FILE), "format": 10**6}, "other.pt"),
        "a whole module": lambda: torch.save(torch.nn.Linear(2, 2), "other.pt"),
    }
