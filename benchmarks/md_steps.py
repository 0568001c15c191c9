"""MD steps per second in ASE with neighbors searched at every step and with neighbors that are kept.

usage: python benchmarks/md_steps.py [--model MODEL] [--steps N] [--repeats N] [--output PAGE]

Water, 192 atoms (a frame of the example, doubled), 300 K, steps of 0.5 fs. The two calculators take blocks of steps in
turn, in changing order, in one process with one thread; its CPU time is counted, so that other programs on the machine
make no difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import common
from md_runs import water

MODELS = {"README": [25, 50, 100], "small": [4, 8]}  # neurons of the embedding; those of the fitting as the last


def main() -> None:
    """Run the blocks and print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model of water; default: two with random weights")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--repeats", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, potential in _potentials(args.model).items():
        times, searches = _measure(potential, args.steps, args.repeats)
        fresh, kept = (statistics.median(part) for part in times)
        ratios = [a / b for a, b in zip(*times)]
        speed = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        numbers = f"{1 / fresh:.2f}", f"{1 / kept:.2f}", f"{1e3 * (fresh - kept):.2f}"
        rows.append([name, *numbers, speed, f"{searches} in {args.steps * args.repeats}"])
    header = ["model", "searched, steps/s", "kept, steps/s", "saved, ms/step", "speed (range)", "searches when kept"]
    lines = [f"# MD steps per second with kept neighbors, {common.today()}", "", "`python benchmarks/md_steps.py`", "",
             f"192 atoms of water, 300 K, 0.5 fs, blocks of {args.steps} steps in turn, one thread, CPU time; the",
             f"speed is the median of the ratios of the pairs of blocks. torch {torch.__version__}.", ""]  # fmt: skip
    common.publish("\n".join([*lines, common.table(header, rows)]), args.output)


def _potentials(model: Path | None) -> dict:
    """Return the model that is given, or models with random weights of the input of the example."""
    import json

    from deepmd_ema.config import model_config_from_dict
    from deepmd_ema.infer.load import LoadedModel, Provenance
    from deepmd_ema.infer.potential import Potential
    from deepmd_ema.model.build import build_model

    if model is not None:
        return {model.name: Potential(model, device="cpu")}
    found = {}
    for name, neuron in MODELS.items():
        for precision in ("float64", "float32"):
            section = json.loads((common.EXAMPLE / "input.json").read_text())["model"]
            section["descriptor"] |= {"sel": [46, 92], "neuron": neuron, "precision": precision, "axis_neuron": 4}
            section["fitting_net"] |= {"precision": precision}
            if name == "small":
                section["fitting_net"] |= {"neuron": [16, 16]}
            config = model_config_from_dict(section)
            loaded = LoadedModel(build_model(config, 1).eval(), config, Provenance(Path(name), "weights"))
            found[f"{name}, {precision}"] = Potential(loaded, device="cpu")
    return found


def _measure(potential, steps: int, repeats: int) -> tuple[tuple[list[float], list[float]], int]:
    """Return seconds per step of the blocks with searched and with kept neighbors, and the searches of the latter."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    from deepmd_ema import geometry
    from deepmd_ema.calculator import DP

    runs, times, searches = [], ([], []), []
    for skin in (0.0, 1.0):
        atoms = water()
        atoms.calc = DP(potential, skin=skin)
        runs.append(VelocityVerlet(atoms, 0.5 * units.fs))
        runs[-1].run(2)
    plain = geometry._search
    for repeat in range(repeats):
        for which in (0, 1) if repeat % 2 == 0 else (1, 0):
            if which:
                geometry._search = lambda *words, **more: searches.append(1) or plain(*words, **more)
            start = time.process_time()
            runs[which].run(steps)
            times[which].append((time.process_time() - start) / steps)
            geometry._search = plain
    return times, len(searches)


if __name__ == "__main__":
    main()
