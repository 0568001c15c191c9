"""Matrices of several shapes in a few stacks, whose products are then a few operations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmd_ema.distributed.tensors import on_device
from deepmd_ema.optim.guarded import joined

Shape = tuple[int, int, int]
"""Number, rows and columns of the matrices of a parameter."""

# Multiplications in one product that filling up with zeros may cost. The 15 products of a
# direction then take 0.05 ms at the 10 TFLOP/s of small products. Another stack would cost 20 to
# 40 launches, which take longer.
MAX_FILL_WORK = 2**24

# B matrices of R rows and C columns in a stack, N entries of M matrices in all


@dataclass
class Stack:
    """Matrices that are multiplied together.

    Attributes:
        kind: of all of them.
        rows: R.
        columns: C.
        members: parameters whose matrices they are, in this order.
        count: B.
    """

    kind: Hashable
    rows: int
    columns: int
    members: list[int]
    count: int

    @property
    def work(self) -> int:
        """Multiplications of ``X X^T``."""
        return self.count * self.rows**2 * self.columns


class Stacks:
    """The matrices of parameters in stacks (B, R, C), and the way from vectors to them and back.

    Args:
        shapes: of each parameter.
        kind: of a matrix by its rows and columns; those of two kinds share no stack.
        device: of the matrices.
        fill: whether matrices of several shapes share a stack, where a small product costs its
            launch: filled up with zeros, which change no product, and with the longer side as
                columns. Else each shape has a stack of its own.

    Attributes:
        stacks: their sizes and members.
        matrices: which of all matrices the ones of each stack are, (B,).
        order: where each matrix is in the stacks, one after the other, (M,).
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        kind: Callable[[int, int], Hashable],
        device: torch.device,
        fill: bool,
    ) -> None:
        self._shapes = shapes
        self._sizes = [count * rows * columns for count, rows, columns in shapes]
        self.stacks = stacked(shapes, kind, fill)
        # the number of the first matrix of each parameter, when all matrices are counted through
        starts = [sum(count for count, _, _ in shapes[:i]) for i in range(len(shapes))]
        numbers = [
            [starts[i] + k for i in stack.members for k in range(shapes[i][0])]
            for stack in self.stacks
        ]
        matrices = [torch.tensor(chosen) for chosen in numbers]
        self.matrices = [on_device(chosen, device) for chosen in matrices]
        # the inverse of the permutation that the stacks make of the matrices
        self.order = on_device(torch.cat(matrices).argsort(), device)
        self._positions: Tensor | None = None
        # On a GPU all stacks lie one after the other in one vector with zeros between. The position
        # of each entry of the parameters in it is computed once; in a step one index_copy_ fills
        # all stacks, and one index_select reads them. On a CPU stacks are views or one cat each.
        if fill:
            positions: dict[
                int, Tensor
            ] = {}  # by parameter, as its entries follow each other
            start = 0
            for stack in self.stacks:
                all_places = start + torch.arange(
                    stack.count * stack.rows * stack.columns
                )
                places = all_places.view(-1, stack.rows, stack.columns).split(
                    [shapes[i][0] for i in stack.members]
                )
                for i, part in zip(stack.members, places):
                    rows, columns = shapes[i][1:]
                    # the upper left corner, of a tall matrix its transpose: stacks are wide
                    part = (
                        part[:, :rows, :columns]
                        if rows <= columns
                        else part[:, :columns, :rows].mT
                    )
                    positions[i] = part.reshape(-1)
                start += all_places.numel()
            in_order = torch.cat([positions[i] for i in range(len(positions))])
            self._positions = on_device(in_order, device)

    def stack(self, vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the stacks (B, R, C) of each vector (N,), in which matrices follow each other."""
        if self._positions is None:
            shaped = (
                [t.view(s) for t, s in zip(vector.split(self._sizes), self._shapes)]
                for vector in vectors
            )
            return [
                [joined([parts[i] for i in stack.members]) for stack in self.stacks]
                for parts in shaped
            ]
        sizes = [stack.count * stack.rows * stack.columns for stack in self.stacks]
        # all vectors (gradient, momentum, ...) at once: a row each, (vectors, entries of stacks)
        filled = vectors[0].new_zeros(len(vectors), sum(sizes))
        filled.index_copy_(1, self._positions, torch.stack(tuple(vectors)))
        shapes = [(stack.count, stack.rows, stack.columns) for stack in self.stacks]
        return [
            [t.view(shape) for t, shape in zip(row.split(sizes), shapes)]
            for row in filled
        ]

    def flatten(self, stacks: Sequence[Tensor]) -> Tensor:
        """Return the entries of stacks as a vector (N,), as :meth:`stack` takes it."""
        if self._positions is not None:
            return torch.cat([t.reshape(-1) for t in stacks]).index_select(
                0, self._positions
            )
        parts: dict[int, Tensor] = {}
        for t, stack in zip(stacks, self.stacks):
            parts |= zip(
                stack.members,
                t.reshape(-1).split([self._sizes[i] for i in stack.members]),
            )
        return joined([parts[i] for i in range(len(parts))])


def stacked(
    shapes: Sequence[Shape], kind: Callable[[int, int], Hashable], fill: bool
) -> list[Stack]:
    """Return a stack for each number of rows and columns.

    Where small matrices are filled up, fewer stacks, whose rows are the shorter side.
    """
    by_shape: dict[tuple[int, int], Stack] = {}
    for i, (count, rows, columns) in enumerate(shapes):
        stack = by_shape.setdefault(
            (rows, columns), Stack(kind(rows, columns), rows, columns, [], 0)
        )
        stack.members.append(i)
        stack.count += count
    if not fill:
        return list(by_shape.values())
    merged: list[Stack] = []
    for stack in by_shape.values():
        stack.rows, stack.columns = sorted((stack.rows, stack.columns))
    # from the largest matrix down: a smaller one joins the first stack in which the zeros that fill
    # it up cost less than a stack of its own
    for stack in sorted(
        by_shape.values(), key=lambda s: s.rows**2 * s.columns, reverse=True
    ):
        for other in merged:
            if other.kind == stack.kind:
                rows = max(other.rows, stack.rows)
                columns = max(other.columns, stack.columns)
                both = Stack(
                    stack.kind,
                    rows,
                    columns,
                    other.members + stack.members,
                    other.count + stack.count,
                )
                if both.work - other.work - stack.work <= MAX_FILL_WORK:
                    merged[merged.index(other)] = both
                    break
        else:
            merged.append(stack)
    return merged
