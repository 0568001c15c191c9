"""Model files: written atomically, checked when read; their head, and the weights that a reader takes from them.

Files of kind ``training`` hold everything that a restart needs; the others hold weights only. Each way in which a file
can be wrong has a message. ``schema`` has what a file must hold, ``names`` the names of the files, ``series`` those
that a run keeps.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.checkpoint.archive import DIGEST, DamagedError, read_archive, write_archive
from deepmd_ema.checkpoint.folder import SHARDS, read_folder, write_folder
from deepmd_ema.checkpoint.names import SUFFIXES, numbered, series_and_step, training_series
from deepmd_ema.checkpoint.schema import check_content
from deepmd_ema.config.outputs import POINTER, read_pointer
from deepmd_ema.config.outputs import is_sharded as is_sharded
from deepmd_ema.dist.world import World
from deepmd_ema.errors import CheckpointError, WriteError, command, first_few, is_disk_full, reason_of
from deepmd_ema.files import atomic_write, spare_of, writing
from deepmd_ema.tensors import whole
from deepmd_ema.version import __version__
from deepmd_ema.weight_names import LIVE

FORMAT = 1  # of the payload; this version reads it and all smaller ones

# files that a run has written and no command can make again: what they are, and what would be lost
_NOT_REPLACED = {
    "training": ("the training checkpoint itself", "no restart could continue"),
    "snapshot": ("a snapshot of the run", "`dp-ema posthoc` would leave it out"),
    "average": ("the average that the run has saved", "it would be gone"),
    "best": ("one of the best files of the run", "it would be gone"),
}
_RENAMED = {"owes_validation": "validation_pending"}  # key of an earlier version: key of this one


class DeepmdCheckpointError(CheckpointError):
    """The file is whole, but a checkpoint of DeePMD-kit.

    Attributes:
        content: of the file.
    """

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        convert = command("dp-ema", "convert", path, "model.dp")
        super().__init__(
            f"{path}: a checkpoint of DeePMD-kit, which holds its state of a run in another form. --init-model and "
            f"--finetune start a run from its weights, and `{convert}` makes a model file of it."
        )
        self.content = content


def save(
    path: str | Path,
    payload: Mapping[str, Any],
    fallback: Path | None = None,
    check: Callable[[Path], None] | None = None,
    option: str = "training.save_dir",
) -> None:
    """Write ``payload`` to ``path`` in one move, with a digest of it; nothing may change its tensors meanwhile.

    Args:
        path: the file; its folder is made if it is missing.
        payload: primitive containers, numbers, strings and tensors.
        fallback: an older checkpoint, named in the message when the writing fails.
        check: called with the path of the whole file before it takes its name; what it raises keeps an older file.
        option: what names the place, for the message.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written; an older file of that name is kept.
    """
    path = Path(path)
    with _writing(path, fallback, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            write_archive(part, payload)
            if check is not None:
                check(part)


def save_sharded(path: Path, payload: Mapping[str, Any], world: World, fallback: Path | None = None) -> None:
    """Write ``payload`` to the folder ``path``, to which each rank writes its part. Every rank must call this.

    Args:
        path: the folder.
        payload: as for :func:`save`, with :class:`~deepmd_ema.tensors.RowShard` in place of tensors that are
            distributed over the ranks.
        world: the processes of the run, with a group that nobody else uses meanwhile.
        fallback: as for :func:`save`.

    Raises:
        CheckpointError: where it cannot be written; on other ranks :class:`RankLostError`. An older folder is kept.
    """
    with _writing(path, fallback):
        write_folder(path, payload, world)


def load(path: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint, on the CPU; ``path`` may be anything that :func:`resolve` takes.

    A sharded checkpoint is read whole, and has the content of a gathered one.

    Raises:
        CheckpointError: if it is missing, damaged (the newest intact one before it is named), lacks a part, was written
            by a newer version, or is no checkpoint at all.
        DeepmdCheckpointError: if DeePMD-kit has written it.
    """
    found: dict[str, Any] = whole(load_shards(path))
    return found


def load_shards(path: str | Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Return the payload as :func:`load` does, with tensors of a sharded checkpoint left on the disk.

    Args:
        path: as for :func:`load`.
        share: number k and n of the processes that read it together, each of which checks the bytes of its n-th of the
            shards.
    """
    path = resolve(path)
    try:
        return _read(path, share)
    except DamagedError as error:
        older = _newest_intact_before(path)
        advice = (
            f"The newest intact checkpoint before it is {older}: continue from that one."
            if older is not None
            else "There is no older intact checkpoint beside it."
        )
        raise CheckpointError(f"{path}: damaged, {error}. {advice}") from error


def load_facts(path: str | Path) -> dict[str, Any]:
    """Return the content of one checkpoint with its tensors left on the disk: to look through many of them.

    Names, shapes and facts are those of :func:`load`, which reads the rest and checks every byte.

    Raises:
        CheckpointError: as :func:`load` does.
    """
    try:
        if is_sharded(Path(path)):
            return _checked(Path(path), read_folder(Path(path), share=None))
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whatever it is: the other way of reading has a message for it
        return load(path)
    return _checked(Path(path), payload)


def resolve(path: str | Path) -> Path:
    """Return the checkpoint that ``path`` means: itself, its name without ``.pt`` or ``.dcp``, or the folder of a run.

    Raises:
        CheckpointError: if there is no such file; the checkpoints in that folder are listed.
    """
    path = Path(path)
    if path.is_dir() and not is_sharded(path):
        pointer = path / POINTER
        if not pointer.is_file():
            raise CheckpointError(
                f"{path}: no file {POINTER!r} here that names the newest checkpoint. {_nearby(pointer)}"
            )
        return _follow(pointer)
    if path.name == POINTER and path.is_file():
        return _follow(path)
    for candidate in (path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        if candidate.is_file() or is_sharded(candidate):
            return candidate
        if is_sharded(spare_of(candidate)):  # a kill has hit the moment at which a newer folder took its place
            return spare_of(candidate)
        if candidate.is_symlink():
            raise CheckpointError(f"{candidate}: links to {os.readlink(candidate)}, which is missing. {_nearby(path)}")
    raise CheckpointError(f"{path}: no such file. {_nearby(path)}")


def require_training(payload: Mapping[str, Any], path: str | Path) -> None:
    """Check that a restart can continue from ``payload``, read from ``path``.

    Raises:
        CheckpointError: if it holds weights only; the message names the file to use instead.
    """
    kind = payload["kind"]
    if kind == "training":
        return
    what = f"the average {payload['weights']!r}" if payload["weights"] != LIVE else "the live weights"
    what = what if payload["weights"] else "weights"  # of a file that does not say which
    if kind == "best":
        what = "the best weights" if payload["weights"] == LIVE else f"the best weights of {what}"
    path = Path(path)
    real = path.resolve()
    use = "Use a training checkpoint (model.ckpt-*.pt)"
    files = numbered(real.parent, training_series(real.name, payload["weights"]))
    if files:
        partner = files.get(payload["step"], files[max(files)])  # of the same step, or the newest one there is
        if not path.is_absolute():
            partner = path.parent / os.path.relpath(partner, path.parent.resolve())
        use = f"Use --restart {partner}"
    raise CheckpointError(
        f"{path}: holds {what} of step {payload['step']} and not the state of a run (raw weights, moments, streams), "
        f"so a restart cannot continue from it. {use}, or start anew from these weights with --init-model {path}."
    )


def ensure_writable(folder: str | Path, option: str = "") -> None:
    """Make ``folder`` if need be, and check that a file can be written into it.

    Args:
        folder: where files will be written.
        option: what names the folder, for the message.

    Raises:
        CheckpointError: if not.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # without a name: a kill here leaves nothing
            probe.write(b"x")
    except OSError as error:
        place, more = (f"{option}: ", f", or let {option} name another folder") if option else ("", "")
        reason = "a file of that name is in the way" if folder.is_file() else reason_of(error)
        remedy = "Make room on the disk" if is_disk_full(error) else "Use a folder that you may write to"
        raise CheckpointError(f"{place}{folder.absolute()}: cannot write here ({reason}). {remedy}{more}.") from error


def refuse_to_replace(path: str | Path, option: str) -> None:
    """Check that a file of weights may be written to ``path``: not over what only a run can write.

    Args:
        path: the file; need not exist.
        option: what names it, for the message.

    Raises:
        CheckpointError: if the name does not end in .pt, or a file of a run is there, or one that is no model file.
    """
    path = Path(path)
    if path.suffix.lower() != ".pt":
        raise CheckpointError(f"{option} {path}: expected a name that ends in .pt. `dp-ema freeze` makes a .dp of it.")
    try:
        kind = load_facts(path)["kind"] if path.is_file() and path.stat().st_size else ""
    except DeepmdCheckpointError as error:
        if "dp_ema" in error.content:  # `dp-ema convert --to deepmd` has written it
            return
        raise CheckpointError(
            f"{option} {path}: a checkpoint of DeePMD-kit is there. Choose another {option}."
        ) from error
    except CheckpointError as error:
        raise CheckpointError(
            f"{option} {path}: a file is there that dp-ema cannot read. Choose another {option}, or move the file away."
        ) from error
    found = _NOT_REPLACED.get(kind)
    if found is not None:
        what, loss = found
        raise CheckpointError(
            f"{option} {path}: {what}. The file written holds weights only, so that {loss}. Choose another {option}."
        )


def payload_head(
    kind: str, weights: str, step: int | None, config: Mapping[str, Any], min_nbor_dist: Any, **more: Any
) -> dict[str, Any]:
    """Return the first entries of a model file: its kind, the program that wrote it, run and step of its weights.

    Args:
        kind: ``training``, ``average``, ``best``, ``snapshot`` or ``weights``.
        weights: ``live``, or the name of an average.
        step: optimizer steps after which the weights were saved.
        config: normalized config of the run.
        min_nbor_dist: nearest pair in the training data, angstrom, or None when it is not known; by task if there are
            several.
        more: what this kind of file has beside, such as ``run``.
    """
    return {
        "format": FORMAT,
        "version": __version__,
        "kind": kind,
        "weights": weights,
        "step": step,
        "config": dict(config),
        "min_nbor_dist": min_nbor_dist,
        **more,
    }


def weights_in(
    payload: Mapping[str, Any], path: str | Path, profile: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights that a reader of a file uses, by name, and the facts of the average (empty for live weights).

    A training checkpoint holds the live weights and every average; any other file holds one set of weights. The live
    buffers complete an average. Tensors that were fitted after training (``refitted``) take the place of the raw ones,
    which only a restart needs.

    Args:
        payload: content of a model file.
        path: where it was read, for messages.
        profile: an average by name (see :func:`choose_profile`), or None for the file's own weights.

    Raises:
        CheckpointError: if there is no average of that name.
    """
    own = payload["weights"]
    weights, facts, name = dict(payload["model"]), dict(payload.get("average", {})), own
    if profile is not None and payload["kind"] == "training":
        name = choose_profile(payload, path, profile)
        state = payload["averages"]["profiles"][name]
        weights |= state["weights"]
        plain = {key: value for key, value in state.items() if isinstance(value, str | int | float | None)}
        facts = {"profile": name, **plain, "updates": max(0, state["updates"])}  # before its start it has no update
    elif profile is not None and profile != own:
        raise CheckpointError(f"{path}: holds the weights {own!r}, not the average {profile!r}.")
    return weights | refitted(payload).get(name, {}), facts


def refitted(payload: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that were fitted after training, by name of the weights and by their names in the models."""
    found = payload.get("refitted", payload.get("refitted_bias", {}))  # of 0.1.0, where one model had the bias itself
    return {name: dict(own) if isinstance(own, Mapping) else {"out_bias": own} for name, own in found.items()}


def choose_profile(payload: Mapping[str, Any], path: str | Path, profile: str | None = None) -> str:
    """Return the name of an average that a training checkpoint holds: ``profile``, or the only one there is.

    Raises:
        CheckpointError: if there is none, or none of that name, or several and no name.
    """
    profiles = payload.get("averages", {}).get("profiles", {})
    if not profiles:
        raise CheckpointError(
            f"{path}: no averaged weights in this checkpoint: training.enable_ema was false and training.averaging "
            'empty. Train with "enable_ema": true, or leave out --use-ema to take the live weights.'
        )
    if profile is None and len(profiles) == 1:
        return str(next(iter(profiles)))
    if profile is None or profile not in profiles:
        wanted = "which average?" if profile is None else f"no average is called {profile!r}."
        raise CheckpointError(f"{path}: {wanted} Give --average one of: {', '.join(profiles)}.")
    return profile


def _read(path: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Read and check one checkpoint; :class:`DamagedError` if its bytes were lost or changed."""
    if path.is_dir():
        return _checked(path, read_folder(path, share))
    payload = read_archive(path)
    if isinstance(payload, dict) and SHARDS in payload:
        raise CheckpointError(f"{path}: a part of a sharded checkpoint. Give its folder, {path.parent}.")
    return _checked(path, payload)


def _checked(path: Path, payload: Any) -> dict[str, Any]:
    """Return ``payload`` under the keys of this version, without its digest, once a run is known to have written it."""
    if isinstance(payload, dict) and "format" in payload and "kind" in payload:
        found = payload["format"]
        if not isinstance(found, int) or not 1 <= found <= FORMAT:
            raise CheckpointError(
                f"{path}: written by dp-ema {payload.get('version', 'of another version')} in format "
                f"{' '.join(str(found).split())[:40]}; this version reads formats from 1 to {FORMAT}. Update dp-ema."
            )
        payload = {_RENAMED.get(name, name): part for name, part in payload.items() if name != DIGEST}
        check_content(payload, path)
        return payload
    weights = payload.get("model", payload) if isinstance(payload, Mapping) else {}
    if isinstance(weights, Mapping) and "_extra_state" in weights:  # where DeePMD-kit keeps the input of a model
        raise DeepmdCheckpointError(path, payload)
    raise CheckpointError(f"{path}: a torch file, but not a checkpoint of dp-ema.")


def _newest_intact_before(path: Path) -> Path | None:
    real = path.resolve()
    found = series_and_step(real.name)
    if found is None:
        return None
    older = {s: p for s, p in numbered(real.parent, found[0]).items() if s < found[1]}
    for step in sorted(older, reverse=True):
        with suppress(DamagedError, CheckpointError):  # this one is not intact either
            _read(older[step])
            return older[step]
    return None


def _follow(pointer: Path) -> Path:
    try:
        named = read_pointer(pointer)
        there = named.is_file() or is_sharded(named) or is_sharded(spare_of(named))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{pointer}: not the path of a checkpoint, which a run writes there ({reason_of(error)}). Give the "
            f"checkpoint itself. {_nearby(pointer)}"
        ) from error
    if not there:
        raise CheckpointError(
            f"{pointer}: names {'nothing' if named == pointer.parent else named}, which is missing. {_nearby(named)}"
        )
    return resolve(named)


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    files = [p for p in folder.iterdir() if p.suffix in SUFFIXES]
    if not files:
        return f"There is no checkpoint in {folder.resolve()}."

    def key(p: Path) -> tuple[str, int]:
        series, step = series_and_step(p.name) or (p.name, 0)
        return series, -step  # the newest of a series first

    return f"Available in {folder}: {first_few([p.name for p in sorted(files, key=key)])}."


@contextmanager
def _writing(path: Path, fallback: Path | None, option: str = "training.save_dir") -> Iterator[None]:
    """Turn what the system refuses in the body into a message that names ``fallback``, which is still usable."""
    try:
        with writing(path):
            yield
    except WriteError as error:
        folder = next(f for f in path.absolute().parents if f.is_dir())
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free in {folder}"
        if is_disk_full(error.cause):
            advice = f"The disk is full ({free}). Make room there, or choose another {option}."
        else:
            advice = f"Reason: {reason_of(error.cause)} ({free})."
        usable = f" {fallback} is whole and still usable." if fallback is not None else ""
        raise CheckpointError(f"{path}: the checkpoint could not be written. {advice}{usable}") from error
