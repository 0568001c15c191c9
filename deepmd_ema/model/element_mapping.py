"""Weights of a model in a model of other elements: what belongs to an element is found by its name.

A tensor is of one of three kinds. One of its dims counts elements: the rows of a type embedding
(unless they are of electronic states), means and spreads, the bias. Or it is of a network that one
element, or a pair of them, has for itself. All others do not depend on elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from deepmd_ema.errors import UserError
from deepmd_ema.model.nn.type_embedding import TypeEmbedding
from deepmd_ema.text import first_few

if TYPE_CHECKING:
    from deepmd_ema.batch import NeighborLayout
    from deepmd_ema.model.energy import EnergyModel

# T elements of the new model, S slots, C columns of the environment matrix
Places: TypeAlias = list[int | None]
"""By number of an element in the new model: its number in the old one, or None."""

_STATISTICS = r"descriptor\.(.*\.)?(mean|stddev)"
_TYPE_EMBEDDING = "type_embedding.net.layers.0.weight"
# the dim of a tensor that counts elements
_AXES = (
    (r"out_(bias|std)", 1),
    (r"fitting\.(.*\.)?bias_atom_e", 0),
    (_STATISTICS, 0),
    (rf"descriptor\.(.*\.)?{re.escape(_TYPE_EMBEDDING)}", 0),
    (r"descriptor\.(.*\.)?adam_type_embedding", 0),
)
_OF_NETWORK = re.compile(
    r"(?P<nets>descriptor\.(?:.*\.)?embeddings|fitting\.(?:.*\.)?nets)\.(?P<number>\d+)\.(?P<tensor>.*)"
)
_OF_FITTING = ("fitting.", "out_bias", "out_std")


class ElementsError(UserError):
    """The weights do not fit; one line for each reason."""


def carried_over(
    old: EnergyModel, new: EnergyModel, with_fitting: bool = True
) -> dict[str, Tensor]:
    """Return the state dict of ``new`` with the weights of ``old`` where both have the element.

    Elements that ``old`` does not know keep what ``new`` has for them. Neither model changes.

    Args:
        old: of any elements.
        new: of the same shape, of other elements or of the same in another order.
        with_fitting: whether the fitting network and the bias are taken over as well.

    Raises:
        ElementsError: if the models have other tensors, or tensors of another shape.
    """
    places: Places = [
        old.type_map.index(name) if name in old.type_map else None
        for name in new.type_map
    ]
    # `have`: tensors of the old model, `targets`: tensors of the new one that they may go to
    left = () if with_fitting else _OF_FITTING
    have = {
        name: tensor
        for name, tensor in old.state_dict().items()
        if not name.startswith(left)
    }
    state = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    targets = {
        name: tensor for name, tensor in state.items() if not name.startswith(left)
    }
    problems: list[str] = []
    # both must be made of the same parts, whatever their elements: names are compared without the
    # numbers of networks
    old_names, new_names = (
        {_OF_NETWORK.sub(r"\g<nets>.*.\g<tensor>", name): name for name in tensors}
        for tensors in (have, targets)
    )
    for title, expected, existing in (
        ("missing there", new_names, old_names),
        ("not of this model", old_names, new_names),
    ):
        if lacking := [expected[part] for part in expected if part not in existing]:
            problems.append(f"{title}: {first_few(lacking)}")
    if problems:
        raise ElementsError(problems)
    orders = _orders_of_slots(old, new, places, have)
    electronic = {  # weights of type embeddings whose rows are electronic states, not elements
        part + _TYPE_EMBEDDING.removeprefix("type_embedding")
        for part, module in new.named_modules()
        if isinstance(module, TypeEmbedding) and module.electrons
    }
    # the unit of a loss is one for all elements, and so is a bias that does not distinguish them
    common = {"out_std"} if new.fitting.distinguishes_types else {"out_std", "out_bias"}
    for name, target in targets.items():
        source = _source(name, places, have, targets)
        if source is not None:
            values = have[source]
            is_statistics = re.fullmatch(_STATISTICS, name) is not None
            # means and spreads (T, S, C) have a row for each slot, which are in sections by element
            for prefix, order in orders.items():
                if is_statistics and name.startswith(prefix):
                    values = values[:, order]
            axes = (
                axis
                for pattern, axis in _AXES
                if re.fullmatch(pattern, name) and name not in electronic
            )
            problems += _copy(
                name, values, target, places, next(axes, None), name in common
            )
    if problems:
        raise ElementsError(problems)
    return state


def elements_problem(old: EnergyModel, elements: Iterable[str]) -> str:
    """Return why a descriptor with networks for each element is not taken over with others.

    The text is empty if it may be taken over.
    """
    elements = list(map(str, elements))
    if sorted(elements) != sorted(old.type_map) and _has_networks_of_elements(
        old.state_dict()
    ):
        return (
            f"elements {' '.join(old.type_map)} there, {' '.join(elements)} here: its descriptor "
            "has networks for each element and no type embedding, and is taken over with the same "
            "elements only, in any order. No option changes that. Train from the start, or "
            "fine-tune a model with a type embedding (se_atten_v2, dpa2, dpa3)."
        )
    return ""


def _has_networks_of_elements(names: Iterable[str]) -> bool:
    matches = map(_OF_NETWORK.fullmatch, names)
    return any(
        match["nets"].startswith("descriptor.")
        for match in matches
        if match is not None
    )


def _orders_of_slots(
    old: EnergyModel, new: EnergyModel, places: Places, have: dict[str, Tensor]
) -> dict[str, list[int]]:
    """Return the old slots in the order of the new sections, by prefix of the names of a part.

    Parts without sections are left out.

    Raises:
        ElementsError: if elements have networks and sections of slots of their own, and other ones.
    """
    if (has_networks := _has_networks_of_elements(have)) and (
        problem := elements_problem(old, new.type_map)
    ):
        raise ElementsError(problem)
    orders = {}
    problems = []
    parts: list[tuple[str, NeighborLayout, NeighborLayout]] = [
        ("descriptor.", old.layout, new.layout)
    ]
    # a hybrid has a layout for each of its parts, and their names have the number of the part
    parts_of_models = [getattr(model.descriptor, "parts", ()) for model in (old, new)]
    if all(parts_of_models):
        parts = [
            (
                f"descriptor.parts.{k}.",
                old_part.layout(frozenset()),
                new_part.layout(frozenset()),
            )
            for k, (old_part, new_part) in enumerate(zip(*parts_of_models, strict=True))
        ]
    for prefix, old_layout, new_layout in parts:
        if not old_layout.by_type:
            continue
        starts = list(accumulate(old_layout.sel, initial=0))
        shared = [place for place in places if place is not None]
        # features are divided by sel: the networks were trained with these numbers
        if has_networks and [old_layout.sel[place] for place in shared] != list(
            new_layout.sel
        ):
            part = re.sub(
                r"parts\.(\d+)", r"list[\1]", prefix.removeprefix("descriptor.")
            )
            sel = [old_layout.sel[place] for place in shared]
            problems.append(
                f"{part}sel must be {sel} for {' '.join(new.type_map)}, as there"
            )
        # the slots of new elements have no old ones
        if None not in places:
            orders[prefix] = [
                slot
                for place in shared
                for slot in range(starts[place], starts[place + 1])
            ]
    if problems:
        raise ElementsError(problems)
    return orders


def _copy(
    name: str,
    source: Tensor,
    target: Tensor,
    places: Places,
    axis: int | None,
    is_common: bool = False,
) -> list[str]:
    """Copy ``source`` into ``target``, by element along ``axis``, and return the problems.

    New elements have what ``target`` has for them. Where there is one number for all elements
    (``is_common``), they have the number of the others.
    """
    source_shape, target_shape = (list(tensor.shape) for tensor in (source, target))
    if axis is not None and len(source_shape) == len(target_shape):
        source_shape[axis] = target_shape[axis]
    if source_shape != target_shape:
        reason = (
            " (sel must be that of there: features are divided by it)"
            if re.fullmatch(_STATISTICS, name)
            else ""
        )
        return [
            f"{name} is {tuple(source.shape)} there, {tuple(target.shape)} here{reason}"
        ]
    if axis is None:
        target.copy_(source)
        return []
    # the weight of a type embedding (T, E) is taken with its skip connection, which adds the
    # one-hot vector of the element if E is T or 2 T: the sum is what belongs to an element
    skips = name.endswith(_TYPE_EMBEDDING)
    for new, old in enumerate(places):
        if old is None and is_common:
            old = next((place for place in places if place is not None), None)
        if old is not None:
            row = source.select(axis, old)
            if skips:
                row = row + _skipped(source)[old] - _skipped(target)[new]
            target.select(axis, new).copy_(row)
    return []


def _skipped(weight: Tensor) -> Tensor:
    """Return the part of the weight of a linear layer (T, E) from its skip connection.

    ``TypeEmbedding`` adds its input, one number per element, to the output where sizes allow it.
    """
    num_types, width = weight.shape
    eye = torch.eye(num_types, dtype=weight.dtype)
    return (
        eye.repeat(1, width // num_types)
        if width in (num_types, 2 * num_types)
        else torch.zeros_like(weight)
    )


def _source(
    name: str, places: Places, have: dict[str, Tensor], targets: dict[str, Tensor]
) -> str | None:
    """Return the name of the old tensor for ``name``, or None if ``name`` is of new elements."""
    match = _OF_NETWORK.fullmatch(name)
    if match is None:
        return name
    nets, number = match["nets"], int(match["number"])

    # the number of networks in this list: 1 for all elements, T, T (T + 1) / 2 or T^2
    def count(tensors: dict[str, Tensor]) -> int:
        matches = map(_OF_NETWORK.fullmatch, tensors)
        return len(
            {other["number"] for other in matches if other and other["nets"] == nets}
        )

    now = count(targets)
    before = count(have)
    if now == 1 and before == 1:
        return name
    if now == len(places):
        place = places[number]
        return None if place is None else f"{nets}.{place}.{match['tensor']}"
    # a net of two elements a <= b in any order (se_e3) has the index b (b + 1) / 2 + a
    if now == len(places) * (len(places) + 1) // 2:
        larger = (math.isqrt(8 * number + 1) - 1) // 2
        both = [
            places[place] for place in (number - larger * (larger + 1) // 2, larger)
        ]
        a, b = sorted(place for place in both if place is not None)
        return f"{nets}.{b * (b + 1) // 2 + a}.{match['tensor']}"
    # a net of a pair has the index centre + neighbor * T
    neighbor, centre = (places[place] for place in divmod(number, len(places)))
    if neighbor is None or centre is None:
        return None
    return f"{nets}.{centre + neighbor * math.isqrt(before)}.{match['tensor']}"
