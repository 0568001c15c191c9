"""Cases of speed.py: models, inputs of both programs, and the programs with their settings."""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import common

MODELS = common.ROOT / "benchmarks" / "models.json"
CASES = common.ROOT / "benchmarks" / "speed.json"
FITTING = {"neuron": [120, 120, 120], "resnet_dt": True}
MAX_ATOMS = 64 * 192  # atoms in all frames of a system
MAX_FRAMES = 64  # of a system: batches of 1 to 64 divide them, so that all are full
CELL_ATOMS = 96  # of the example
DOUBLED = (2, 1, 1)
GROWING = ["se_e2_a, 1.0 M parameters", "dpa3"]


@dataclass(frozen=True, eq=False)
class Case:
    """One line of the tables.

    Attributes:
        name: in tables.
        descriptor: section ``model.descriptor``.
        fitting: section ``model.fitting_net``.
        times: how often the cells of the example are repeated along their vectors.
        precision: of descriptor and fitting net.
        batch: frames per step.
        own: options of dp-ema alone, by their names with dots.
    """

    name: str
    descriptor: dict[str, Any]
    fitting: dict[str, Any]
    times: tuple[int, int, int]
    precision: str
    batch: int
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def atoms(self) -> int:
        """Number of atoms of a frame."""
        return CELL_ATOMS * math.prod(self.times)

    @property
    def file_name(self) -> str:
        """Name of its results."""
        return f"{self.name}-{self.precision}-{self.batch}-{self.atoms}".replace(
            ", ", "-"
        ).replace(" ", "_")

    @property
    def words(self) -> list[str]:
        """First cells of a line of a table."""
        return [self.name, self.precision, str(self.batch), str(self.atoms)]


@dataclass(frozen=True, eq=False)
class Runner:
    """A program with its settings.

    Attributes:
        name: on the command line and in results.
        title: in tables.
        ours: whether it is dp-ema.
        options: of the input, by their names with dots.
        backend: option of ``dp`` that chooses the backend.
    """

    name: str
    title: str
    ours: bool
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = ""

    def command(self, found: dict[str, common.Program]) -> list[str]:
        """Return the first words of its command line."""
        return (
            list(found["ours"].command)
            if self.ours
            else [found["peer"].command[0], self.backend]
        )


COMPILED = {"training.enable_compile": True}
RUNNERS = [
    Runner("eager", "dp-ema", True),
    Runner(
        "compiled",
        "dp-ema, compiled",
        True,
        COMPILED | {"validating.compiled_infer": False},
    ),
    Runner("pt", "dp --pt", False, {}, "--pt"),
    Runner("pt_expt", "dp --pt-expt", False, {}, "--pt-expt"),
    Runner("pt_expt_compiled", "dp --pt-expt, compiled", False, COMPILED, "--pt-expt"),
]


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is measured."""
    parser.add_argument(
        "--kinds",
        nargs="+",
        help=f"names in {MODELS.name} and {CASES.name}; all if not given",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["float64", "float32"],
        choices=("float64", "float32"),
    )
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 8], help="frames per step"
    )
    parser.add_argument(
        "--atoms",
        nargs="+",
        type=int,
        default=[192, 768, 1536, 5184, 12288],
        help="stage growth",
    )
    parser.add_argument(
        "--programs",
        nargs="+",
        default=["eager", "pt"],
        choices=[r.name for r in RUNNERS],
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME:KEY=VALUE[,KEY=VALUE]",
        help="one more way to run dp-ema, with options of its input, as "
        "always:model.descriptor.interpolate=always",
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line chooses."""
    models = json.loads(MODELS.read_text())
    known = {name: {"model": name} for name in models} | json.loads(CASES.read_text())
    found = []
    for kind in args.kinds or list(known):
        if kind not in known:
            raise SystemExit(f'--kinds "{kind}" is unknown. Known: {", ".join(known)}.')
        one = known[kind]
        shape = (
            models[one["model"]],
            one.get("fitting", FITTING),
            tuple(one.get("times", DOUBLED)),
        )
        found += [
            Case(kind, *shape, p, n, one.get("set", {}))
            for p in args.precision
            for n in args.batch
        ]
    return found


def growth_cases(args: argparse.Namespace) -> list[Case]:
    """Return a case for each model, precision and number of atoms, with the first batch size."""
    args = argparse.Namespace(
        kinds=args.kinds or GROWING,
        precision=args.precision,
        batch=args.batch[:1],
        atoms=args.atoms,
    )
    return [
        replace(case, times=times_of(n))
        for case in cases_of(args)
        for n in sorted(args.atoms)
    ]


def times_of(atoms: int) -> tuple[int, int, int]:
    """Return the repetitions of the cells of the example for a number of atoms, in a shape near a
    cube.
    """
    cells, rest = divmod(atoms, CELL_ATOMS)
    if rest or not cells:
        raise SystemExit(
            f"--atoms {atoms}: expected multiples of {CELL_ATOMS}, the atoms of a cell of the "
            "example."
        )
    divisors = [n for n in range(1, cells + 1) if cells % n == 0]
    shapes = [
        (cells // b // c, b, c)
        for c in divisors
        for b in divisors
        if cells % (b * c) == 0
    ]
    return min(shapes, key=lambda shape: (sum(shape), -shape[0], -shape[1]))


def runners_of(args: argparse.Namespace) -> list[Runner]:
    """Return the programs that the command line chooses, dp-ema first; those of the peer only where
    it is.
    """
    named = [runner for runner in RUNNERS if runner.name in args.programs]
    extra = []
    for word in args.set:
        name, _, rest = word.partition(":")
        options = dict(pair.partition("=")[::2] for pair in rest.split(",") if pair)
        if not options or "" in options:
            raise SystemExit(f'--set "{word}": expected NAME:KEY=VALUE[,KEY=VALUE].')
        extra.append(
            Runner(
                name,
                f"dp-ema, {name}",
                True,
                {key: _value(text) for key, text in options.items()},
            )
        )
    ours = [runner for runner in named if runner.ours] + extra
    return ours + [
        runner for runner in named if not runner.ours and args.peer is not None
    ]


def input_of(case: Case, args: argparse.Namespace, **training: Any) -> dict[str, Any]:
    """Return an input that both programs read: training steps alone, without an end, on one system
    of water.

    Args:
        case: what is trained.
        args: with the input to start from, and the folder of the data.
        **training: options of the section ``training``.
    """
    config = common.bare(common.read_input(args.input, args.data))
    system = system_of(
        config["training"]["training_data"]["systems"][0], case.times, args.work
    )
    config["training"] |= {
        "numb_steps": 10**7,
        "training_data": {"systems": [str(system)], "batch_size": case.batch},
    }
    config["training"] |= training
    config["learning_rate"] = {
        "type": "exp",
        "start_lr": 1e-4,
        "stop_lr": 1e-5,
        "decay_steps": 10**5,
    }
    config["model"] |= {
        "descriptor": copy.deepcopy(case.descriptor),
        "fitting_net": copy.deepcopy(case.fitting),
    }
    return common.with_precision(config, case.precision)


def system_of(source: str, times: tuple[int, int, int], work: Path) -> Path:
    """Return the frames of a system with their cells repeated, which are written if they are not
    there.
    """
    folder = (
        work.resolve()
        / "speed"
        / "data"
        / f"{Path(source).name}-{'x'.join(map(str, times))}"
    )
    if not folder.exists():
        cells = times[0] * times[1] * times[2]
        common.write_repeated(
            Path(source),
            folder,
            times,
            min(MAX_FRAMES, max(8, MAX_ATOMS // (CELL_ATOMS * cells))),
        )
    return folder


def with_options(config: dict[str, Any], *options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which options that are named with dots have their values; each part of a
    hybrid gets them.
    """
    config = copy.deepcopy(config)
    for key, value in (
        (key, value) for given in options for key, value in given.items()
    ):
        *path, last = key.split(".")
        sections = [config]
        for name in path:
            sections = [section.setdefault(name, {}) for section in sections]
            if name == "descriptor":
                sections = [
                    part
                    for section in sections
                    for part in section.get("list", [section])
                ]
        for section in sections:
            section[last] = copy.deepcopy(value)
    return config


def runner_input(
    config: dict[str, Any], case: Case, runner: Runner, caches: Path
) -> dict[str, Any]:
    """Return the input of one program; dp-ema keeps compiled code below ``caches``."""
    config = with_options(config, case.own if runner.ours else {}, runner.options)
    if runner.ours and config["training"].get("enable_compile"):
        config["training"]["compile_options"] = {"cache_dir": str(caches / "dp-ema")}
    return config


def runner_environment(
    args: argparse.Namespace, runner: Runner, caches: Path
) -> dict[str, str]:
    """Return the environment of one program; DeePMD-kit keeps compiled code below ``caches``."""
    env = common.environment(args.threads, args.device)
    return (
        env if runner.ours else env | {"TORCHINDUCTOR_CACHE_DIR": str(caches / "peer")}
    )


def _value(text: str) -> Any:
    """Return a value of the command line: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
