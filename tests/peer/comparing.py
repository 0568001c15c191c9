"""Evaluation of models by DeePMD-kit in its own environment, and comparison of numbers and
files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peer_side

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import common as common  # runs of programs, tables and pages

BOUND = 1e-10  # of the largest difference, relative to the largest number
STATISTICS = ("stat_nbatch", "stat_protect", "bias_nsample")
# not part of the function of a model, or reported in another way
IGNORED = {
    "seed",
    "trainable",
    "rcond",
    "protection",
    "rmax",
    *(f"data_{n}" for n in STATISTICS),
}


def run_peer(peer: str, work: Path, jobs: list[dict[str, Any]]) -> None:
    """Have DeePMD-kit do jobs of ``peer_side``."""
    (work / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("peer_side.py")
    words = [str(Path(peer) / "bin" / "python"), str(script), str(work / "jobs.json")]
    subprocess.run(
        words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr
    )


def predictions(path: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the predictions of a model file here for the frames of a job."""
    from deepmd_ema.infer.potential import Potential

    potential, found = Potential(path, device="cpu"), {}
    for name, system in peer_side.frames_of(job["frames"]).items():
        coord, kinds, box = system["coord"], system["type"], system["box"]
        more = peer_side.conditions(job, *coord.shape[:2])
        got = potential.evaluate(coord, kinds, box if box.size else None, **more)
        found |= {f"{name}_{key}": getattr(got, key) for key in peer_side.OUTPUTS}
    return found


def worst_of(found: dict[str, np.ndarray], reference: Path) -> dict[str, float]:
    """Return the largest relative difference of each output over all systems."""
    with np.load(reference) as file:
        by_name = {
            name: largest_difference(value, file[name]) for name, value in found.items()
        }
    return {
        key: max(
            v
            for name, v in by_name.items()
            if name.endswith(f"_{key}")
            and not (key == "energy" and name.endswith("atom_energy"))
        )
        for key in peer_side.OUTPUTS
    }


def largest_difference(found: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference relative to the largest number; infinite where one is not a
    number.
    """
    if not np.isfinite(reference).all() or not np.isfinite(found).all():
        return 0.0 if np.array_equal(found, reference, equal_nan=True) else np.inf
    size = np.abs(reference).max()
    return float(np.abs(found - reference).max() / (size or 1.0))


def other_entries(theirs: Path, ours: Path, config: Any, model: Any) -> Iterator[str]:
    """Write the model again, and yield the entries of the file that are not those of the peer's."""
    from deepmd_ema.interop.dp import file_tree
    from deepmd_ema.interop.tree_files import read_tree, write_tree

    write_tree(ours, file_tree(model, config))
    found = differences(read_tree(theirs)["model"], read_tree(ours)["model"], "")
    for place in _of_se_e3(
        config.descriptor
    ):  # one of the two networks of a pair is not used
        found = [text for text in found if f"{place}.embeddings.networks[" not in text]
    yield from found


def differences(first: Any, second: Any, path: str) -> Iterator[str]:
    """Yield the differences of two trees, without parts that are not of the function of a model."""
    kinds = (type(first), type(second))
    if kinds == (dict, dict):
        for name in sorted((first.keys() | second.keys()) - IGNORED):
            if name not in first or name not in second:
                yield f"{path}.{name} only in {'the first' if name in first else 'the second'}"
            else:
                yield from differences(first[name], second[name], f"{path}.{name}")
    elif np.ndarray in kinds:
        rounding = (
            1e-12 if path.endswith("tab_data") else 0
        )  # splines, computed again from the rows of the table
        shapes = [
            (one.dtype.name, *one.shape) for one in map(np.asarray, (first, second))
        ]
        if shapes[0] != shapes[1] or not np.allclose(
            first, second, rtol=rounding, atol=rounding
        ):
            yield f"{path}: arrays {shapes[0]} and {shapes[1]} differ"
    elif (
        kinds == (list, list)
        and len(first) == len(second)
        and not path.endswith(".sel")
    ):
        for number, pair in enumerate(zip(first, second)):
            yield from differences(*pair, f"{path}[{number}]")
    elif _plain(path, first) != _plain(path, second):
        yield f"{path}: {first!r} and {second!r}"


def _plain(path: str, value: Any) -> Any:
    """Return a value of an option as it is understood: some have several spellings."""
    if path.endswith(".ln_eps"):
        return 1e-5 if value is None else value
    if path.endswith(".sel"):
        return int(np.sum(value))
    if path.endswith(".atom_ener"):
        return value or []
    return value[0] if "preset_out_bias" in path and isinstance(value, list) else value


def _of_se_e3(descriptor: Any) -> list[str]:
    """Return the places of parts of type se_e3."""
    parts = {".descriptor": descriptor}
    if descriptor.type == "hybrid":
        parts = {
            f".descriptor.list[{number}]": part
            for number, part in enumerate(descriptor.list)
        }
    return [place for place, part in parts.items() if part.type == "se_e3"]
