"""The files that a run writes: checked and locked before the data are read; files of earlier runs
are moved away.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.file import NUMBERED, RANKED, files_by_step, numbered
from deepmd_ema.config import RunConfig, config_from_dict, to_dict
from deepmd_ema.config.messages import as_text
from deepmd_ema.config.outputs import (
    BEST,
    LOCK,
    LOGGED,
    POINTER,
    RECORD,
    Output,
    Outputs,
    is_sharded,
    suffix_of,
    suffixed,
)
from deepmd_ema.distributed.files import (
    JSON,
    RECORD_FILE,
    TABLE,
    atomic_write,
    ensure_writable,
    locked,
    move,
    refuse_to_lose,
    sync,
    writing,
)
from deepmd_ema.distributed.links import is_copy, link
from deepmd_ema.errors import CheckpointError, UserError, collect_problems
from deepmd_ema.training.request import TrainRequest
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)

EARLIER = (
    "earlier"  # folders earlier-1, earlier-2, ... hold the files of runs that were not continued
)


def check_outputs(config: RunConfig, request: TrainRequest) -> None:
    """Make the folders that a run writes to, and check that it can write and destroys nothing.

    Args:
        config: of the run.
        request: with the files that the run reads, and where the normalized input is written.

    Raises:
        CheckpointError: naming every place that cannot be written, or where there is something
            else.
    """
    weights, output = request.init_model or request.finetune, request.output
    inputs = (request.file, request.restart, request.init_model, request.finetune)
    if weights is not None:
        file = Path(weights)
        real = (file if file.is_file() else checkpoint.resolve(file)).resolve()
        if real in {path.resolve() for path in _in_the_way(config)}:
            copy = "`cp -r {} start.dcp`" if is_sharded(real) else "`cp {} start.pt`"
            raise CheckpointError(
                f"{weights}: the file to start from belongs to an earlier run, in whose place "
                "this one writes files of the same names. Start this one in another folder, or "
                f"from a copy: {copy.format(os.path.relpath(real))}."
            )
    outputs = [Output("--output", "the normalized config", Path(output)), *Outputs(config)]
    problems = [
        f"{o.option}: {o.path} is a folder, and the run writes a file of that name. Move it away, "
        "or choose another name."
        for o in outputs
        if not o.is_folder and o.path.is_dir() and not o.path.is_symlink()
    ]
    checked: set[Path] = set()
    for o in outputs:
        folder = o.path if o.is_folder else o.path.parent
        if folder not in checked:
            checked.add(folder)
            with collect_problems(problems):
                ensure_writable(folder, o.option)
        if o.has_rows:
            with collect_problems(problems):
                refuse_to_lose(o.path, o.option, TABLE, inputs)
    for path, option, kind in (
        (output, "--output", JSON),
        (RECORD, "the record of the run", RECORD_FILE),
    ):
        with collect_problems(problems):
            refuse_to_lose(path, option, kind, inputs)
    CheckpointError.raise_if_any(problems)


def lock_outputs(config: RunConfig) -> AbstractContextManager[None]:
    """Return the locks of the folder of the run, and of each of its files in other folders.

    Other folders may have files of several runs, under other names. Statistics and TensorBoard's
    files are shared.
    """
    outputs, here = Outputs(config), Path.cwd()
    single = [o.path for o in outputs if not o.is_folder]
    single.append(outputs.checkpoint_folder / outputs.checkpoint_link(LIVE).name)
    single += [outputs.best_folder / BEST] * outputs.has_best
    places = {(path.parent.resolve(), path.name) for path in single}
    away = [folder / f".{name}.lock" for folder, name in places if not folder.is_relative_to(here)]
    return locked([here / LOCK, *sorted(away)])


def write_config(config: RunConfig, output: str, is_new: bool) -> None:
    """Write the config as the run uses it, once the files of an earlier run are set aside.

    Args:
        config: of the run, with everything that was left open.
        output: where it is written.
        is_new: whether the run starts at step 0; one that continues keeps its files.
    """
    text = as_text(to_dict(config)) + "\n"
    outputs = Outputs(config)
    # a copied folder may have files in place of the links, which would be replaced
    links = [o.path for o in outputs if o.is_link and not o.path.is_symlink()]
    files = [path for path in links if not path.is_file() or not is_copy(path)]
    if is_new:
        files += _in_the_way(config)
        path = Path(output)
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") != text:
            files.append(path)
    files = list(dict.fromkeys(path for path in files if path.is_file() or is_sharded(path)))
    # of a run that ended before its first row these two are nothing to keep
    kept = [path for path in files if path != Path(RECORD)]
    if kept and not (kept == [Path(output)] and _is_normalized(kept[0])):
        steps = numbered(outputs.checkpoint_folder, outputs.checkpoint_link(LIVE).stem)
        folders = _set_aside(files)
        logger.warning(
            "there were files of an earlier run%s: moved to %s. To continue that run instead, "
            "stop this one, move them back and use --restart.",
            f", up to step {max(steps)}" if steps else "",
            ", ".join(map(str, folders)),
        )
    with atomic_write(output, "Choose another -o.") as part:
        part.write_text(text, encoding="utf-8")


def _is_normalized(path: Path) -> bool:
    """Whether a file is what a run writes there: beside it such a run, which ended before its first
    row, left nothing.

    An input of the user, which says less, is kept.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return isinstance(found, dict) and to_dict(config_from_dict(found, str(path))) == found
    except (ValueError, UserError):
        return False


def _in_the_way(config: RunConfig) -> Iterator[Path]:
    """Yield the files that a run from step 0 would replace or remove."""
    outputs = Outputs(config)
    yield from (o.path for o in outputs if o.has_rows or o.is_link)
    yield from (Path(POINTER), Path(RECORD), Path(LOGGED))
    for name in (LIVE, *(average.name for average in config.training.averaging)):
        series = suffixed(config.training.save_ckpt, suffix_of(name)).name
        for folder in (outputs.checkpoint_folder, outputs.snapshot_folder):
            for paths in files_by_step(folder, series, NUMBERED).values():
                yield from paths
        for task in config.tasks:
            for paths in files_by_step(
                outputs.best_folder, outputs.best_prefix(name, task), RANKED
            ).values():
                yield from paths


def _set_aside(files: Iterable[Path]) -> list[Path]:
    """Move files to ``earlier-N``, N the same everywhere, and return these folders.

    It has the folders of the run below it; files from elsewhere have one beside them. Links between
    the files are laid anew.
    """
    here, places = (
        Path.cwd(),
        dict[Path, tuple[Path, Path]](),
    )  # folder of the run, and path below it
    for path in files:
        folder = path.parent.resolve()
        is_inside = folder.is_relative_to(here)
        places[path] = (
            (Path(), folder.relative_to(here) / path.name)
            if is_inside
            else (path.parent, Path(path.name))
        )
    number = 1
    while any((root / f"{EARLIER}-{number}").exists() for root, _ in places.values()):
        number += 1
    moved = {path: root / f"{EARLIER}-{number}" / below for path, (root, below) in places.items()}
    real = {path.resolve(): new for path, new in moved.items() if not path.is_symlink()}
    for path, new in moved.items():
        with writing(new):
            new.parent.mkdir(parents=True, exist_ok=True)
            target = path.resolve()
            if not path.is_symlink():
                move(path, new)
            elif target in real:
                link(new, real[target])
                path.unlink()
            else:  # laid by the user: the link stays, and what it leads to is written anew
                shutil.copyfile(path, new)
    pointer = moved.get(Path(POINTER))
    if pointer is not None:
        named = None
        with suppress(OSError, ValueError):  # a file of another kind, whose content is no path
            named = real.get(
                Path(
                    pointer.read_text(encoding="utf-8", errors="surrogateescape").strip()
                ).resolve()
            )
        if named is not None:
            pointer.write_bytes(os.fsencode(os.path.relpath(named, pointer.parent)))
    roots = {root for root, _ in places.values()}
    for folder in roots | {path.parent for path in moved}:
        sync(folder)
    return sorted(root / f"{EARLIER}-{number}" for root in roots)
