"""Weights of a model in a model of other elements: what belongs to an element is found by its name.

A tensor is of one of three kinds. One of its dims counts elements: the rows of a type embedding (unless they are of
electronic states), means and spreads, the bias. Or it is of a network that one element, or a pair of them, has for
itself. All others do not depend on elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from deepmd_ema.errors import first_few
from deepmd_ema.model.interface import Composite
from deepmd_ema.model.nn.type_embedding import TypeEmbedding

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


class ElementsError(ValueError):
    """The weights do not fit; one line for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def carried_over(old: EnergyModel, new: EnergyModel, with_fitting: bool = True) -> dict[str, Tensor]:
    """Return the state dict of ``new`` with the weights of ``old`` where both have the element.

    Elements that ``old`` does not know keep what ``new`` has for them. Neither model changes.

    Args:
        old: of any elements.
        new: of the same shape, of other elements or of the same in another order.
        with_fitting: whether the fitting network and the bias are taken over as well.

    Raises:
        ElementsError: if the models have other tensors, or tensors of another shape.
    """
    places: Places = [old.type_map.index(name) if name in old.type_map else None for name in new.type_map]
    left = () if with_fitting else _OF_FITTING
    have = {name: tensor for name, tensor in old.state_dict().items() if not name.startswith(left)}
    state = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    targets = {name: tensor for name, tensor in state.items() if not name.startswith(left)}
    _check_names(have, targets)
    problems = _of_sections(old, new, places, have)
    slots = {} if None in places else _slots(old, places)
    of_states = {  # weights of type embeddings whose rows are electronic states, not elements
        part + _TYPE_EMBEDDING.removeprefix("type_embedding")
        for part, module in new.named_modules()
        if isinstance(module, TypeEmbedding) and module.electrons
    }
    for name, target in targets.items() if not problems else ():
        source = _source(name, places, have, targets)
        if source is not None:
            of_slots = re.fullmatch(_STATISTICS, name) is not None
            order = next((found for prefix, found in slots.items() if of_slots and name.startswith(prefix)), None)
            values = have[source] if order is None else have[source][:, order]
            axes = (axis for pattern, axis in _AXES if re.fullmatch(pattern, name) and name not in of_states)
            problems += _copy(name, values, target, places, next(axes, None))
    if problems:
        raise ElementsError(problems)
    return state


def check_elements(old: EnergyModel, elements: Iterable[str]) -> None:
    """Check that a descriptor with networks for each element is taken over with the same elements, in any order.

    Raises:
        ElementsError: if it is not.
    """
    elements = list(map(str, elements))
    if sorted(elements) != sorted(old.type_map) and _has_networks_of_elements(old.state_dict()):
        reason = (
            f"elements {' '.join(old.type_map)} there, {' '.join(elements)} here: its descriptor has networks for each "
            "element and no type embedding, and is taken over with the same elements only, in any order. No option "
            "changes that. Train from the start, or fine-tune a model with a type embedding (se_atten_v2, dpa2, dpa3)."
        )
        raise ElementsError([reason])


def _has_networks_of_elements(names: Iterable[str]) -> bool:
    found = map(_OF_NETWORK.fullmatch, names)
    return any(match["nets"].startswith("descriptor.") for match in found if match is not None)


def _of_sections(old: EnergyModel, new: EnergyModel, places: Places, have: dict[str, Tensor]) -> list[str]:
    """Return the mistake where each element has a network and a section of slots of its own."""
    if not _has_networks_of_elements(have):
        return []
    check_elements(old, new.type_map)
    problems = []
    for (prefix, there), here in zip(_layouts(old).items(), _layouts(new).values(), strict=True):
        sel = [there.sel[place] for place in places if place is not None] if there.by_type else []
        if sel and sel != list(here.sel):
            part = re.sub(r"parts\.(\d+)", r"list[\1]", prefix.removeprefix("descriptor."))
            problems.append(f"{part}sel must be {sel} for {' '.join(new.type_map)}, as there")
    return problems


def _layouts(model: EnergyModel) -> dict[str, NeighborLayout]:
    """Return the layout of neighbors of each part of the descriptor, by the prefix of the names of its tensors."""
    whole = model.descriptor
    if isinstance(whole, Composite):
        return {f"descriptor.parts.{k}.": part.layout(frozenset()) for k, part in enumerate(whole.descriptors)}
    return {"descriptor.": model.layout}


def _slots(old: EnergyModel, places: Places) -> dict[str, list[int]]:
    """Return for each part with a section of slots per element the old slots in the order of the new sections."""
    slots = {}
    for prefix, layout in _layouts(old).items():
        if layout.by_type:
            starts = list(accumulate(layout.sel, initial=0))
            order = [range(starts[place], starts[place + 1]) for place in places if place is not None]
            slots[prefix] = [slot for section in order for slot in section]
    return slots


def _copy(name: str, source: Tensor, target: Tensor, places: Places, axis: int | None) -> list[str]:
    """Copy ``source`` into ``target``, by element where the dim ``axis`` counts them; return what is wrong."""
    one, two = (list(tensor.shape) for tensor in (source, target))
    if axis is not None and len(one) == len(two):
        one[axis] = two[axis]
    if one != two:
        reason = " (sel must be that of there: features are divided by it)" if re.fullmatch(_STATISTICS, name) else ""
        return [f"{name} is {tuple(source.shape)} there, {tuple(target.shape)} here{reason}"]
    if axis is None:
        target.copy_(source)
        return []
    if name.endswith(_TYPE_EMBEDDING):
        source, skipped = source + _skipped(source), _skipped(target)
    for new, old in enumerate(places):
        if old is not None:
            target.select(axis, new).copy_(source.select(axis, old))
            if name.endswith(_TYPE_EMBEDDING):
                target[new] -= skipped[new]
    return []


def _skipped(weight: Tensor) -> Tensor:
    """Return the part of the weight of a linear layer (T, E) from its skip connection, if E is T or 2 T."""
    num_types, width = weight.shape
    eye = torch.eye(num_types, dtype=weight.dtype)
    return (
        torch.cat([eye] * (width // num_types), 1) if width in (num_types, 2 * num_types) else torch.zeros_like(weight)
    )


def _source(name: str, places: Places, have: dict[str, Tensor], targets: dict[str, Tensor]) -> str | None:
    """Return the name of the old tensor that ``name`` takes its values from, or None if it is of new elements."""
    match = _OF_NETWORK.fullmatch(name)
    if match is None:
        return name
    nets = match["nets"]
    number, now, before = int(match["number"]), _count(nets, targets), _count(nets, have)
    if now == 1 and before == 1:
        return name
    if now == len(places):
        place = places[number]
        return None if place is None else f"{nets}.{place}.{match['tensor']}"
    if now == len(places) * (len(places) + 1) // 2:  # of two elements a <= b in any order, at b (b + 1) / 2 + a
        larger = (math.isqrt(8 * number + 1) - 1) // 2
        both = [places[place] for place in (number - larger * (larger + 1) // 2, larger)]
        a, b = sorted(place for place in both if place is not None)
        return f"{nets}.{b * (b + 1) // 2 + a}.{match['tensor']}"
    # a net of a pair has the index centre + neighbor * T
    neighbor, centre = (places[place] for place in divmod(number, len(places)))
    if neighbor is None or centre is None:
        return None
    return f"{nets}.{centre + neighbor * math.isqrt(before)}.{match['tensor']}"


def _count(nets: str, tensors: dict[str, Tensor]) -> int:
    found = (_OF_NETWORK.fullmatch(name) for name in tensors)
    return 1 + max(int(match["number"]) for match in found if match is not None and match["nets"] == nets)


def _check_names(have: dict[str, Tensor], targets: dict[str, Tensor]) -> None:
    """Check that both models are made of the same parts, whatever their elements.

    Raises:
        ElementsError: naming those that one of them does not have.
    """
    old, new = ({_OF_NETWORK.sub(r"\g<nets>.*.\g<tensor>", name): name for name in names} for names in (have, targets))
    differences = {
        "missing there": [new[part] for part in new if part not in old],
        "not of this model": [old[part] for part in old if part not in new],
    }
    problems = [f"{title}: {first_few(names)}" for title, names in differences.items() if names]
    if problems:
        raise ElementsError(problems)
