"""Names of model files: numbered checkpoints, links to the newest, best files; made and read back here only."""

from __future__ import annotations

import re
from pathlib import Path

from deepmd_ema.config.outputs import GATHERED_SUFFIX, SHARDED_SUFFIX, suffix_of, suffixed
from deepmd_ema.utils import LIVE

SUFFIXES = (GATHERED_SUFFIX, SHARDED_SUFFIX)
_SUFFIX = f"(?:{'|'.join(map(re.escape, SUFFIXES))})"
_NUMBERED = re.compile(rf"(.+)-(\d+){_SUFFIX}")


def numbered_name(series: str, step: int, suffix: str = GATHERED_SUFFIX) -> str:
    """Return the name of the file of ``step``."""
    return f"{series}-{step}{suffix}"


def numbered_pattern(series: str) -> str:
    """Return a regular expression of all names of :func:`numbered_name`; its first group is the step."""
    return rf"{re.escape(series)}-(\d+){_SUFFIX}"


def best_name(prefix: str, step: int, rank: int, suffix: str = GATHERED_SUFFIX) -> str:
    """Return the name of a best file; rank 1 is the best."""
    return f"{prefix}.ckpt-{step}.t-{rank}{suffix}"


def best_pattern(prefix: str) -> str:
    """Return a regular expression of all names of :func:`best_name`; its groups are the step and the rank."""
    return rf"{re.escape(prefix)}\.ckpt-(\d+)\.t-(\d+){_SUFFIX}"


def series_and_step(file: str) -> tuple[str, int] | None:
    """Return the arguments of :func:`numbered_name` that gave a name, or None."""
    match = _NUMBERED.fullmatch(file)
    return (match[1], int(match[2])) if match is not None else None


def name_of_weights(file: str, weights: str, step: int | None) -> str:
    """Return the name of ``file`` with the weights that are not its own and the step that it does not name yet."""
    stem = Path(file).stem
    numbers = series_and_step(file)
    if numbers is not None:
        stem = numbered_name(suffixed(numbers[0], suffix_of(weights)).name, numbers[1]).removesuffix(GATHERED_SUFFIX)
    elif weights != LIVE:
        stem = f"{stem}{suffix_of(weights)}"
    if step is not None and re.search(rf"-{step}(?!\d)", stem) is None:
        stem = f"{stem}-{step}"
    return f"{stem}{GATHERED_SUFFIX}"


def training_series(file: str, weights: str) -> str:
    """Return the series of training checkpoints of the run that wrote ``file``, a file of the weights ``weights``."""
    if best := re.fullmatch(rf"best(?:_[^.]+)?\.([^-]+)(?:-.*)?{_SUFFIX}", file):  # best_ema, best_ice, best_ice_ema
        return f"model.{best[1]}"
    numbers = series_and_step(file)
    return (numbers[0] if numbers is not None else file).replace(f"_{weights}.", ".", 1)


def files_by_step(folder: Path, pattern: str) -> dict[int, list[Path]]:
    """Return the files in ``folder`` whose whole name matches ``pattern``, by its first group."""
    files: dict[int, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = re.fullmatch(pattern, path.name)
        if match is not None:
            files.setdefault(int(match[1]), []).append(path)
    return files


def numbered(folder: Path, series: str) -> dict[int, Path]:
    """Return the numbered files of a series in ``folder`` by their step."""
    return {step: paths[0] for step, paths in files_by_step(folder, numbered_pattern(series)).items()}
