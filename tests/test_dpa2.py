"""dpa2: its options, each with the laws; parts of different cutoffs; numbers of neighbors; statistics by part."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny_input
from toy_models import (
    REPFORMER,
    REPINIT,
    TRICLINIC,
    batch_of,
    model_section,
    toy_atoms,
    toy_model,
)

from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.remarks import ignored_options
from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import ConfigError


def frame(natoms=7):
    coord, types = toy_atoms(0, natoms)
    return coord, types, TRICLINIC


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("repinit", {"rcut_smth": 5.0}, r"repinit\.rcut_smth = 5: expected less than rcut = 4"),
        ("repinit", {"axis_neuron": 20}, r"repinit\.axis_neuron = 20: expected at most 16"),
        ("repinit", {"three_body_rcut": 4.5}, r"repinit\.three_body_rcut = 4\.5: expected at most rcut = 4"),
        ("repinit", {"three_body_rcut_smth": 3.5}, r"repinit\.three_body_rcut_smth = 3\.5: expected less than three_"),
        ("repinit", {"three_body_sel": 50}, r"repinit\.three_body_sel = 50: expected at most repformer\.nsel = 40"),
        ("repinit", {"nsel": "some"}, r'repinit\.nsel = "some": expected a whole number > 0'),
        ("repformer", {"rcut": 4.0}, r"repformer\.rcut = 4: expected less than repinit\.rcut = 4"),
        ("repformer", {"nsel": 60}, r"repformer\.nsel = 60: expected less than repinit\.nsel = 60"),
        ("repformer", {"nsel": 70}, r"repformer\.nsel = 70: expected at most repinit\.nsel = 60"),
        ("repformer", {"axis_neuron": 7}, r"repformer\.axis_neuron = 7: expected at most g2_dim = 6"),
        (
            "repformer",
            {"update_g1_has_grrg": False, "update_g1_has_drrd": False},
            r"repformer\.g1_out_mlp = true: the layer of all terms would have no input",
        ),
        ("repformer", {"update_style": "res"}, r'repformer\.update_style = "res"'),
        (None, {"exclude_types": [[0, 3]]}, "exclude_types: type 3 does not exist"),
    ],
)
def test_what_does_not_fit_together_is_named(part, changes, message):
    section = model_section("dpa2")
    target = section["descriptor"] if part is None else dict(section["descriptor"][part])
    target.update(changes)
    section["descriptor"] = {**section["descriptor"], **({part: target} if part else {})}
    with pytest.raises(ConfigError) as error:
        model_config_from_dict(section)
    assert any(re.search(message, problem) for problem in error.value.problems), error.value.problems


def test_numbers_of_neighbors_are_counted_at_the_cutoff_of_each_part():
    found = SimpleNamespace(max_total=50, max_within={3.2: 22, 3.0: 19}.get)
    auto = {"nsel": "auto", "three_body_sel": "auto"}
    section = model_config_from_dict(model_section("dpa2", auto)).descriptor
    assert section.neighbors is None
    counted = section.with_neighbors(found)
    assert (counted.repinit.nsel, counted.repformer.nsel, counted.repinit.three_body_sel) == (56, 24, 20)
    assert counted.neighbors == (56,)
    assert section.with_neighbors_of(counted) == counted
    assert list(counted.inner_neighbors()) == [("repinit.three_body_sel", 3.0, 20), ("repformer.nsel", 3.2, 24)]
    few = section.with_neighbors(SimpleNamespace(max_total=0, max_within=lambda rcut: 0))
    assert list(few.problems(["O", "H", "Na"])) == []  # as in small molecules: still one more where it looks farther
    assert (few.repinit.nsel, few.repformer.nsel) == (8, 4)


def test_statistics_of_each_part_stand_in_its_own_folder():
    config, model = toy_model("dpa2", {"set_davg_zero": False})
    batch = batch_of(model, frame())
    sums = model.descriptor.measure(batch)
    assert set(sums) == set(model.descriptor.sum_names)
    folders = {name.partition("/")[0] for name in sums}
    assert len(folders) == 3
    assert all(len(folder) == 40 for folder in folders)  # SHA-1, as DeePMD-kit names them
    model.descriptor.apply_statistics(sums)
    for name, sel in (("repinit", 60), ("repformer", 40), ("angles", 30)):
        mean = getattr(model.descriptor, name).mean
        assert mean.shape == (3, sel, 4)
        assert (mean[..., 0] > 0).all()
        assert (mean[..., 1:] == 0).all()
    repeated = model.descriptor.measure(collate([pair_frame(Frame(*frame()), model.layout, round_to=60)], model.layout))
    assert all(np.allclose(repeated[name], values) for name, values in sums.items())
    assert config.descriptor.repformer.nsel == 40


def test_options_without_effect_are_listed():
    changes = {"repinit": {**REPINIT, "use_three_body": False}, "repformer": {**REPFORMER, "update_style": "res_avg"}}
    config = config_from_dict(tiny_input(["data"], model__descriptor={"type": "dpa2", **changes}))
    lines = [line for line in ignored_options(config) if "model.descriptor." in line]
    assert "model.descriptor.repinit.three_body_rcut = 3.0: no effect, use_three_body is false" in lines
    assert "model.descriptor.repformer.update_residual = 0.05: no effect, update_style is res_avg" in lines
