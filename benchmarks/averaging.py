"""Cost of an update of averages: ours, a bare foreach call, torch, torch_ema, Lightning and DeePMD-kit.

usage: python benchmarks/averaging.py --peer DIR [--output PAGE]

All contestants run in this one process on the same parameters, so that they can take turns call by call. Run it with
a python that has torch_ema and lightning beside our dependencies; of DeePMD-kit only the file of its class is loaded,
from the environment `--peer` (the file needs nothing but torch). Who cannot be loaded is named on the page as missing.

The floor is one `torch._foreach_lerp_` per average over lists that were made once. Averages of float32 weights are also
held in float64, our default; beside these stands a bare call after `.double()` of each weight. Each time of a
contestant is paired with a time of the floor beside it, in alternating order; between two pairs the parameters move, as
after a step of an optimizer. Everything is built anew several times, so that luck with places in memory is part of the
spread. Before that every contestant takes the same two updates and must agree with the formula.

At the end examples/water is trained for some steps, and the time of one update is set against that of a whole step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import common
import torch
from torch import Tensor, nn

from deepmd_ema.averaging import AverageBank, EmaProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DECAYS = (0.999, 0.99, 0.9)  # one per average
MOST_OVER_FLOOR = 1.25  # what is claimed of ours
MOST_OVER_WIDE_FLOOR = 1.0  # and of ours in float64
LEAST_OVER_AVERAGED_MODEL = 2.5
MOST_OF_A_STEP = 0.025  # where the weights come from memory, not from a cache
PEER_FILE = "lib/python3.*/site-packages/deepmd/pt_expt/train/ema.py"
BLOCK_S = 0.01  # a time is that of as many calls as take the floor this long
FLOOR, OURS, AVERAGED_MODEL = "`_foreach_lerp_`, cached lists", "dp-ema", "torch `AveragedModel`"
WIDE_FLOOR, WIDE_OURS = "`_foreach_lerp_` in float64 of `.double()`", "dp-ema, averages in float64 (default)"


@dataclass(frozen=True)
class Case:
    """A model to average: elements with two embedding nets of widths 25, 50, 100 and a fitting net of three layers."""

    name: str
    elements: int
    fitting_in: int
    fitting_width: int

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of all tensors."""
        embedding = _layers(1, 25, 50, 100)
        width = self.fitting_width
        return (2 * embedding + _layers(self.fitting_in, width, width, width, 1)) * self.elements


CASES = {"small": Case("small", 3, 480, 120), "large": Case("large", 30, 850, 240)}


class Weights(nn.Module):
    """Parameters of given shapes, and nothing else."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)

    @torch.no_grad()
    def move(self, factor: float) -> None:
        """Change every parameter a little, as a step of an optimizer does."""
        torch._foreach_mul_(list(self.parameters()), factor)


@dataclass(frozen=True)
class Contestant:
    """Somebody's averages of a module: one update of all of them, and the first tensor of the first."""

    update: Callable[[], object]
    first: Callable[[], Tensor]


def main() -> None:
    """Measure and print the page."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    makers, missing = _find_contestants(args.peer)
    pages, medians = [], {}
    for dtype, case, averages in itertools.product(args.dtype, args.case, args.averages):
        wide = {WIDE_FLOOR: _wide_floor, WIDE_OURS: partial(_ours, dtype="float64")} if dtype == "float32" else {}
        _check(makers | wide, CASES[case], averages, getattr(torch, dtype), args.device)
        pairs = _measure(makers | wide, CASES[case], averages, getattr(torch, dtype), args)
        pages.append(_table(CASES[case], averages, dtype, pairs))
        print(pages[-1], "\n", flush=True)
        medians[dtype, case, averages] = {
            name: statistics.median(b / a for a, b in found) for name, found in pairs.items()
        }
    shares = [] if args.no_share else [_share_of_step(n, args) for n in args.averages]
    names = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_ema", "lightning")
             if importlib.util.find_spec(name) is not None]  # fmt: skip
    page = "\n\n".join(
        [
            f"# Cost of an update of averages, {common.today()}",
            f"Contestants in one process, {args.builds} builds of {args.rounds} rounds of pairs with the floor; times "
            "are medians, ratios are medians of the ratios of the pairs.  \n"
            f"{', '.join(names)}; on {common.machine(common.programs(None), args.threads, args.device)}.",
            *(f"Missing: {name} ({why})." for name, why in missing.items()),
            *pages,
            *_claims(medians, shares),
        ]
    )
    common.publish(page, args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--averages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 3])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "float64"), default=["float32", "float64"])
    parser.add_argument("--rounds", type=int, default=20, help="pairs with the floor per contestant and build")
    parser.add_argument("--builds", type=int, default=3, help="how often everything is built anew")
    parser.add_argument("--steps", type=int, default=60, help="steps of the training that the share is taken from")
    parser.add_argument("--no-share", action="store_true", help="leave the training out")
    return parser.parse_args()


def _layers(*widths: int) -> list[tuple[int, ...]]:
    return [shape for a, b in itertools.pairwise(widths) for shape in ((a, b), (b,))]


def _find_contestants(peer: str | None) -> tuple[dict[str, Callable[[Weights, int], Contestant]], dict[str, str]]:
    """Return who can be measured, and who cannot with the reason."""
    found: dict[str, Callable[[Weights, int], Contestant]] = {
        FLOOR: _floor, OURS: _ours, AVERAGED_MODEL: _averaged_model
    }  # fmt: skip
    missing = {}
    for name, module, maker in (
        ("torch_ema", "torch_ema", _torch_ema),
        ("Lightning `EMAWeightAveraging`", "lightning", _lightning),
    ):
        if importlib.util.find_spec(module) is None:
            missing[name] = f"{module} is not installed"
        else:
            found[name] = maker
    files = sorted(Path(peer).glob(PEER_FILE)) if peer is not None else []
    if files:
        spec = importlib.util.spec_from_file_location("peer_ema", files[0])
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        found["DeePMD-kit `ModelEMA`"] = lambda weights, averages: _peer(loaded.ModelEMA, weights, averages)
    else:
        missing["DeePMD-kit `ModelEMA`"] = "no --peer" if peer is None else f"{peer} has no {PEER_FILE}"
    return found, missing


def _floor(weights: Weights, averages: int) -> Contestant:
    live = list(weights.parameters())
    shadows = [[p.detach().clone() for p in live] for _ in range(averages)]

    @torch.no_grad()
    def update() -> None:
        for shadow, decay in zip(shadows, DECAYS):
            torch._foreach_lerp_(shadow, live, 1 - decay)

    return Contestant(update, lambda: shadows[0][0])


def _wide_floor(weights: Weights, averages: int) -> Contestant:
    live = list(weights.parameters())
    shadows = [[p.detach().double() for p in live] for _ in range(averages)]

    @torch.no_grad()
    def update() -> None:
        wide = [p.double() for p in live]
        for shadow, decay in zip(shadows, DECAYS):
            torch._foreach_lerp_(shadow, wide, 1 - decay)

    return Contestant(update, lambda: shadows[0][0])


def _ours(weights: Weights, averages: int, dtype: str = "float32") -> Contestant:
    # as wide as the weights, which is what the others do
    profiles = [EmaProfile(f"ema{i}", d, warmup=False, dtype=dtype) for i, d in enumerate(DECAYS[:averages])]
    bank = AverageBank(weights, profiles)
    return Contestant(bank.update, lambda: bank.weights("ema0")["tensors.0"])


def _averaged_model(weights: Weights, averages: int) -> Contestant:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    models = [AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in DECAYS[:averages]]
    return Contestant(
        lambda: [model.update_parameters(weights) for model in models], lambda: next(models[0].parameters())
    )


def _torch_ema(weights: Weights, averages: int) -> Contestant:
    from torch_ema import ExponentialMovingAverage

    emas = [ExponentialMovingAverage(weights.parameters(), d, use_num_updates=False) for d in DECAYS[:averages]]
    return Contestant(lambda: [ema.update() for ema in emas], lambda: emas[0].shadow_params[0])


def _lightning(weights: Weights, averages: int) -> Contestant:
    """What a step of Lightning's trainer calls; the trainer itself is a number of steps."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import EMAWeightAveraging

    module = LightningModule()
    module.weights = weights
    module.to(next(weights.parameters()).device)
    trainer = SimpleNamespace(global_step=0)
    callbacks = [EMAWeightAveraging(decay=decay) for decay in DECAYS[:averages]]
    for callback in callbacks:
        callback.setup(trainer, module, "fit")

    def update() -> None:
        trainer.global_step += 1
        for callback in callbacks:
            callback.on_train_batch_end(trainer, module, None, None, 0)

    return Contestant(update, lambda: next(callbacks[0]._average_model.parameters()))


def _peer(kind: type, weights: Weights, averages: int) -> Contestant:
    emas = [kind(weights, decay) for decay in DECAYS[:averages]]

    def first() -> Tensor:
        with emas[0].apply_shadow(weights):
            return next(weights.parameters()).detach().clone()

    return Contestant(lambda: [ema.update(weights) for ema in emas], first)


def _check(makers: dict, case: Case, averages: int, dtype: torch.dtype, device: str) -> None:
    """Raise SystemExit unless every contestant has the average that the formula gives."""
    for name, make in makers.items():
        weights = Weights(case.shapes(), dtype, device)
        start = next(weights.parameters()).detach().clone()
        contestant = make(weights, averages)
        contestant.update()  # some take the weights as they are at the first update: they are those of the start
        weights.move(2.0)
        contestant.update()
        expected = DECAYS[0] * start + (1 - DECAYS[0]) * 2 * start
        difference = float((contestant.first().detach() - expected).abs().max())
        if difference > 1e-5:
            raise SystemExit(f"{name}: its average is off the formula by {difference:.1e}; it is not the same work.")


def _measure(
    makers: dict, case: Case, averages: int, dtype: torch.dtype, args: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """Return for each contestant pairs of seconds per update: the floor's and its own."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for _ in range(args.builds):
        gc.collect()
        weights = Weights(case.shapes(), dtype, args.device)
        contestants = {name: make(weights, averages) for name, make in makers.items()}
        floor = contestants[FLOOR]
        for contestant in contestants.values():
            _seconds(contestant, 3, args.device)
        calls = max(1, round(BLOCK_S / _seconds(floor, 5, args.device)))
        for number in range(args.rounds):
            for name, contestant in contestants.items():
                weights.move(1.001 if number % 2 else 1 / 1.001)
                order = (floor, contestant) if number % 2 else (contestant, floor)
                times = [_seconds(each, calls, args.device) for each in order]
                pairs[name].append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return pairs


def _seconds(contestant: Contestant, calls: int, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        contestant.update()
    wait()
    return (time.perf_counter() - start) / calls


def _table(case: Case, averages: int, dtype: str, pairs: dict[str, list[tuple[float, float]]]) -> str:
    shapes = case.shapes()
    rows = []
    for name, found in pairs.items():
        ratios = [own / floor for floor, own in found]
        time_us = 1e6 * statistics.median(own for _, own in found)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{time_us:.1f}", f"{statistics.median(ratios):.2f}", _quartiles(ratios), spread])
    size = sum(torch.Size(shape).numel() for shape in shapes)
    title = f"## {case.name}: {len(shapes)} tensors of {size / 1e6:.1f}M in all, {dtype}, {averages} average"
    header = ["who", "time per update, us", "over the floor", "middle half", "least to most"]
    return f"{title}{'s' * (averages > 1)}\n\n{common.table(header, rows)}"


def _quartiles(values: Sequence[float]) -> str:
    lower, _, upper = statistics.quantiles(values, n=4)
    return f"{lower:.2f} to {upper:.2f}"


@dataclass(frozen=True)
class Share:
    """Time of an update and of a whole step of the same training, seconds."""

    averages: int
    update: float
    step: float


def _share_of_step(averages: int, args: argparse.Namespace) -> Share:
    """Train the input for some steps and return what an update and what a step took; the first steps do not count."""
    from deepmd_ema.train.run import run_training

    config = common.bare(common.read_input(args.input, args.data))
    training = config["training"]
    training["averaging"] = [{"name": f"ema{i}", "decay": decay} for i, decay in enumerate(DECAYS[:averages])]
    training["numb_steps"], training["disp_freq"] = args.steps, args.steps
    folder = args.work / "averaging" / f"share-{averages}"
    common.write_input(folder, config)
    starts, ends, update = [], [], AverageBank.update

    def timed(bank: AverageBank, *given, **named) -> None:
        starts.append(time.perf_counter())
        update(bank, *given, **named)
        ends.append(time.perf_counter())

    AverageBank.update = timed
    before = Path.cwd()
    os.chdir(folder)
    try:
        run_training("input.json", device=args.device)
    finally:
        os.chdir(before)
        AverageBank.update = update
    late = len(ends) // 3
    steps = [b - a for a, b in itertools.pairwise(ends)]
    return Share(
        averages,
        statistics.median(b - a for a, b in zip(starts[late:], ends[late:])),
        statistics.median(steps[late:-1]),  # the last step also writes
    )


def _claims(medians: dict[tuple[str, str, int], dict[str, float]], shares: Sequence[Share]) -> list[str]:
    lines = []
    for (dtype, case, averages), ratios in medians.items():
        where = f"{case}, {dtype}, {averages}"
        lines.append(_claim(f"{where}: ours is {ratios[OURS]:.2f} times the floor, at most {MOST_OVER_FLOOR}",
                            ratios[OURS] <= MOST_OVER_FLOOR))  # fmt: skip
        if WIDE_OURS in ratios:
            over = ratios[WIDE_OURS] / ratios[WIDE_FLOOR]
            lines.append(_claim(f"{where}: ours in float64 is {over:.2f} times the bare call in float64, at most "
                                f"{MOST_OVER_WIDE_FLOOR:.0f}", over <= MOST_OVER_WIDE_FLOOR))  # fmt: skip
        if case == "small" and dtype == "float32":
            faster = ratios[AVERAGED_MODEL] / ratios[OURS]
            lines.append(_claim(f"{where}: ours is {faster:.1f} times faster than AveragedModel, at least "
                                f"{LEAST_OVER_AVERAGED_MODEL}", faster >= LEAST_OVER_AVERAGED_MODEL))  # fmt: skip
    for share in shares:
        part = share.update / share.step
        lines.append(_claim(f"training step of the input, {share.averages}: {1e6 * share.update:.0f} us of "
                            f"{1e3 * share.step:.1f} ms are {100 * part:.2f} %, below {100 * MOST_OF_A_STEP} %",
                            part < MOST_OF_A_STEP))  # fmt: skip
    return ["## What was claimed\n\nThe number at the end of each case is that of averages.", "\n".join(lines)]


def _claim(text: str, holds: bool) -> str:
    return f"- {'holds' if holds else 'DOES NOT HOLD'}: {text}"


if __name__ == "__main__":
    main()
