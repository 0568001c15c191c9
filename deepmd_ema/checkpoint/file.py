"""Model files: written atomically, with a digest, and found, read and checked again.

Files of kind ``training`` hold everything that a restart needs; the others hold weights only. Each
way in which a file can be wrong has a message. ``content`` has what a file must hold, ``series``
the files that a run keeps.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from deepmd_ema.checkpoint.content import FORMAT, check_content
from deepmd_ema.config import outputs
from deepmd_ema.config.outputs import (
    GATHERED_SUFFIX,
    POINTER,
    SHARDED_SUFFIX,
    is_sharded,
)
from deepmd_ema.distributed.tensors import content_digest, on_cpu, whole
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, reason_of, refusal_of
from deepmd_ema.files import atomic_write, spare_of, writing
from deepmd_ema.text import command, first_few
from deepmd_ema.utils import LIVE

SUFFIXES = (GATHERED_SUFFIX, SHARDED_SUFFIX)
_ANY = f"(?:{'|'.join(map(re.escape, SUFFIXES))})"
# what follows on the name of a series, with the step; of a best file with step and rank, 1 the best
NUMBERED = rf"-(\d+){_ANY}"
RANKED = rf"\.ckpt-(\d+)\.t-(\d+){_ANY}"
# key of the digest of all else in the file; files of 0.1.0 have none
DIGEST = "digest"
# key in the head of a sharded one: its files, and the tensors that are there under another name
SHARDS = "shards"
# key of this version by that of an earlier one
_RENAMED = {"owes_validation": "validation_pending"}
_HDF5 = b"\x89HDF\r\n\x1a\n"
# flags of an entry of an archive as torch writes it: its name is UTF-8, its sizes come after it
_PLAIN_FLAGS = 0x808


class DamagedError(Exception):
    """The bytes are not what was written."""


class DeepmdCheckpointError(CheckpointError):
    """The file is whole, but a checkpoint of DeePMD-kit.

    Attributes:
        content: of the file.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        convert = command("dp-ema", "convert", path, "model.dp")
        super().__init__(
            f"{path}: a checkpoint of DeePMD-kit, which holds its state of a run in another form. "
            f"--init-model and --finetune start a run from its weights, and `{convert}` makes a "
            "model file of it."
        )
        self.content = content


def save(
    path: str | Path,
    payload: Mapping[str, Any],
    fallback: Path | None = None,
    check: Callable[[Path], None] | None = None,
    option: str = "training.save_dir",
    world: World | None = None,
) -> None:
    """Write ``payload`` to ``path`` in one move, with a digest of it.

    Nothing may change its tensors meanwhile.

    Args:
        path: the file; its folder is made if it is missing.
        payload: primitive containers, numbers, strings and tensors.
        fallback: an older checkpoint, named in the message when the writing fails.
        check: called with the path of the whole file before it takes its name; what it raises keeps
            an older file.
        option: what names the place, for the message.
        world: the processes that write a folder together, with a group that nobody else uses
            meanwhile; then every rank must call this, and ``payload`` has
            :class:`~deepmd_ema.distributed.tensors.RowShard` in place of tensors that are
            distributed. None: a file.

    Raises:
        WriteError: if the disk is full or the folder cannot be written; an older file of that name
            is kept. Where another rank has failed: :class:`RankLostError`.
    """
    path = Path(path)
    usable = f" {fallback} is whole and still usable." if fallback is not None else ""
    advice = f"Or choose another {option}.{usable}"
    with writing(path, advice):
        if world is not None:
            # half a second for torch.distributed.checkpoint, which no other run needs
            from deepmd_ema.checkpoint.sharded import write_folder

            write_folder(path, payload, world)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, advice) as part:
            write_archive(part, payload)
            if check is not None:
                check(part)


def write_archive(path: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` with its digest to ``path``, which nobody else reads yet."""
    # torch names the folder inside of an archive after the path: given an open file it is always
    # the same, and equal contents are equal bytes
    with path.open("wb") as file:
        content = _interned(on_cpu(payload))
        torch.save({**content, DIGEST: content_digest(content)}, file)


def load(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU.

    The path is anything that :func:`resolve` takes. A sharded checkpoint is read whole, and has the
    content of a gathered one.

    Raises:
        CheckpointError: if it is missing, damaged (the newest intact one before it is named), lacks
            a part, was written by a newer version, or is no checkpoint at all.
        DeepmdCheckpointError: if DeePMD-kit has written it.
    """
    payload: dict[str, Any] = whole(load_shards(path))
    return payload


def load_shards(path: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Return the payload as :func:`load` does, with tensors of a sharded checkpoint on the disk.

    Args:
        path: as for :func:`load`.
        share: number k and n of the processes that read it together, each of which checks the bytes
            of its n-th of the shards.
    """
    path = resolve(path)
    try:
        return _read(path, share)
    except DamagedError as error:
        # A restart must not continue silently from an older one: the message names it, and the user
        # decides. A link has no step in its name, the file does.
        advice = "There is no older intact checkpoint beside it."
        real = path.resolve()
        series, last = series_and_step(real.name) or ("", 0)
        older = numbered(real.parent, series)
        for step in sorted((step for step in older if step < last), reverse=True):
            with suppress(
                DamagedError, CheckpointError
            ):  # the older one is not intact either
                _read(older[step])
                advice = (
                    f"The newest intact checkpoint before it is {older[step]}: continue from that "
                    "one."
                )
                break
        raise CheckpointError(f"{path}: damaged, {error}. {advice}") from error


def resolve(path: str | Path) -> Path:
    """Return the checkpoint that ``path`` means.

    It is a checkpoint itself, its name without ``.pt`` or ``.dcp``, or the folder of a run.

    Raises:
        CheckpointError: if there is no such file; the checkpoints in that folder are listed.
    """
    path = Path(path)
    if path.is_dir() and not is_sharded(path):
        path /= POINTER
        if not path.is_file():
            raise CheckpointError(
                f"{path.parent}: no file {POINTER!r} here that names the newest checkpoint. "
                f"{_nearby(path)}"
            )
    missing = f"{path}: no such file."
    try:
        if path.name == POINTER and path.is_file():
            target = outputs.read_pointer(path)
            name = "nothing" if target == path.parent else target  # an empty pointer
            missing = f"{path}: names {name}, which is missing."
            path = target
        candidates = [path]
        if path.name:
            candidates += [path.with_name(path.name + suffix) for suffix in SUFFIXES]
        for candidate in candidates:
            if candidate.is_file() or is_sharded(candidate):
                return candidate
            # a kill has hit the moment at which a newer folder took its place
            if is_sharded(spare_of(candidate)):
                return spare_of(candidate)
            # reported itself: a link without its file would be "no such file"
            if candidate.is_symlink():
                missing = (
                    f"{candidate}: links to {os.readlink(candidate)}, which is missing."
                )
                break
        else:
            newest = _newest_of(path)
            if newest is not None:
                return newest
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not the path of a checkpoint, which a run writes there "
            f"({reason_of(error)}). Give the checkpoint itself. {_nearby(path)}"
        ) from error
    raise CheckpointError(f"{missing} {_nearby(path)}")


def _newest_of(link: Path) -> Path | None:
    """Return the newest checkpoint if ``link`` is the name of a link to it.

    A file system without links has none of folders.
    """
    with suppress(OSError, ValueError):
        newest = outputs.read_pointer(link.with_name(POINTER))
        series = (series_and_step(newest.name) or ("",))[0]
        if link.name in (series, f"{series}{newest.suffix}") and newest.exists():
            return newest
    return None


def _read(path: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Read one checkpoint that a run has written, with the keys of this version and no digest.

    Raises:
        CheckpointError: if something else has written it, or a newer version.
        DamagedError: if its bytes were lost or changed.
    """
    if path.is_dir():
        # half a second for torch.distributed.checkpoint, and no other checkpoint needs it
        from deepmd_ema.checkpoint.sharded import read_folder

        payload: Any = read_folder(path, share)
    else:
        payload = read_archive(path)
        if isinstance(payload, dict) and SHARDS in payload:
            raise CheckpointError(
                f"{path}: a part of a sharded checkpoint. Give its folder, {path.parent}."
            )
    # the format first: a newer version may have changed the parts that are checked below
    if isinstance(payload, dict) and "format" in payload and "kind" in payload:
        number = payload["format"]
        if not isinstance(number, int) or not 1 <= number <= FORMAT:
            raise CheckpointError(
                f"{path}: written by dp-ema {payload.get('version', 'of another version')} in "
                f"format {' '.join(str(number).split())[:40]}; this version reads formats from 1 "
                f"to {FORMAT}. Update dp-ema."
            )
        payload = {
            _RENAMED.get(name, name): part
            for name, part in payload.items()
            if name != DIGEST
        }
        check_content(payload, path)
        return payload
    # DeePMD-kit stores the input of a model as its extra state
    weights = payload.get("model", payload) if isinstance(payload, Mapping) else {}
    if isinstance(weights, Mapping) and "_extra_state" in weights:
        raise DeepmdCheckpointError(path, payload)
    raise CheckpointError(f"{path}: a torch file, but not a checkpoint of dp-ema.")


def read_archive(path: Path) -> Any:
    """Return the content of a file without its digest, on the CPU.

    Raises:
        CheckpointError: if it cannot be read, or is a file of another kind.
        DamagedError: if its bytes were lost or changed.
    """
    try:
        _check_archive(path)
        payload = torch.load(path, map_location="cpu", weights_only=True)
        # a program that changes an archive writes checksums that fit; the digest differs then
        expected = payload.pop(DIGEST, None) if isinstance(payload, dict) else None
        if expected is not None and expected != content_digest(payload):
            raise DamagedError("its content is not what was written (another digest)")
    except (CheckpointError, DamagedError):
        raise
    except pickle.UnpicklingError as error:
        freeze = command("dp", "--pt", "freeze", "-c", path, "-o", "model.pth")
        raise CheckpointError(
            f"{path}: holds objects other than tensors and numbers, which are not loaded: they "
            f"could run any program. Of a file of DeePMD-kit `{freeze}` and `dp convert-backend "
            "model.pth model.dp` make one that is read."
        ) from error
    # bytes that were changed can make the readers of archives and pickles fail in any way
    except Exception as error:
        if (reason := refusal_of(error)) is not None:
            raise CheckpointError(f"{path}: cannot be read {reason}") from error
        raise DamagedError(
            f"{str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
        ) from error
    return payload


def _check_archive(path: Path) -> None:
    """Check every byte against the archive's checksums, which ``torch.load`` does not do."""
    with path.open("rb") as file:
        head = file.read(8)
    if not head:
        raise DamagedError("the file is empty")
    if head[:2] != b"PK":
        what = "not a checkpoint"
        advice = "dp-ema writes them as model.ckpt-<step>.pt."
        if head == _HDF5:
            what = "a frozen model (.dp, HDF5), not a checkpoint"
            advice = "Give it a name that ends in .dp; all commands but --restart read it then."
        raise CheckpointError(f"{path}: {what}. {advice}")
    # the directory of an archive is at its end
    if not zipfile.is_zipfile(path):
        raise DamagedError(f"cut off after {path.stat().st_size} bytes")
    with zipfile.ZipFile(path) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            convert = command("dp", "convert-backend", path, path.with_suffix(".dp"))
            raise CheckpointError(
                f"{path}: a TorchScript archive (.pth), not a checkpoint of a run. `{convert}` "
                "with DeePMD-kit makes a .dp of it, which dp-ema reads."
            )
        # torch has a reader of its own, which takes a compressed entry or one with the attributes
        # of a folder for something else than Python's reader does: then the checksum is right and
        # the weights are wrong. Of two entries of one name each reader may take another one.
        names = Counter(entry.filename for entry in archive.infolist())
        for entry in archive.infolist():
            plain = (
                entry.compress_type == zipfile.ZIP_STORED
                and entry.compress_size == entry.file_size
            )
            if (
                not plain
                or entry.external_attr
                or entry.flag_bits & ~_PLAIN_FLAGS
                or names[entry.filename] > 1
            ):
                raise DamagedError(
                    f"the entry {entry.filename} of the archive is not as it was written"
                )
        bad = archive.testzip()
    if bad is not None:
        raise DamagedError(f"the checksum of {bad} is wrong")


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    files = [
        (series_and_step(p.name) or (p.name, 0), p.name)
        for p in folder.iterdir()
        if p.suffix in SUFFIXES
    ]
    if not files:
        return f"There is no checkpoint in {folder.resolve()}."
    files.sort(
        key=lambda file: (file[0][0], -file[0][1])
    )  # the newest of a series first
    return f"Available in {folder}: {first_few([name for _, name in files])}."


def _interned(tree: Any) -> Any:
    """Return nested containers in which equal texts are one object.

    Pickle writes an object once, so that the bytes of a file would depend on where its texts come
    from, for example on whether a run was restarted.
    """
    if isinstance(tree, dict):
        return {_interned(key): _interned(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(_interned, tree))
    return sys.intern(tree) if type(tree) is str else tree


def require_training(payload: Mapping[str, Any], path: str | Path) -> None:
    """Check that a restart can continue from ``payload``, read from ``path``.

    Raises:
        CheckpointError: if it holds weights only; the message names the file to use instead.
    """
    kind = payload["kind"]
    if kind == "training":
        return
    # "average weights (ema)", "weights (live)"; converted weights have no name
    what = "weights" if kind == "weights" else f"{kind} weights"
    what = f"{what} ({payload['weights'] or 'of another program'})"
    path = Path(path)
    real = path.resolve()
    use = "Use a training checkpoint (model.ckpt-*.pt)"
    # the series of training checkpoints of the same run
    series, _ = series_and_step(real.name) or (real.name, 0)
    series = series.replace(f"_{payload['weights']}.", ".", 1)
    # best, best_ema, best_ice and best_ice_ema are of one run, whose checkpoints are model.ckpt-*
    if best := re.fullmatch(rf"best(?:_[^.]+)?\.([^-]+)(?:-.*)?{_ANY}", real.name):
        series = f"model.{best[1]}"
    if files := numbered(real.parent, series):
        # the file of the same step, or the newest one
        partner = files.get(payload["step"], files[max(files)])
        # as the user would type it: relative if the path was
        if not path.is_absolute():
            partner = path.parent / os.path.relpath(partner, path.parent.resolve())
        use = f"Use --restart {partner}"
    raise CheckpointError(
        f"{path}: holds {what} of step {payload['step']} and not the state of a run (raw weights, "
        f"moments, streams), so a restart cannot continue from it. {use}, or start anew from "
        f"these weights with --init-model {path}."
    )


def refuse_to_replace(path: str | Path, option: str) -> None:
    """Check that a file of weights may be written to ``path``: not over what only a run can write.

    Args:
        path: the file; need not exist.
        option: what names it, for the message.

    Raises:
        CheckpointError: if the name does not end in .pt, or a file of a run is there, or one that
            is no model file.
    """
    path = Path(path)
    if path.suffix.lower() != ".pt":
        raise CheckpointError(
            f"{option} {path}: expected a name that ends in .pt. `dp-ema freeze` makes a .dp of it."
        )
    kind = ""
    try:
        if path.is_file() and path.stat().st_size:
            kind = load(path)["kind"]
    except CheckpointError as error:
        # a file that `dp-ema convert --to deepmd` has written has this key, and may be replaced
        if "dp_ema" not in getattr(error, "content", ()):
            raise CheckpointError(
                f"{option} {path}: a file is there that is no model file of dp-ema. Choose "
                f"another {option}, or move the file away."
            ) from error
    if kind not in ("", "weights"):
        raise CheckpointError(
            f"{option} {path}: a file of kind {kind}, which only a run can write. Choose another "
            f"{option}."
        )


def series_and_step(file: str) -> tuple[str, int] | None:
    """Return the series and the step of a numbered name, or None."""
    match = re.fullmatch(f"(.+){NUMBERED}", file)
    return (match[1], int(match[2])) if match is not None else None


def name_of_weights(file: str, weights: str, step: int | None) -> str:
    """Return the name of ``file`` with the name of the weights and the step, if it lacks them."""
    stem = Path(file).stem
    if numbers := series_and_step(file):
        stem = f"{outputs.suffixed(numbers[0], outputs.suffix_of(weights)).name}-{numbers[1]}"
    elif weights != LIVE:
        stem = f"{stem}{outputs.suffix_of(weights)}"
    if step is not None and re.search(rf"-{step}(?!\d)", stem) is None:
        stem = f"{stem}-{step}"
    return f"{stem}{GATHERED_SUFFIX}"


def files_by_step(folder: Path, series: str, pattern: str) -> dict[int, list[Path]]:
    """Return the files in ``folder`` that ``series`` and ``pattern`` name, by step.

    The pattern is ``NUMBERED`` or ``RANKED``.
    """
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := re.fullmatch(re.escape(series) + pattern, path.name):
            files.setdefault(int(match[1]), []).append(path)
    return files


def numbered(folder: Path, series: str) -> dict[int, Path]:
    """Return the numbered files of a series in ``folder`` by their step."""
    return {
        step: paths[0]
        for step, paths in files_by_step(folder, series, NUMBERED).items()
    }
