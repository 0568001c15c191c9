"""Seconds that neighbor statistics and the statistics of the descriptor take at the start of a training run.

usage: python benchmarks/data_statistics.py --peer DIR [--pairs 3] [--output benchmarks/results/DATE-data_statistics.md]

Runs of one step differ in what they have to find out: all of it (sel "auto", no stat_file), only the descriptor's
statistics and the bias (sel in numbers), nothing (a stat_file of the run before). The differences of the times to the
first row of lcurve.out are the statistics, for both programs by one clock.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import common


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--pairs", type=int, default=3, help="how often everything is measured")
    args = parser.parse_args()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    config = common.bare(common.read_input(args.input, args.data))
    config["training"] |= {"numb_steps": 1, "disp_freq": 1}
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in found}
    for _ in range(args.pairs):
        for key in found:
            times[key].append(_measure(found[key], key, env, config, args.work))
    header, rows = ["", "neighbor statistics, s", "descriptor and bias, s", "together, s"], []
    for key, measured in times.items():
        parts = [*zip(*measured), [sum(pair) for pair in measured]]
        rows.append([found[key].name, *(f"{statistics.median(part):.2f}" for part in parts)])
    if "peer" in times:
        ratio = statistics.median(sum(p) / sum(o) for p, o in zip(times["peer"], times["ours"]))
        rows.append(["ratio", "", "", f"{ratio:.1f}"])
    page = "\n\n".join([
        f"# Statistics before training, {common.today()}",
        f"{_count(config)} frames; median of {args.pairs}.  \n"
        f"On {common.machine(found, args.threads, args.device)}.",
        common.table(header, rows),
    ])
    common.publish(page, args.output)


def _measure(program: common.Program, key: str, env: dict, config: dict, work: Path) -> tuple[float, float]:
    """Return the seconds of the neighbor statistics and of the rest."""
    folder = (work / "data_statistics" / key).resolve()
    everything = copy.deepcopy(config)
    everything["model"]["descriptor"]["sel"] = "auto"
    numeric = common.with_numeric_sel(everything)
    cached = copy.deepcopy(numeric)
    cached["training"]["stat_file"] = str(folder.parent / f"{key}-stat.hdf5")
    Path(cached["training"]["stat_file"]).unlink(missing_ok=True)
    skip = ["--skip-neighbor-stat"]
    whole = _to_first_row(program, folder, env, everything, [])
    rest = _to_first_row(program, folder, env, numeric, skip)
    _to_first_row(program, folder, env, cached, skip)
    nothing = _to_first_row(program, folder, env, cached, skip)
    return whole - rest, rest - nothing


def _to_first_row(program: common.Program, folder: Path, env: dict, config: dict, options: list[str]) -> float:
    common.write_input(folder, config)
    watched = common.train(program, folder, env, *options)
    return min(watched.rows.values()) - watched.start


def _count(config: dict) -> int:
    return sum(1 for s in config["training"]["training_data"]["systems"]
               for _ in common._frames(s, config["model"]["type_map"]))


if __name__ == "__main__":
    main()
