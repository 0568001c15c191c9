"""The files that a run writes: checked and locked before the data are read.

Files of earlier runs are moved away.
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
from deepmd_ema.distributed.links import is_copy, link
from deepmd_ema.errors import CheckpointError, UserError, collect_problems
from deepmd_ema.files import (
    JSON,
    RECORD_FILE,
    TABLE,
    atomic_write,
    ensure_writable,
    move,
    refuse_to_lose,
    sync,
    writing,
)
from deepmd_ema.locks import locked
from deepmd_ema.training.request import TrainRequest
from deepmd_ema.utils import LIVE

logger = logging.getLogger(__name__)

# folders earlier-1, earlier-2, ... hold the files of runs that were not continued
EARLIER = "earlier"


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
    # The weights to start from may be files that this run would replace: before its first
    # checkpoint is written, they would be moved away, and a second attempt would not find them.
    if weights is not None:
        file = Path(weights)
        real = (file if file.is_file() else checkpoint.resolve(file)).resolve()
        set_aside = (*_files_of(config), *_files_of_earlier(config, output))
        if real in {path.resolve() for path in set_aside}:
            copy = "`cp -r {} start.dcp`" if is_sharded(real) else "`cp {} start.pt`"
            raise CheckpointError(
                f"{weights}: the file to start from belongs to an earlier run, in whose place "
                "this one writes files of the same names. Start this one in another folder, or "
                f"from a copy: {copy.format(os.path.relpath(real))}."
            )
    # All problems are collected and reported together. The folders are made here, because only
    # then it is known whether files can be written in them.
    outputs = [
        Output("--output", "the normalized config", Path(output)),
        *Outputs(config),
    ]
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
        if (
            o.has_rows
        ):  # rows are appended after a restart, so the file must be a table of rows
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
    outputs, run_folder = Outputs(config), Path.cwd()
    # one name covers all checkpoints of a folder, that of the link, and BEST all best files
    single = [o.path for o in outputs if not o.is_folder]
    single.append(outputs.checkpoint_folder / outputs.checkpoint_link(LIVE).name)
    if outputs.has_best:
        single.append(outputs.best_folder / BEST)
    places = {(path.parent.resolve(), path.name) for path in single}
    away = [
        folder / f".{name}.lock"
        for folder, name in places
        if not folder.is_relative_to(run_folder)
    ]
    # Sorted: of two runs that start together one gets all locks, and neither gets some of them.
    return locked([run_folder / LOCK, *sorted(away)])


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
        files += _files_of(config)
        path = Path(output)
        if path.is_file():
            files += _files_of_earlier(config, output)
            if path.read_text(encoding="utf-8", errors="replace") != text:
                files.append(path)
    present = [path for path in files if path.is_file() or is_sharded(path)]
    # each once, also where one config names it in full
    files = [*{os.path.abspath(path): path for path in present}.values()]
    # A run that ended before its first row leaves its record and its normalized config, which are
    # nothing to keep.
    results = [path for path in files if path != Path(RECORD)]
    if results and not (results == [Path(output)] and _normalized(results[0])):
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


def _normalized(path: Path) -> RunConfig | None:
    """Return the run of a normalized config, as a run writes it, with every default.

    An input of the user, which says less, is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config = (
            config_from_dict(values, str(path)) if isinstance(values, dict) else None
        )
        return config if config is not None and to_dict(config) == values else None
    except (OSError, ValueError, UserError):
        return None


def _files_of_earlier(config: RunConfig, output: str) -> Iterator[Path]:
    """Yield the files of an earlier run with the same checkpoints, of which ``output`` is left.

    Some of them the new run may not have, such as files of an average: commands would take them for
    its own.
    """
    earlier = _normalized(Path(output))
    if earlier is None or earlier.training.save_ckpt != config.training.save_ckpt:
        return
    for path in _files_of(earlier):
        # the config may be of somebody else, and names no places outside of the folder
        if path.parent.resolve().is_relative_to(Path.cwd()):
            yield path


def _files_of(config: RunConfig) -> Iterator[Path]:
    """Yield the files of a run: curves and logs, links, its record, checkpoints, best files."""
    outputs = Outputs(config)
    yield from (o.path for o in outputs if o.has_rows or o.is_link)
    yield from (Path(POINTER), Path(RECORD), Path(LOGGED))
    for name in (LIVE, *(average.name for average in config.training.averaging)):
        series = suffixed(config.training.save_ckpt, suffix_of(name)).name
        for folder in (outputs.checkpoint_folder, outputs.snapshot_folder):
            for paths in files_by_step(folder, series, NUMBERED).values():
                yield from paths
        for task in config.tasks:
            prefix = outputs.best_prefix(name, task)
            for paths in files_by_step(outputs.best_folder, prefix, RANKED).values():
                yield from paths


def _set_aside(files: Iterable[Path]) -> list[Path]:
    """Move files to ``earlier-N``, N the same everywhere, and return these folders.

    It has the folders of the run below it; files from elsewhere have one beside them. Links between
    the files are laid anew.
    """
    # by file: the folder in which earlier-N is made (that of the run, or its own), and the path of
    # the file in earlier-N
    run_folder = Path.cwd()
    places = dict[Path, tuple[Path, Path]]()
    for path in files:
        folder = path.parent.resolve()
        if folder.is_relative_to(run_folder):
            places[path] = Path(), folder.relative_to(run_folder) / path.name
        else:
            places[path] = path.parent, Path(path.name)
    # one number for all of them, so that files of one run are found together
    number = 1
    while any((root / f"{EARLIER}-{number}").exists() for root, _ in places.values()):
        number += 1
    moved = {
        path: root / f"{EARLIER}-{number}" / below
        for path, (root, below) in places.items()
    }
    # new places by real path, before anything is moved: links are resolved by them
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
    # the file that names the newest checkpoint: its content is a path, which has moved, too
    pointer = moved.get(Path(POINTER))
    if pointer is not None:
        checkpoint_file = None
        with suppress(
            OSError, ValueError
        ):  # a file of another kind, whose content is no path
            text = pointer.read_text(encoding="utf-8", errors="surrogateescape")
            checkpoint_file = real.get(Path(text.strip()).resolve())
        if checkpoint_file is not None:
            pointer.write_bytes(
                os.fsencode(os.path.relpath(checkpoint_file, pointer.parent))
            )
    # entries of folders are on the disk before the new run writes files of the same names
    roots = {root for root, _ in places.values()}
    for folder in roots | {path.parent for path in moved}:
        sync(folder)
    return sorted(root / f"{EARLIER}-{number}" for root in roots)
