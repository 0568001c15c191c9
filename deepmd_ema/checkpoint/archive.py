"""One file of plain values and tensors: written with a digest, and every byte checked when it is read."""

from __future__ import annotations

import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepmd_ema.errors import CheckpointError, command, refusal_of
from deepmd_ema.tensors import content_digest, on_cpu

DIGEST = "digest"  # of all else in the file; files of 0.1.0 have none

_HDF5 = b"\x89HDF\r\n\x1a\n"
_PLAIN_FLAGS = 0x808  # of an entry of an archive: its name is UTF-8, its sizes stand behind it


class DamagedError(Exception):
    """The bytes are not what was written."""


def write_archive(path: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` with its digest to ``path``, which nobody else reads yet."""
    with path.open("wb") as file:
        content = _interned(on_cpu(payload))
        torch.save({**content, DIGEST: content_digest(content)}, file)


def _interned(tree: Any) -> Any:
    """Return nested containers in which equal texts are one object.

    Pickle writes an object once, so that the bytes of a file would depend on where its texts come from, for example on
    whether a run was restarted.
    """
    if isinstance(tree, dict):
        return {_interned(key): _interned(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_interned, tree))
    return sys.intern(tree) if type(tree) is str else tree


def read_archive(path: Path) -> Any:
    """Return the content of a file without its digest, on the CPU.

    Raises:
        CheckpointError: if it cannot be read, or is a file of another kind.
        DamagedError: if its bytes were lost or changed.
    """
    try:
        _check_archive(path)
        payload = torch.load(path, map_location="cpu", weights_only=True)
        expected = payload.pop(DIGEST, None) if isinstance(payload, dict) else None
        if expected is not None and expected != content_digest(payload):
            raise DamagedError("its content is not what was written (another digest)")
    except (CheckpointError, DamagedError):
        raise
    except pickle.UnpicklingError as error:
        freeze = command("dp", "--pt", "freeze", "-c", path, "-o", "model.pth")
        raise CheckpointError(
            f"{path}: holds objects other than tensors and numbers, which are not loaded: they could run any program. "
            f"dp-ema did not write it. If DeePMD-kit did, `{freeze}` and `dp convert-backend model.pth model.dp` make "
            "a model.dp of it, which dp-ema reads."
        ) from error
    except Exception as error:  # bytes that were changed can make the readers of archives and pickles fail in any way
        if (reason := refusal_of(error)) is not None:
            raise CheckpointError(f"{path}: cannot be read {reason}") from error
        raise DamagedError(f"{str(error).splitlines()[0][:200] if str(error) else type(error).__name__}") from error
    return payload


def _check_archive(path: Path) -> None:
    """Check every byte against the archive's checksums, which ``torch.load`` does not do."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise DamagedError("the file is empty")
    if head == _HDF5:
        raise CheckpointError(
            f"{path}: a frozen model (.dp, HDF5), not a checkpoint. Give it a name that ends in .dp; all commands but "
            "--restart read it then."
        )
    if head[:2] != b"PK":
        raise CheckpointError(f"{path}: not a checkpoint; dp-ema writes them as model.ckpt-<step>.pt.")
    if not zipfile.is_zipfile(path):
        raise DamagedError(f"cut off after {path.stat().st_size} bytes")
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            convert = command("dp", "convert-backend", path, path.with_suffix(".dp"))
            raise CheckpointError(
                f"{path}: a TorchScript archive (.pth), not a checkpoint of a run. `{convert}` with DeePMD-kit "
                "makes a .dp of it, which dp-ema reads."
            )
        _check_entries(archive)
        bad = archive.testzip()
    if bad is not None:
        raise DamagedError(f"the checksum of {bad} is wrong")


def _check_entries(archive: zipfile.ZipFile) -> None:
    """Check that every entry is as torch writes it.

    torch has a reader of its own, which takes a compressed entry or one with the attributes of a folder for something
    else than Python's does: then the checksum is right and the weights are wrong.
    """
    names = set()
    for entry in archive.infolist():
        plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if not plain or entry.external_attr or entry.flag_bits & ~_PLAIN_FLAGS or entry.filename in names:
            raise DamagedError(f"the entry {entry.filename} of the archive is not as it was written")
        names.add(entry.filename)
