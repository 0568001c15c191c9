"""Sections of models with another value of each of their options, from the declarations."""

import copy
import typing

from toy_models import SECTIONS, TYPES, model_section

from deepmd_ema.config.fields import options

# of every type one section, and each fitting network beside a small descriptor; each with what is
# off by default
WITH_FPARAM = {"numb_fparam": 1, "default_fparam": [3.0]}
MODELS_OF_TYPES = {
    **{name: model_section(name) for name in SECTIONS},
    **{
        f"fitting {name}": model_section(
            fitting_changes={"type": name, **about, **WITH_FPARAM}
        )
        for name, about in {
            "ener": {},
            "dpa4_ener": {},
            "dipole": {},
            "polar": {},
            "property": {"property_name": "gap"},
            "dos": {},
        }.items()
    },
    "linear_ener": {
        "type": "linear_ener",
        "type_map": TYPES,
        "weights": "sum",
        "models": [
            {"descriptor": SECTIONS["se_e3_tebd"], "fitting_net": {"neuron": [4]}},
            {
                "descriptor": SECTIONS["se_e3_tebd"] | {"rcut": 3.5},
                "fitting_net": {"neuron": [4]},
            },
        ],
    },
}
POOL = [
    True,
    False,
    0,
    1,
    2,
    3,
    5,
    0.3,
    0.5,
    1.5,
    [],
    [0],
    [1],
    [8],
    [[0, 1]],
    [1.5],
    [-1.0, None, None],
    {"energy": [-1.0, None, None]},
    [1.0, 2.0, 3.0],
    "gap",
    "gauss",
    "zbl",
    "mean",
]


def changed_sections(section, kind, place=()):
    """Yield the place of each option of a section of a class, with other values of it, of which
    some are right.
    """
    for option in options(kind):
        here, value = (*place, option.name), section[option.name]
        if option.sections:
            for part, inner in enumerate(value) if option.many else [(None, value)]:
                if isinstance(inner, dict):
                    name = inner.get("type", option.default_type)
                    inside = next(
                        (
                            one
                            for one in option.sections
                            if getattr(one, "type", None) == name
                        ),
                        option.sections[0],
                    )
                    yield from changed_sections(
                        inner, inside, here if part is None else (*here, part)
                    )
            continue
        near = [*option.choices, *POOL]
        if (
            isinstance(value, list)
            and value
            and not isinstance(value[0], list | dict | str | None)
        ):
            near = [[value[0] + 1, *value[1:]], [2 * v for v in value], *near]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            near = [value + 0.001, 0.9 * value, value + 1, 2 * value, *near]
        others = [
            candidate
            for candidate in near
            if candidate != value or type(candidate) is not type(value)
        ]
        yield here, [candidate for candidate in others if may_take(option, candidate)]


def may_take(option, value):
    """Return whether an option may take a value: to read a whole section takes 100 times as
    long.
    """
    kinds = {typing.get_origin(kind) or kind for kind in option.types}
    if float in kinds:
        kinds.add(int)
    # checks of lists expect the right type of what is in them
    return type(value) in kinds and (
        isinstance(value, list | dict) or not option.explain(value)
    )


def replaced(section, place, value):
    """Return a copy of nested sections with another value at a place."""
    section = copy.deepcopy(section)
    part = section
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    return section
