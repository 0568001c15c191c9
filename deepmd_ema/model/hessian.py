"""Second derivatives of the energies of a batch by the positions of the atoms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from deepmd_ema.batch import Batch
from deepmd_ema.model.ops.gather import sum_over_reverse

# A atoms, K neighbor slots, D directions: coordinates of an atom of each frame, N atoms of a frame

# slots times directions of one pass; with 100 channels and float64 about 160 MB per tensor
PAIRS_AT_ONCE = 200_000
PAIRS_IN_CACHE = (
    3_000  # the same on a CPU: of 240 to 200,000 the fastest, for 15 atoms and dpa2
)


def hessian(gradient: Tensor, batch: Batch, create_graph: bool) -> Tensor:
    """Return the Hessians of the frames one after the other, each ((3 N)^2,), in eV/angstrom^2.

    A column is the change of the gradient as one coordinate moves. Frames do not know of each
    other, so the same coordinate of all of them moves at once. The second derivatives of an energy
    by the vectors are symmetric, so that the backward pass of the gradient gives its change.

    Args:
        gradient: (A, K, 3) of the energy with respect to ``batch.vector``, eV/angstrom,
            differentiable by it.
        batch: frames; ``vector`` requires a gradient.
        create_graph: whether the result can be differentiated with respect to the parameters. The
            graphs of all directions are then kept until the backward pass.
    """
    num_atoms, num_slots = batch.neighbor.shape
    most = 3 * max(batch.sizes)
    place = batch.place_in_frame
    axis = torch.eye(3, dtype=torch.float64, device=place.device)
    at_once = PAIRS_IN_CACHE if place.device.type == "cpu" else PAIRS_AT_ONCE
    step = max(1, at_once // max(1, num_atoms * num_slots))
    columns = []
    for first in range(0, most, step):
        number = torch.arange(first, min(first + step, most), device=place.device)
        is_moved = one_hot(number // 3, most // 3).double()[:, place]  # (D, A)
        moved = is_moved.unsqueeze(-1) * axis[number % 3].unsqueeze(1)  # (D, A, 3)
        # (D, A, K, 3): the change of vectors as atoms move by `moved`, for which the backward pass
        # gives the change of the gradient with respect to positions
        by_vector = moved[:, batch.neighbor] - moved.unsqueeze(2)
        (change,) = torch.autograd.grad(
            gradient,
            batch.vector,
            by_vector,
            is_grads_batched=True,
            create_graph=create_graph,
            retain_graph=True,
        )
        change = change.permute(1, 2, 3, 0)  # (A, K, 3, D)
        on_neighbors = sum_over_reverse(
            change.flatten(2), batch.neighbor, batch.reverse
        )
        columns.append(on_neighbors.view(num_atoms, *change.shape[2:]) - change.sum(1))
    by_file = torch.empty_like(place).index_copy(
        0, batch.atom_order, torch.arange(num_atoms, device=place.device)
    )
    # atoms as in the files; a smaller frame has fewer columns, and the rest of its rows is 0
    rows = torch.cat(columns, -1).index_select(0, by_file).split(batch.sizes)
    return torch.cat(
        [
            frame_rows[..., : 3 * n].reshape(-1)
            for frame_rows, n in zip(rows, batch.sizes)
        ]
    )
