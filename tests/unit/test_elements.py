"""Weights taken over to a model of other elements: the same atoms have the same energies, for every
descriptor.
"""

import pytest
import torch
from toy_models import (
    SECTIONS,
    TRICLINIC,
    TYPES,
    disturb,
    evaluate,
    model_section,
    toy_atoms,
    toy_model,
)

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.model.build import build_model
from deepmd_ema.model.element_mapping import ElementsError, carried_over

SAME_MATH = 1e-10
every_descriptor = pytest.mark.parametrize("descriptor", sorted(SECTIONS))


def with_sel_for(section, num_types):
    """Return a section of a descriptor with as many numbers in its lists ``sel`` as there are
    elements.
    """
    if "list" in section:
        return {
            **section,
            "list": [with_sel_for(part, num_types) for part in section["list"]],
        }
    return (
        {**section, "sel": [20] * num_types}
        if isinstance(section.get("sel"), list)
        else section
    )


def model_of(descriptor, type_map, descriptor_changes=None, **changes):
    """Return a model of some elements, of other weights than a toy model."""
    own = with_sel_for(SECTIONS[descriptor], len(type_map)) | (descriptor_changes or {})
    section = model_section(descriptor, **changes) | {
        "type_map": type_map,
        "descriptor": own,
    }
    model = build_model(model_config_from_dict(section), seed=77).eval()
    disturb(model, seed=9)
    return model


def assert_same_numbers(old, new, elements=TYPES, **parameters):
    coord, types = toy_atoms(num_types=len(elements))
    here = [new.type_map.index(elements[t]) for t in types]
    there = [old.type_map.index(elements[t]) for t in types]
    one = evaluate(old, (coord, there, TRICLINIC), **parameters)
    two = evaluate(new, (coord, here, TRICLINIC), **parameters)
    for name, value in one.items():
        assert abs(value - two[name]).max() <= SAME_MATH * max(1, abs(value).max()), (
            name
        )


@every_descriptor
@pytest.mark.parametrize("type_map", [["O", "H", "Na"], ["Na", "O", "H"]])
def test_the_order_of_the_elements_does_not_matter(descriptor, type_map):
    old = toy_model(descriptor)[1]
    new = model_of(descriptor, type_map)
    new.load_state_dict(carried_over(old, new))
    assert_same_numbers(old, new)


@pytest.mark.parametrize(
    "descriptor",
    [name for name in sorted(SECTIONS) if isinstance(SECTIONS[name].get("sel"), list)],
)
def test_networks_of_pairs_of_many_elements_stay_with_their_elements(descriptor):
    elements = ["O", "H", "Na", "C", "S"]
    old, new = model_of(descriptor, elements), model_of(descriptor, elements[::-1])
    new.load_state_dict(carried_over(old, new))
    assert_same_numbers(old, new, elements)


@every_descriptor
@pytest.mark.parametrize("type_map", [["H", "O"], ["C", "Na", "H", "S", "O"]])
def test_fewer_and_more_elements_leave_the_energies_of_the_others(descriptor, type_map):
    old = toy_model(descriptor)[1]
    new = model_of(descriptor, type_map)
    if any(
        "embeddings.1." in name for name in old.state_dict()
    ):  # a network for each element
        with pytest.raises(
            ElementsError,
            match=f"elements O H Na there, {' '.join(type_map)} here: .*same elements",
        ):
            carried_over(old, new)
        return
    before = {name: value.clone() for name, value in new.state_dict().items()}
    new.load_state_dict(carried_over(old, new))
    assert_same_numbers(old, new, ["O", "H"])
    if "C" in type_map:
        assert torch.equal(new.out_bias[0, 0], before["out_bias"][0, 0])


def test_parts_of_a_hybrid_by_type_keep_the_neighbors_of_each_element():
    """``sel`` differs between the elements and between the parts, and is too small for some of
    them.
    """

    def parts(*first, second):
        cut = {"sel": second, "rcut": 3.5}
        return {
            "list": [
                SECTIONS["se_e2_a"] | {"sel": list(first)},
                SECTIONS["se_e2_r"] | cut,
            ]
        }

    old = toy_model("hybrid", parts(4, 20, 9, second=[12, 3, 25]))[1]
    new = model_of("hybrid", ["Na", "O", "H"], parts(9, 4, 20, second=[25, 12, 3]))
    new.load_state_dict(carried_over(old, new))
    assert_same_numbers(old, new)
    cut = evaluate(old, (*toy_atoms(), TRICLINIC))["energy"]
    roomy = toy_model("hybrid", parts(40, 40, 40, second=[40, 40, 40]))[1]
    assert abs(cut - evaluate(roomy, (*toy_atoms(), TRICLINIC))["energy"]).max() > 1e-3
    with pytest.raises(
        ElementsError, match=r"list\[1\]\.sel must be \[25, 12, 3\] for Na O H"
    ):
        carried_over(
            old,
            model_of("hybrid", ["Na", "O", "H"], parts(9, 4, 20, second=[12, 3, 25])),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"descriptor_changes": {"neuron": [4, 8, 12]}},
            r"layers.2.weight is \(8, 16\) there, \(8, 12\) here",
        ),
        (
            {"descriptor_changes": {"attn_layer": 1}},
            r"not of this model: descriptor.block.layers.1",
        ),
        (
            {"fitting_changes": {"neuron": [9, 9]}},
            r"fitting.nets.0.layers.1.weight is \(12, 12\) there",
        ),
    ],
)
def test_a_model_of_another_shape_is_a_message(changes, message):
    old, new = toy_model("se_atten")[1], model_of("se_atten", ["H", "O"], **changes)
    with pytest.raises(ElementsError, match=message):
        carried_over(old, new)
