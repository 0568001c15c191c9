"""Seconds that neighbor statistics and the statistics of the descriptor take at the start of a training run.

usage: python benchmarks/data_statistics.py --peer DIR [--repeats 3] [--output PAGE]

Runs of one step differ in what they have to find out: all of it (sel "auto", no stat_file), only the descriptor's
statistics and the bias (sel in numbers), nothing (a stat_file of an earlier run). The differences of the times to the
first row of lcurve.out are the statistics, for both programs by one clock. Each time is the least of the repeats, as
what varies between them is the start of Python.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import common

RESOLUTION_S = 0.1  # differences of start-up times below this are noise


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--repeats", type=int, default=3, help="how often everything is measured")
    args = parser.parse_args()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    config = common.bare(common.read_input(args.input, args.data))
    config["training"] |= {"numb_steps": 1, "disp_freq": 1}
    kinds = _inputs(config)
    for key in found:
        # a stat_file knows the descriptor it is for, not the data
        Path(args.work, "data_statistics", key, "stat.hdf5").unlink(missing_ok=True)
    times: dict[tuple[str, str], float] = {}
    for _ in range(args.repeats):
        for key, program in found.items():
            for kind, value in kinds.items():
                seconds = _to_first_row(program, args.work / "data_statistics", key, kind, env, value)
                times[key, kind] = min(seconds, times.get((key, kind), seconds))
    rows = [_row(found[key].name, times, key) for key in found]
    if "peer" in found:
        ours, peer = (max(RESOLUTION_S, times[key, "all"] - times[key, "nothing"]) for key in ("ours", "peer"))
        more = " or more" if ours == RESOLUTION_S else ""
        rows.append(["peer over ours", "", "", f"{peer / ours:.1f}{more}", ""])
    header = ["", "neighbor statistics, s", "descriptor and bias, s", "together, s", "start to step 1, s"]
    page = "\n\n".join(
        [
            f"# Statistics before training, {common.today()}",
            f"{common.count_frames(config)} frames; least of {args.repeats}; differences under {RESOLUTION_S} s are "
            f"noise.  \nOn {common.machine(found, args.threads, args.device)}.",
            common.table(header, rows),
        ]
    )
    common.publish(page, args.output)


def _inputs(config: dict) -> dict[str, dict]:
    """Return the inputs of the three kinds of runs."""
    everything = copy.deepcopy(config)
    everything["model"]["descriptor"]["sel"] = "auto"
    numeric = common.with_numeric_sel(everything)
    cached = copy.deepcopy(numeric)
    cached["training"]["stat_file"] = "../stat.hdf5"
    return {"all": everything, "bias": numeric, "nothing": cached}


def _to_first_row(program: common.Program, work: Path, key: str, kind: str, env: dict, config: dict) -> float:
    folder = work / key / kind
    options = [] if kind == "all" else ["--skip-neighbor-stat"]
    common.write_input(folder, config)
    if kind == "nothing" and not Path(folder, config["training"]["stat_file"]).exists():
        common.train(program, folder, env, *options)
    watched = common.train(program, folder, env, *options)
    return min(watched.rows.values()) - watched.start


def _row(name: str, times: dict[tuple[str, str], float], key: str) -> list[str]:
    everything, bias, nothing = (times[key, kind] for kind in ("all", "bias", "nothing"))
    return [name, *(f"{value:.2f}" for value in (everything - bias, bias - nothing, everything - nothing, everything))]


if __name__ == "__main__":
    main()
