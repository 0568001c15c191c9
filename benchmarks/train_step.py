"""Seconds per training step, here and with DeePMD-kit, on the same input: interleaved runs, medians of pairs.

usage: python benchmarks/train_step.py --peer DIR [--pairs 3] [--output PAGE]

Both programs write a row of lcurve.out every --interval steps in the same format; the time between rows is measured
from outside, so both are timed by one clock. Validation, averages and checkpoints are off (--full leaves them on).
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import common


def main() -> None:
    """Measure and print the table."""
    args = _arguments()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    config = common.with_numeric_sel(common.read_input(args.input, args.data))
    rows = []
    for precision in args.precision:
        for batch in args.batch:
            times = _measure(found, env, _prepared(config, precision, batch, args), args, f"{precision}-{batch}")
            rows.append(_row(precision, batch, times))
            print(" | ".join(rows[-1]), flush=True)
    what = "validation, averages and checkpoints as in the input" if args.full else "training steps alone"
    descriptor = config["model"]["descriptor"]
    page = "\n\n".join(
        [
            f"# Time of a training step, {common.today()}",
            f"{descriptor['type']}, sel {descriptor['sel']}, rcut {descriptor['rcut']}; {what}; {args.pairs} "
            f"interleaved pairs of runs, median of the intervals of {args.interval} steps in a run, then of the "
            "runs; the ratio is the median of the ratios of the pairs.  \n"
            f"On {common.machine(found, args.threads, args.device)}.",
            common.table(
                ["precision", "batch", "dp --pt, ms/step", "dp-ema, ms/step", "ratio", "ratio, least to most"], rows
            ),
        ]
    )
    common.publish(page, args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--precision", nargs="+", default=["float64", "float32"], choices=("float64", "float32"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="frames per batch")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs per line")
    parser.add_argument("--interval", type=int, default=20, help="steps between two rows, for batch 1")
    parser.add_argument("--intervals", type=int, default=5, help="intervals that count, after one to warm up")
    parser.add_argument("--full", action="store_true", help="leave validation, averages and checkpoints on")
    return parser.parse_args()


def _prepared(config: dict, precision: str, batch: int, args: argparse.Namespace) -> dict:
    config = common.with_precision(config if args.full else common.bare(config), precision)
    training = config["training"]
    training["training_data"]["batch_size"] = batch
    training["disp_freq"] = max(2, args.interval // batch)
    training["numb_steps"] = training["disp_freq"] * (args.intervals + 1)
    return config


def _measure(found: dict, env: dict, config: dict, args: argparse.Namespace, name: str) -> dict[str, list[float]]:
    """Return for each program one time per pair, in seconds per step."""
    times: dict[str, list[float]] = {key: [] for key in found}
    for pair in range(args.pairs):
        order = list(found) if pair % 2 else list(found)[::-1]
        for key in order:
            folder = args.work / "train_step" / f"{name}-{key}"
            common.write_input(folder, config)
            watched = common.train(found[key], folder, env, "--skip-neighbor-stat")
            times[key].append(_seconds_per_step(watched.rows, config["training"]["disp_freq"]))
    return times


def _seconds_per_step(rows: dict[int, float], interval: int) -> float:
    steps = sorted(step for step in rows if step >= interval)
    return statistics.median((rows[b] - rows[a]) / (b - a) for a, b in itertools.pairwise(steps))


def _row(precision: str, batch: int, times: dict[str, list[float]]) -> list[str]:
    milliseconds = {key: f"{1000 * statistics.median(values):.1f}" for key, values in times.items()}
    if "peer" not in times:
        return [precision, str(batch), "", milliseconds["ours"], "", ""]
    ratios = [peer / ours for peer, ours in zip(times["peer"], times["ours"])]
    median, spread = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [precision, str(batch), milliseconds["peer"], milliseconds["ours"], median, spread]


if __name__ == "__main__":
    main()
