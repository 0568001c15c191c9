"""Write the results of DeePMD-kit's Kalman filter for given measurements, and how it measures energies and forces.

Run it with the python of DeePMD-kit 3.2.0:  python make_lkf.py OUT.npz
``filter/``: parameters before and after, gradients, errors and divisors of updates of the filter alone.
``wrapper/``: a model whose parameters are the energies (F, 1) and forces (F, N, 3) themselves: labels, parameters
before and after one update of energies and then four of forces, and how often each force counted in each of these four.
"""

import sys

import numpy as np
import torch
from deepmd.pt.optimizer import KFOptimizerWrapper, LKFOptimizer

SHAPES = [(2, 3), (4,), (6, 5), (3,), (1,), (5, 5)]
BLOCK = 10
ENERGY_WEIGHT, FORCE_WEIGHT = 1.5, 3.0
FRAMES, ATOMS = 3, 10


class Itself(torch.nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.energy = torch.nn.Parameter(torch.tensor(rng.standard_normal((FRAMES, 1))))
        self.force = torch.nn.Parameter(torch.tensor(rng.standard_normal((FRAMES, ATOMS, 3))))

    def forward(self, **_):
        return {"energy": self.energy * 1, "force": self.force * 1}, None, None


class Watched(LKFOptimizer):
    def step(self, error):
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.ndim == 3]
        self.seen += [g.numpy().copy() for g in gradients if g is not None]
        super().step(error)


def run_filter(rng):
    start = [rng.standard_normal(shape) for shape in SHAPES]
    parameters = [torch.nn.Parameter(torch.tensor(value)) for value in start]
    optimizer = LKFOptimizer(parameters, block_size=BLOCK)
    written = {f"filter/w/{i}": value for i, value in enumerate(start)}
    for k in range(5):
        error, divisor = rng.uniform(0.1, 1), rng.uniform(0.5, 3)
        optimizer.set_grad_prefactor(divisor)
        for i, p in enumerate(parameters):
            p.grad = torch.tensor(rng.standard_normal(p.shape))
            written[f"filter/g/{i}/{k}"] = p.grad.numpy().copy()
        optimizer.step(torch.tensor(error, dtype=torch.float64))
        written |= {f"filter/error/{k}": error, f"filter/divisor/{k}": divisor}
    return written | {f"filter/after/{i}": p.detach().numpy() for i, p in enumerate(parameters)}


def run_wrapper(rng):
    model = Itself(rng)
    energy, force = (torch.tensor(rng.standard_normal(s)) for s in ((FRAMES, 1), (FRAMES, ATOMS, 3)))
    written = {"wrapper/energy": energy.numpy(), "wrapper/force": force.numpy()}
    written |= {f"wrapper/w/{name}": p.detach().numpy().copy() for name, p in model.named_parameters()}
    optimizer = Watched(model.parameters(), block_size=100)
    optimizer.seen = []
    wrapper = KFOptimizerWrapper(model, optimizer, 24, 6, False)
    inputs = {
        "coord": torch.zeros(FRAMES, ATOMS, 3),
        "atype": torch.zeros(FRAMES, ATOMS, dtype=torch.int64),
        "box": None,
    }
    wrapper.update_energy(inputs, energy, ENERGY_WEIGHT)
    optimizer.seen.clear()
    wrapper.update_force(inputs, force, FORCE_WEIGHT)
    counts = [np.rint(np.abs(g[0, :, 0]) / FORCE_WEIGHT).astype(int) for g in optimizer.seen]
    written |= {f"wrapper/counts/{k}": c for k, c in enumerate(counts)}
    return written | {f"wrapper/after/{name}": p.detach().numpy() for name, p in model.named_parameters()}


if __name__ == "__main__":
    np.random.seed(7)  # noqa: NPY002
    rng = np.random.default_rng(11)
    np.savez_compressed(sys.argv[1], **run_filter(rng), **run_wrapper(rng))
