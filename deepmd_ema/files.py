"""Files that are written whole or not at all, also at a power cut, and never over other files."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepmd_ema.errors import UserError, WriteError, errno_of

logger = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255  # length of the name of a file on the file systems in use
# no file is written for so long: half-written files of other machines are removed then
_LEFT_S = 24 * 3600.0
# name of a half-written file: machine and process that write it, a random number, the suffix
_PART = re.compile(
    r".*\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d{1,10})-[0-9a-f]{16}\.part(\.\w+)?",
    re.DOTALL,
)
_BLOCK_BYTES = 1 << 20  # part of a file that is read at once
# some network file systems have no fsync of a folder
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
# answers of a file system that does not have locks, links or the like
UNSUPPORTED = (
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EPERM,
)


@dataclass(frozen=True)
class Kind:
    """A kind of output file, recognised by its first bytes: only such a file may be overwritten.

    Attributes:
        name: with its article.
        head: matches the beginning of such a file.
    """

    name: str
    head: re.Pattern[bytes]


JSON = Kind("a JSON file", re.compile(rb"\s*\{"))
RECORD_FILE = Kind("the record of a run", re.compile(rb"\[\s*\{\s*\"command\""))
TABLE = Kind("a table that begins with #", re.compile(rb"#"))
CSV = Kind("a table of `dp-ema posthoc`", re.compile(rb"weights,kind,"))
HTML = Kind("an HTML page", re.compile(rb"\s*<!doctype html", re.IGNORECASE))
LOG = Kind("a log of dp-ema", re.compile(rb"\[\d{4}-\d\d-\d\d "))
# HDF5, the keys of a tree in YAML, or an archive by its first entry: compiled code, TorchScript,
# torch.export
_ARCHIVE_HEAD = rb"PK\x03\x04.{26}[^/]{1,200}/data/(aotinductor/|0|weights/)"
_MODEL_HEAD = (
    rb"\x89HDF|" + _ARCHIVE_HEAD + rb"|.{0,4000}(@class|@version|@variables|software:)"
)
MODEL_FILE = Kind("a frozen model", re.compile(_MODEL_HEAD, re.DOTALL))
# PNG, PDF, PostScript, SVG, JPEG, TIFF of both kinds, WebP, PGF
PICTURE = Kind(
    "a picture",
    re.compile(rb"\x89PNG|%PDF|%!PS|<\?xml|\xff\xd8|II\*\0|MM\0\*|RIFF|%% Creator"),
)


@contextmanager
def atomic_write(path: str | Path, advice: str = "") -> Iterator[Path]:
    """Yield a path to write to; on success it becomes ``path`` in one move, else it is removed.

    The file and its folder are flushed to the disk, so that a crash at any moment leaves the old
    file or the new one. Links are followed: what they lead to is replaced. What is no regular file
    (a device, a pipe) is given the bytes. The path that is yielded ends as ``path`` does, and
    nobody can foresee it or lay a link in its place.

    Args:
        path: the file.
        advice: what the user can do when it cannot be written, beside what the error itself calls
            for.

    Raises:
        WriteError: if the system refuses to write.
    """
    with writing(path, advice):
        final = Path(os.path.realpath(path))
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with suppress(FileNotFoundError):
            os.lstat(final)  # a name that is too long is refused before the work
        # a device or a pipe (/dev/stdout) must not be replaced; libraries that write archives seek,
        # which a pipe cannot do, so they write to a file first
        if final.exists() and not final.is_file():
            with tempfile.TemporaryDirectory() as folder:
                part = Path(folder) / f"part{final.suffix}"
                part.touch()
                yield part
                with part.open("rb") as source, final.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
            return
        # made here, so that a folder that cannot be written is found before the work
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with taking_the_place_of(final) as part:
            os.close(os.open(part, flags, 0o666))
            yield part
            # before it is moved: else a power cut may leave the name without the bytes
            sync(part)


@contextmanager
def writing(path: str | Path, advice: str = "") -> Iterator[None]:
    """Turn what the system refuses in the body into a message that names ``path``.

    Raises:
        WriteError: for an error of the system, also where torch or HDF5 has wrapped it.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and errno_of(error) is None:
            raise
        raise WriteError(str(path), error, advice) from error


def move(old: Path, new: Path) -> None:
    """Give the file ``old`` the name ``new``; a crash afterwards does not undo it."""
    os.replace(old, new)
    sync(new.parent)


def replace_folder(part: Path, final: Path) -> None:
    """Give the folder ``part`` the name ``final``, and remove the folder that has it.

    A crash at any moment leaves a whole folder as ``final``, or as :func:`spare_of` it.
    """
    for folder, _, names in os.walk(part):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    spare = spare_of(final)
    if final.exists():  # no system replaces a folder that is not empty in one move
        remove(spare)
        move(final, spare)
    move(part, final)
    remove(spare)


def spare_of(folder: Path) -> Path:
    """Return the temporary path of a folder while another one takes its place."""
    return folder.parent / f"{folder.name}.old"


def remove(path: Path) -> None:
    """Remove a file, a link or a folder.

    A folder loses its name first: nobody reads it while its files are removed.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    part = part_of(path)
    os.replace(path, part)
    shutil.rmtree(part)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder, without links."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(
        file.stat().st_size for file in files if file == path or not file.is_symlink()
    )


def append(path: Path, text: str, anew: bool = False) -> None:
    """Add ``text`` to a file, or begin it ``anew``.

    A power cut may lose the text until :func:`sync` is called.

    Raises:
        WriteError: if the system refuses to write.
    """
    with writing(path, "The last checkpoint is usable."):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(
            "w" if anew else "a", encoding="utf-8", errors="surrogateescape"
        ) as file:
            file.write(text)


class _NotWrittenError(Exception):
    """A file is not to be written after all."""


def check_output(
    path: str | Path,
    option: str,
    kind: Kind | None,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Check before the work that the system lets a file be written, and that nothing is lost then.

    Args:
        path: see :func:`refuse_to_lose`, as for the other arguments.
        option: what names it, for the message.
        kind: what will be written.
        inputs: files that the command reads.

    Raises:
        UserError: if the folder is missing, the system refuses to write, or an input or another
            kind of file is there.
    """
    if not (folder := Path(path).parent).is_dir():
        raise UserError(
            f"{option} {path}: the folder {folder} is not there. Make it, or choose another "
            f"{option}."
        )
    refuse_to_lose(path, option, kind, inputs)
    # one byte: a full disk lets an empty file be made; the error has it removed again
    with (
        suppress(_NotWrittenError),
        atomic_write(path, f"Or choose another {option}.") as part,
    ):
        part.write_bytes(b"x")
        raise _NotWrittenError


def ensure_writable(folder: str | Path, option: str) -> None:
    """Make ``folder`` if need be, and check that a file can be written into it.

    Args:
        folder: the folder.
        option: what names it, for the message.

    Raises:
        WriteError: if not.
    """
    folder = Path(folder)
    with writing(f"{option}: {folder.absolute()}"):
        folder.mkdir(parents=True, exist_ok=True)
        # without a name: a kill here leaves nothing
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")


def refuse_to_lose(
    path: str | Path,
    option: str,
    kind: Kind | None,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Check before the work that nothing is lost when a file of ``kind`` is written to ``path``.

    Args:
        path: the file; need not exist.
        option: what names it, for the message.
        kind: what will be written; a file of the same kind is written over. None: any file.
        inputs: files that the command reads, which it never writes over.

    Raises:
        UserError: if an input or a file of another kind is there.
    """
    path = Path(path)
    if not path.is_file():
        return
    for source in inputs:
        if (
            source is not None
            and os.path.exists(source)
            and os.path.samefile(path, source)
        ):
            raise UserError(
                f"{option} {path}: this is {source}, which the command reads. Choose another "
                f"{option}."
            )
    with path.open("rb") as file:
        head = file.read(4096)
    if head and kind is not None and not kind.head.match(head):
        raise UserError(
            f"{option} {path}: a file is there that is not {kind.name}, and would be written "
            f"over. Choose another {option}, or move the file away."
        )


def sweep(folder: Path) -> None:
    """Remove half-written files and folders in ``folder`` that a killed process has left.

    A process is looked up on its own machine only; a file of another machine is removed after a
    day.
    """
    for name in os.listdir(folder) if folder.is_dir() else ():
        if (match := _PART.fullmatch(name)) is not None:
            # another process may sweep at the same time
            with suppress(FileNotFoundError):
                written = (folder / name).lstat().st_mtime
                if match["machine"] == this_machine():
                    has_ended = not is_running(int(match["pid"]))
                else:
                    has_ended = time_in(folder) - written > _LEFT_S
                if has_ended:
                    remove(folder / name)


@cache
def this_machine() -> str:
    """Return an identifier of this machine since its start, in which process numbers are unique."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        )
    with suppress(OSError):  # a container counts its processes by itself
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("".join(facts).encode()).hexdigest()[:8]


def file_digest(path: Path, most: float = math.inf) -> str:
    """Return the SHA-256 of a file, or of evenly spaced parts of it beyond ``most`` bytes."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        skipped = _BLOCK_BYTES * int(os.fstat(file.fileno()).st_size / most)
        while number := file.readinto(buffer):
            digest.update(buffer[:number])
            file.seek(skipped, os.SEEK_CUR)
    return digest.hexdigest()


def path_digest(path: Path, most: float = math.inf) -> str:
    """Return the SHA-256 of a file, or of names and contents of the files in a folder.

    See :func:`file_digest` for ``most``.
    """
    if not path.is_dir():
        return file_digest(path, most)
    contents = [
        (file.name, file_digest(file, most))
        for file in sorted(path.iterdir())
        if file.is_file()
    ]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def part_of(final: Path) -> Path:
    """Return the path of a file or folder while it is half-written, which nobody can foresee.

    :func:`sweep` knows such paths.
    """
    # libraries choose formats by the suffix; one of hundreds of letters is none
    suffix = final.suffix if len(os.fsencode(final.suffix)) < 100 else ""
    mark = f".{this_machine()}-{os.getpid()}-{secrets.token_hex(8)}.part{suffix}"
    name = os.fsdecode(
        os.fsencode(final.name)[: _MAX_NAME_BYTES - len(os.fsencode(mark))]
    )
    return final.with_name(name + mark)


@contextmanager
def taking_the_place_of(final: Path) -> Iterator[Path]:
    """Yield a path beside ``final`` for a file or folder, which is moved there, or removed."""
    sweep(final.parent)
    part = part_of(final)
    try:
        yield part
        move(part, final)
    except BaseException:
        remove(part)
        raise


def time_in(folder: Path) -> float:
    """Return the time of the file system of ``folder``, as a file that is written now gets it.

    The clock of this machine may be another one, and may have been set since: the ages of other
    files do not follow from it.
    """
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: it runs, but belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True
