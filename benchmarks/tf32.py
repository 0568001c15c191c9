"""What products of fewer bits do to a trained model: errors of energies, forces and gradients with TF32 and bfloat16.

usage: python benchmarks/tf32.py [--kinds dpa3 ...] [--steps 300] [--output PAGE]

Models of beside_peer.json and se_e2_a are trained in float64. Then they are evaluated once more with every factor of
every matrix product, forward and backward, rounded to the mantissa of float32, TF32 or bfloat16, which is what tensor
cores do with factors; sums stay in float64. So it needs no GPU. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import torch
from error_curves import TRAINED, train_once
from speed_bound import PRODUCTS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch

FORMATS = {"float32": 24, "TF32": 11, "bfloat16": 8}  # bits of the mantissa, with the one that is not stored
SE_E2_A = {"type": "se_e2_a", "sel": [46, 92], "rcut": 6.0, "rcut_smth": 0.5, "neuron": [25, 50, 100],
           "axis_neuron": 16, "type_one_side": True}  # fmt: skip
OTHERS = json.loads((common.ROOT / "benchmarks" / "beside_peer.json").read_text())
KINDS = {"se_e2_a": SE_E2_A, **{kind: OTHERS[kind]["descriptor"] for kind in ("se_atten, 2 layers", "dpa2", "dpa3")}}
FRAMES, MANY = 8, 10**6
VALIDATION = common.EXAMPLE / "data" / "validation"


class Rounded(TorchDispatchMode):
    """Rounds the factors of matrix products to a mantissa of ``bits`` bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if name in PRODUCTS:
            args = list(args)
            for position in PRODUCTS[name]:
                args[position] = self._round(args[position])
        return function(*args, **(kwargs or {}))

    def _round(self, x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**self.bits).round() / 2**self.bits, exponent)


def main() -> None:
    """Train, evaluate, and print the page."""
    args = _arguments()
    program, env = common.programs(None)["ours"], common.environment(args.threads, "cpu")
    torch.set_num_threads(args.threads)
    rows = []
    for kind in args.kinds:
        folder = args.work.resolve() / "tf32" / kind.replace(", ", "-").replace(" ", "_")
        train_once(program, env, folder, _input(KINDS[kind], args.steps))
        rows += _rows(kind, folder / TRAINED)
    header = ["model", "validation: energy", "force", "factors in", "energy", "force", "gradient", "of other frames"]
    text = (
        f"Models of the water example after {args.steps} steps in float64. First their RMSE on {2 * FRAMES} validation "
        "frames, energy in meV/atom and force in meV/angstrom; then the RMS difference that factors with fewer bits "
        "make in energies and forces, and in the gradient by the parameters of the loss of one half of frames (norm "
        "of the difference over the norm). The last column is that between the gradients of both halves, both exact."
    )
    machine = common.machine(common.programs(None), args.threads, "cpu")
    parts = [f"# Matrix products with fewer bits, {common.today()}", text, common.table(header, rows), f"On {machine}."]
    common.publish("\n\n".join(parts), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    return parser.parse_args()


def _input(descriptor: dict[str, Any], steps: int) -> dict[str, Any]:
    config = common.bare(common.read_input(common.EXAMPLE / "input.json", None))
    config["model"]["descriptor"] = descriptor
    config["training"] |= {"numb_steps": steps}
    return common.with_seed(common.with_precision(config, "float64"), 1)


def _rows(kind: str, path: Path) -> Iterator[list[str]]:
    from deepmd_ema.data.loader import sequential_batches
    from deepmd_ema.data.source import ReadSpec
    from deepmd_ema.infer.evaluate import open_checked
    from deepmd_ema.infer.load import load_model
    from deepmd_ema.labels import ENERGY, FORCE
    from deepmd_ema.model.interpolation import interpolations_of

    model, _ = load_model(path).on("cpu")
    model.train()
    for spline in interpolations_of(model).values():
        spline.use(0)  # as on a GPU; and series are made in float64 anyway
    labels = (ENERGY, FORCE)
    system = open_checked([str(VALIDATION)], ReadSpec(tuple(model.type_map), labels), model.layout.rcut)
    chosen = [[range(first, first + FRAMES)] for first in (0, FRAMES)]
    batches = [
        next(sequential_batches(system, model.layout, max_atoms=MANY, labels=labels, frames=half)) for half in chosen
    ]
    parameters = [p for p in model.parameters() if p.requires_grad]

    def evaluated(batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return energies per atom, forces, the gradient, and the residuals of energies and forces."""
        out = model(batch)
        energy, force = out["energy"].flatten() / batch.num_atoms, out["force"]
        wanted = batch.labels["energy"].flatten() / batch.num_atoms, batch.labels["force"].view_as(force)
        residuals = [energy - wanted[0], force - wanted[1]]
        loss = sum(residual.square().mean() for residual in residuals)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([g.flatten() for g in gradients])
        return energy.detach(), force.detach(), gradient, [r.detach().flatten() for r in residuals]

    exact, other = map(evaluated, batches)
    residual = [torch.cat(pair) for pair in zip(exact[3], other[3])]
    words = [kind, *(f"{1000 * _rms(value):.3g}" for value in residual)]
    beside = f"{_relative(other[2], exact[2]):.2g}"
    for name, bits in FORMATS.items():
        with Rounded(bits):
            found = evaluated(batches[0])
        differences = [1000 * _rms(found[k] - exact[k]) for k in (0, 1)]
        yield [*words, name, *(f"{d:.2g}" for d in differences), f"{_relative(found[2], exact[2]):.2g}", beside]


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
