"""One list of neighbors in the layouts of several parts of a model."""

from __future__ import annotations

import pytest
import torch
from toy_models import SECTIONS, TRICLINIC, batch_of, toy_atoms, toy_model

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.model.descriptor.views import view_of

LIST = NeighborLayout(4.0, (60,), 3, by_type=False, type_sel=(20, 20, 20))
BY_TYPE = NeighborLayout(4.0, (20, 20, 20), 3)
PARTS = {
    "by_type": (LIST, BY_TYPE), "by_type_few": (LIST, NeighborLayout(4.0, (1, 2, 1), 3)),
    "nearest": (LIST, NeighborLayout(4.0, (5,), 3, by_type=False)),
    "few_of_many": (BY_TYPE, NeighborLayout(4.0, (1, 2, 1), 3)),
}  # fmt: skip
FEW = ["by_type_few", "few_of_many"]  # a list of their own would hold the nearest four of all types


def frames():
    """Return an open frame, a periodic one without neighbors at equal distances, and a lonely atom."""
    first, second = toy_atoms(0, 11), toy_atoms(1, 4)
    alone = Frame(second[0][:1], second[1][:1], None)
    return [Frame(*first, None), Frame(*second, 3 * TRICLINIC), alone]


@pytest.mark.parametrize("part", sorted(PARTS.keys() - set(FEW)))
def test_a_view_is_the_list_that_the_part_alone_would_have(part):
    layout, wanted = PARTS[part]
    view = view_of(collate(frames(), layout), layout, wanted).batch
    alone = collate(frames(), wanted)
    assert view.slots == alone.slots
    for name in ("neighbor", "vector"):
        assert torch.equal(getattr(view, name), getattr(alone, name)), name
    none = view.neighbor.numel()
    assert [sorted({*row} - {none}) for row in view.reverse.tolist()] == [
        sorted({*row} - {none}) for row in alone.reverse.tolist()
    ]
    assert torch.equal(view.occupied, alone.occupied)


@pytest.mark.parametrize("part", FEW)
def test_a_part_with_fewer_slots_sees_the_nearest_of_each_type(part):
    layout, wanted = PARTS[part]
    view = view_of(collate(frames(), layout), layout, wanted).batch
    whole = collate(frames(), BY_TYPE)
    for values, all_values in ((view.neighbor, whole.neighbor), (view.vector, whole.vector)):
        for mine, section in zip(values.split(view.slots, 1), all_values.split(whole.slots, 1), strict=True):
            assert torch.equal(mine, section[:, : mine.shape[1]])


def test_an_excluded_neighbor_does_not_matter_beyond_the_cutoff_of_a_part():
    """It was taken for an empty slot there, which has a row of its own: energies were not those of DeePMD-kit."""
    near = SECTIONS["se_e2_a"] | {"rcut": 3.0, "exclude_types": [[0, 1]]}
    _, model = toy_model("hybrid", {"list": [near, SECTIONS["se_e2_r"]]})
    part = model.descriptor.parts[0]
    inside, beyond = (
        model.descriptor(batch_of(model, ([[0.0, 0, 0], [0, 1.5, 0], [x, 0, 0]], [0, 2, 1], None)))[0][
            0, : part.dim_out
        ]
        for x in (2.0, 3.5)
    )
    torch.testing.assert_close(inside, beyond, rtol=1e-14, atol=0)
