"""Other forms of a model ``dpa4`` that DeePMD-kit reads: a sum of models for bridging, and ``standard``.

There the sum is the form in which such a model is kept, ``[learned model, inner_potential]`` of type ``linear_ener``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepmd_ema.config.fields import is_comment, options, type_names
from deepmd_ema.config.messages import Place, Problem, dotted, show
from deepmd_ema.config.schema.bridging import method_name
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import FITTINGS, NetworkConfig

if TYPE_CHECKING:
    from deepmd_ema.config.upgrade import Upgraded

INNER = "inner_potential"
# options of the part -> those of the model
_OF_INNER = {"mode": "bridging_method", "r_inner": "bridging_r_inner", "r_outer": "bridging_r_outer"}
_OF_SUM = ("type", "models", "weights")
_OF_TABLE = ("use_srtab", "smin_alpha", "sw_rmin", "sw_rmax")
_OF_WHOLE = ("type_map", "atom_exclude_types", "pair_exclude_types")


def spell_out_bridging(upgraded: Upgraded) -> None:
    """Turn sums with an ``inner_potential``, and ``standard`` models of the same parts, into models of type ``dpa4``.

    Args:
        upgraded: an input whose sections ``model`` are changed; takes where options were, and what is wrong.
    """
    for owner, key, place in list(_models(upgraded.values)):
        section = owner[key]
        kind = section.get("type", "standard")
        if kind == "linear_ener" and any(_is_inner(part) for part in _parts(section)):
            owner[key] = _Sum(upgraded, section, place).read()
            upgraded.notes.append(f"{dotted(place)} is a sum with {INNER}, which is the model dpa4 with bridging.")
        elif kind == "standard" and _is_of_dpa4(section):
            owner[key] = {name: value for name, value in section.items() if name not in _OF_TABLE} | {"type": "dpa4"}


def _models(values: Any) -> Iterator[tuple[dict[str, Any], Any, Place]]:
    """Yield the owner of each section ``model``, its key there, and its place."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        return
    tasks = model.get("model_dict")
    if isinstance(tasks, dict):
        yield from ((tasks, task, ("model", "model_dict", task)) for task in tasks if isinstance(tasks[task], dict))
    else:
        yield values, "model", ("model",)


@dataclass
class _Sum:
    """A section of type ``linear_ener`` with an ``inner_potential``, which is read as one of type ``dpa4``.

    Attributes:
        upgraded: takes where options were, and what is wrong.
        section: the sum.
        place: of the section.
        found: the section of type ``dpa4``.
    """

    upgraded: Upgraded
    section: dict[str, Any]
    place: Place
    found: dict[str, Any] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """Return the section of type ``dpa4``."""
        skipped = {"shared_dict"} if not self.section.get("shared_dict") else set()
        whole = {key: value for key, value in self.section.items() if key not in {*_OF_SUM, *skipped}}
        self.found = {"type": "dpa4", **whole, "bridging_method": "zbl"}
        parts = _parts(self.section)
        inner = [k for k, part in enumerate(parts) if _is_inner(part)]
        learned = [k for k, part in enumerate(parts) if isinstance(part.get("descriptor"), dict)]
        if self.section.get("weights") != "sum":
            self._refuse(("weights",), f' = {show(self.section.get("weights"))}: expected "sum" beside {INNER}.')
        if len(parts) != 2 or len(inner) != 1 or len(learned) != 1:
            self._refuse(("models",), f": expected a model with a descriptor and one {INNER}.")
            return self.found
        self._read_learned(learned[0], parts[learned[0]], whole)
        self._read_inner(inner[0], parts[inner[0]])
        return self.found

    def _read_learned(self, number: int, part: dict[str, Any], whole: dict[str, Any]) -> None:
        surroundings, defaults = part["descriptor"], {o.name: o.default for o in options(NetworkConfig)}
        if not _is_dpa4({"type": "dpa4", **surroundings}):
            text = f" = {show(surroundings.get('type'))}: {INNER} is for dpa4, as in DeePMD-kit. Use dpa4."
            self._refuse(("models", number, "descriptor", "type"), text)
        for key, value in part.items():
            default = defaults.get(key)
            if key == "type":
                continue
            if key not in whole or (whole[key] == default != value and key not in _OF_WHOLE):
                self._take(key, value, number, key)
            elif value not in (whole[key], None, default, []):
                text = f" = {show(value)}: {dotted((*self.place, key))} = {show(whole[key])}. Give one of the two."
                self._refuse(("models", number, key), text)

    def _read_inner(self, number: int, part: dict[str, Any]) -> None:
        for key, value in part.items():
            if key in _OF_INNER:
                self._take(_OF_INNER[key], value, number, key)
            elif key != "type" and not is_comment(key):
                self._refuse(("models", number, key), f": unknown key. Known: type, {', '.join(_OF_INNER)}.")

    def _take(self, key: str, value: Any, number: int, spelled: str) -> None:
        self.found[key] = value
        self.upgraded.moved.update({(*self.place, key): (*self.place, "models", number, spelled)})

    def _refuse(self, key: Place, text: str) -> None:
        self.upgraded.problems.append(Problem((*self.place, *key), text))


def _parts(section: dict[str, Any]) -> list[Any]:
    parts = section.get("models")
    return [part if isinstance(part, dict) else {} for part in parts] if isinstance(parts, list) else []


def _is_inner(part: dict[str, Any]) -> bool:
    return part.get("type") == INNER


def _is_of_dpa4(section: dict[str, Any]) -> bool:
    """Whether a ``standard`` model has the parts of the model ``dpa4``, or bridging with its descriptor."""
    method, fitting = section.get("bridging_method"), section.get("fitting_net")
    is_bridged = isinstance(method, str) and method_name(method) is not None
    kind = fitting.get("type") if isinstance(fitting, dict) else None
    has_its_fitting = kind in type_names([FITTINGS["dpa4_ener"].section])
    return _is_dpa4(section.get("descriptor")) and (has_its_fitting or is_bridged) and not section.get("use_srtab")


def _is_dpa4(section: Any) -> bool:
    return isinstance(section, dict) and section.get("type") in type_names([DESCRIPTORS["dpa4"].section])
