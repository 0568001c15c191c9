"""Frames, parameters and projections of gradients that follow from names, for the golden numbers of
dpa4 and dpa4c.
"""

import zlib

import numpy as np
import torch


def frames(number):
    """Return positions (number, 14, 3), types (14,) and cells (number, 3, 3), each larger than the
    one before.
    """
    rng = np.random.default_rng(7)
    box = np.array([[7.3, 0, 0], [0.4, 6.9, 0], [-0.3, 0.5, 7.6]])
    grid = np.array(
        [(i, j, k) for i in range(3) for j in range(3) for k in range(2)][:14]
    ) / [
        3,
        3,
        2,
    ]
    boxes = np.array([(1 + 0.12 * k) * box for k in range(number)])
    coord = [(grid + rng.normal(size=grid.shape) * 0.03) @ box for box in boxes]
    return np.array(coord), rng.integers(0, 3, 14), boxes


def normal(name, shape):
    """Return numbers that follow from a name."""
    return torch.tensor(
        np.random.default_rng(zlib.crc32(name.encode())).normal(size=tuple(shape))
    )


def fill(named):
    """Give parameters the numbers of their names in DeePMD-kit; frequencies keep theirs."""
    for name, parameter in named:
        if "adam_freqs" in name:
            continue
        values = normal(name, parameter.shape)
        if "adam_scale" in name:
            values = 1 + 0.3 * values
        elif "strength_log" in name:
            values = -0.5 + 0.2 * values
        else:
            values = values * (
                0.7 / values.shape[-2] ** 0.5 if values.ndim > 1 else 0.5
            )
        parameter.data.copy_(values)


def loss_of(energy, force, virial):
    """Return a loss of all three."""
    return (
        0.7 * energy
        + (force * normal("force", force.shape)).sum()
        + (virial * normal("virial", virial.shape)).sum()
    )


def projections(gradients):
    """Return one number for each parameter in the order of names, a product with random numbers of
    its name.
    """
    return [
        float(
            (gradients[name] * normal(f"{name} gradient", gradients[name].shape)).sum()
        )
        for name in sorted(gradients)
    ]
