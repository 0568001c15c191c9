"""LKF: the layer-wise extended Kalman filter (RLEKF), one measurement after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deepmd_ema.distributed.tensors import HostCopies, whole
from deepmd_ema.errors import CheckpointError
from deepmd_ema.optim.build import OF_CHECKPOINT, check_state_type
from deepmd_ema.text import first_few

T = TypeVar("T")
MEMORY = 0.98  # RLEKF: the first memory factor lambda
MEMORY_RATE = 0.9987  # RLEKF: the rate nu at which lambda goes to 1
AT_ONCE = (
    2**20
)  # elements of a covariance that are updated together: temporary memory of an update


class LKF:
    """Reorganized layer extended Kalman filter (RLEKF).

    Hu et al., AAAI 2023, arXiv:2212.06989, algorithm 1. All weights form one row, cut into L
    blocks; each has a covariance P, at first the identity. An update with the error e of a
    measurement and its gradient H, in blocks H_l:

        A   = 1 / sum_l (lambda + H_l^T P_l H_l)
        K_l = P_l H_l
        w_l <- w_l + A * e * K_l
        P_l <- (P_l - A * K_l K_l^T) / lambda
        lambda <- nu * lambda + 1 - nu

    Neighbors in the row share a block while they have at most ``block_size`` weights together; a
    larger parameter is cut and does not share its blocks. The memory of all P is that of L times
    ``block_size`` squared numbers at most.

    With several tasks the row of an update is that of the weights of one; the blocks of the others
    stay as they are. Weights that are not of the same tasks share no block.

    Args:
        named_parameters: parameters by name; those with ``requires_grad`` off are left out.
        block_size: most weights of a block.
        tasks: the tasks that have a parameter, by its name; one task without a name has all if not
            given.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        block_size: int,
        tasks: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        trained = {name: p for name, p in named_parameters if p.requires_grad}
        self._shapes = {name: tuple(p.shape) for name, p in trained.items()}
        self._parameters = list(trained.values())
        owners = [("",) if tasks is None else tuple(tasks[name]) for name in trained]
        self._owners = owners  # the tasks of each parameter, and of each block
        # Neighbors of the same tasks only share a block: an update takes whole blocks, and must
        # leave the weights of other tasks and their covariances alone.
        self._sizes = []
        self._block_owners = []
        for tasks_of_group, group in groupby(
            zip(owners, self._parameters), lambda pair: pair[0]
        ):
            sizes = block_sizes([p.numel() for _, p in group], block_size)
            self._sizes += sizes
            self._block_owners += [tasks_of_group] * len(sizes)
        device = self._parameters[0].device
        # products of covariances and gradients need one precision: the wider one of the weights
        dtype = reduce(torch.promote_types, (p.dtype for p in self._parameters))
        self._memory = torch.tensor(MEMORY, dtype=torch.float64, device=device)
        self._covariances = [
            torch.eye(size, dtype=dtype, device=device) for size in self._sizes
        ]

    def parameters_of(self, task: str = "") -> list[nn.Parameter]:
        """Return the trained parameters of a task."""
        return list(_of_task(task, self._parameters, self._owners))

    @torch.no_grad()
    def update(
        self, gradients: Sequence[Tensor], error: Tensor, ok: Tensor, task: str = ""
    ) -> None:
        """Take in one measurement; nothing waits for the device.

        Args:
            gradients: of what was measured, one for each of :meth:`parameters_of` the task.
            error: scalar, measured minus predicted.
            ok: scalar; where it is 0, weights and covariances stay as they are, bit by bit.
            task: whose model has predicted it.
        """
        good = ok > 0
        covariances = list(
            _of_task(task, self._covariances, self._block_owners)
        )  # (n, n) each
        # H of the formula, (weights of the task,). In the row the first dim of a parameter runs
        # fastest, as in DeePMD-kit: it decides which weights share a block.
        row = torch.cat(
            [
                g.permute(*reversed(range(g.ndim))).reshape(-1).to(covariances[0].dtype)
                for g in gradients
            ]
        )
        parts = row.split([len(c) for c in covariances])
        gains = [
            covariance @ part for covariance, part in zip(covariances, parts)
        ]  # K_l
        memory = self._memory.to(gains[0].dtype)  # lambda
        # 1 / A of the formula, a scalar: the sum runs over all blocks, which couples them
        spread = torch.stack(
            [memory + part @ gain for part, gain in zip(parts, gains)]
        ).sum()
        gain = torch.cat(gains)
        # -0.0 is what leaves each number as it is, also -0.0 itself
        change = torch.where(good, gain * (error.to(gain.dtype) / spread), -0.0)
        # where the measurement is bad: minus 0, divided by 1, which changes no bit of P
        inverse = torch.where(good, 1 / spread, 0)
        divisor = torch.where(good, memory, 1)
        good_gains = torch.where(good, gain, 0).split([len(c) for c in covariances])
        for covariance, part in zip(covariances, good_gains):
            # Some rows at a time, for less temporary memory. Each operation rounds elements (i, j)
            # and (j, i) alike, so that P stays symmetric to the last bit. A fused one (addr) does
            # not: its last columns are computed in another way than the others.
            num_rows = max(1, AT_ONCE // len(part))
            for rows, few in zip(covariance.split(num_rows), part.split(num_rows)):
                rows.sub_(torch.outer(few, part).mul_(inverse)).div_(divisor)
        # the change of the row, cut and turned into the shapes of the parameters
        parameters = self.parameters_of(task)
        moves = [
            part.view(tuple(reversed(p.shape)))
            .permute(*reversed(range(p.ndim)))
            .to(p.dtype)
            for p, part in zip(
                parameters, change.split([p.numel() for p in parameters])
            )
        ]
        torch._foreach_add_([p.detach() for p in parameters], moves)
        self._memory.copy_(
            torch.where(
                good, MEMORY_RATE * self._memory + (1 - MEMORY_RATE), self._memory
            )
        )

    def state_dict(self, copy: Callable[[Tensor], Any] | None = None) -> dict[str, Any]:
        """Return the memory factor and all covariances, with the shapes of the parameters.

        Args:
            copy: makes what is returned of a tensor; a copy in host memory if None.
        """
        copy = copy or HostCopies(wait=True)
        return {
            "type": "LKF",
            "parameters": dict(self._shapes),
            "memory": copy(self._memory),
            "covariances": [copy(c) for c in self._covariances],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the memory factor and covariances of ``state``.

        Raises:
            CheckpointError: if the state is of another optimizer, other parameters or other blocks;
                nothing is changed.
        """
        check_state_type(state, "LKF")
        # in order, too: the blocks follow the order of the parameters, and have no names
        saved_shapes = {
            name: tuple(shape) for name, shape in state["parameters"].items()
        }
        if list(saved_shapes.items()) != list(self._shapes.items()):
            differing = sorted(dict(saved_shapes.items() ^ self._shapes.items()))
            raise CheckpointError(
                f"{OF_CHECKPOINT}: covariances of other parameters than this model's: "
                f"{first_few(differing, 8)}."
            )
        sizes = [c.shape[0] for c in state["covariances"]]
        if sizes != self._sizes:
            raise CheckpointError(
                f"{OF_CHECKPOINT}: {len(sizes)} blocks of up to {max(sizes)} weights, "
                f"optimizer.kf_blocksize makes {len(self._sizes)} of up to {max(self._sizes)}. "
                "Set kf_blocksize back."
            )
        self._memory.copy_(state["memory"])
        for covariance, saved in zip(self._covariances, state["covariances"]):
            covariance.copy_(whole(saved))


def block_sizes(counts: Sequence[int], block_size: int) -> list[int]:
    """Return the sizes of the blocks of parameters of ``counts`` weights, one after the other."""
    sizes: list[int] = []
    # whether the next parameter may join the last block; a cut parameter shares none of its blocks
    open_block = False
    for count in counts:
        if count > block_size:
            full, rest = divmod(count, block_size)
            sizes += [block_size] * full
            if rest:
                sizes.append(rest)
            open_block = False
        elif open_block and sizes[-1] + count <= block_size:
            sizes[-1] += count
        else:
            sizes.append(count)
            open_block = True
    return sizes


def _of_task(
    task: str, values: Iterable[T], owners: Iterable[Sequence[str]]
) -> Iterator[T]:
    """Yield the values, of parameters or of blocks, that have ``task`` among their owners."""
    return (value for value, tasks in zip(values, owners, strict=True) if task in tasks)
