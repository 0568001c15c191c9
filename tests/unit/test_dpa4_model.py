"""The model of type dpa4, and its options that other models do not have."""

import pytest
import torch
from config_inputs import spoiled
from toy_models import TABLE

from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.build import build_model
from deepmd_ema.training.modes import contexts_of_products

SMALL = {"channels": 8, "n_blocks": 1, "lmax": 1, "mixing_layers": 1, "rcut": 4.0}


def section(**changes):
    return {
        "type": "dpa4",
        "type_map": ["O", "H"],
        "descriptor": SMALL,
        "fitting_net": {},
        **changes,
    }


@pytest.mark.parametrize("name", ["dpa4", "DPA4", "SeZM", "sezm"])
def test_its_parts_need_no_type(name):
    config = model_config_from_dict(section(type=name))
    assert (config.type, config.descriptor.type, config.fitting_net.type) == (
        "dpa4",
        "dpa4",
        "dpa4_ener",
    )
    assert model_config_from_dict(to_dict(config)) == config


def test_its_switches_hold_for_the_run():
    model = section(use_compile=True, enable_tf32=True, bridging_method="ZBL")
    config = config_from_dict(spoiled({"model": model}))
    assert (config.training.enable_compile, config.training.enable_tf32) == (True, True)
    assert (config.model.bridging.inner, config.model.bridging.outer) == (0.5, 0.8)


def as_sum(inner=None, learned=None, **changes):
    """Return the section as DeePMD-kit keeps it: a sum of a model and an analytic part."""
    parts = [
        {"type": "dpa4", "descriptor": SMALL, "fitting_net": {}, **(learned or {})},
        {
            "type": "inner_potential",
            "mode": "zbl",
            "r_inner": 0.4,
            "r_outer": 0.9,
            **(inner or {}),
        },
    ]
    return {
        "type": "linear_ener",
        "weights": "sum",
        "type_map": ["O", "H"],
        "models": parts,
        **changes,
    }


def test_a_sum_with_an_inner_potential_is_the_model_with_bridging():
    bridging = {
        "bridging_method": "zbl",
        "bridging_r_inner": 0.4,
        "bridging_r_outer": 0.9,
    }
    expected = model_config_from_dict(section(**bridging))
    assert model_config_from_dict(as_sum()) == expected
    assert (
        model_config_from_dict(
            as_sum(data_stat_nbatch=10, learned={"type_map": ["O", "H"]})
        )
        == expected
    )
    assert (
        model_config_from_dict(
            section(
                type="standard",
                descriptor={"type": "dpa4", **SMALL},
                fitting_net={"type": "dpa4_ener"},
                **bridging,
            )
        )
        == expected
    )
    excluded = model_config_from_dict(
        as_sum(pair_exclude_types=[[0, 1]], learned={"pair_exclude_types": []})
    )
    assert excluded.pair_exclude_types == [[0, 1]]
    assert (
        model_config_from_dict(
            as_sum(data_stat_nbatch=7, learned={"data_stat_nbatch": 10})
        ).data_stat_nbatch
        == 7
    )


def test_a_run_reads_such_a_sum_with_its_switches_and_says_so():
    config = config_from_dict(spoiled({"model": as_sum(learned={"use_compile": True})}))
    assert config.training.enable_compile
    assert config.notes[:2] == (
        "model is a sum with inner_potential, which is the model dpa4 with bridging.",
        "model.models[0].use_compile was moved to training.enable_compile: it holds for the whole "
        "run.",
    )


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"weights": "mean"},
            'model.weights = "mean": expected "sum" beside inner_potential.',
        ),
        (
            {"models": as_sum()["models"][1:]},
            "model.models: expected a model with a descriptor and one inner_potential.",
        ),
        (
            {"inner": {"mode": "lj"}},
            'model.models[1].mode = "lj": expected "zbl", or "none".',
        ),
        (
            {"inner": {"r_outer": 0.3}},
            "model.models[1].r_outer = 0.3: expected more than",
        ),
        (
            {"learned": {"descriptor": {"type": "se_atten", "sel": 20}}},
            'model.models[0].descriptor.type = "se_atten": inner_potential is for dpa4',
        ),
        (
            {"learned": {"data_stat_nbatch": 5}, "data_stat_nbatch": 7},
            "model.models[0].data_stat_nbatch = 5: model.data_stat_nbatch = 7. Give one of the "
            "two.",
        ),
    ],
)
def test_a_mistake_in_such_a_sum_has_its_place(changes, phrase):
    with pytest.raises(ConfigError) as refused:
        config_from_dict(spoiled({"model": as_sum(**changes)}))
    assert phrase in str(refused.value)


def test_bfloat16_is_for_gpus_and_a_run_on_a_cpu_says_so(caplog):
    caplog.set_level("INFO")
    line = "no effect on a CPU, which multiplies in the precision of the parameters"
    for model, more, said in (
        (
            section(descriptor={**SMALL, "use_amp": True}),
            {},
            f"model.descriptor.use_amp = true: {line}",
        ),
        (
            section(),
            {"validating.amp_infer": True},
            f"validating.amp_infer = true: {line}",
        ),
        (section(), {}, None),  # the default is no request
    ):
        config = config_from_dict(spoiled({"model": model, **more}))
        built = build_model(config.model)
        for device in ("cpu", "cuda"):
            caplog.clear()
            validating = contexts_of_products(config, built, torch.device(device))[1]
            assert [record.getMessage() for record in caplog.records] == [said] * (
                device == "cpu" and said is not None
            )
            with validating():
                assert built.descriptor.infers_in_bfloat16 == (
                    device == "cuda" and bool(more)
                )
            assert not built.descriptor.infers_in_bfloat16


def test_a_standard_model_of_its_parts_is_the_model():
    parts = {
        "descriptor": {"type": "dpa4", **SMALL},
        "fitting_net": {"type": "dpa4_ener"},
    }
    saved = {"use_srtab": None, "smin_alpha": 0.1, "sw_rmin": None, "sw_rmax": None}
    assert model_config_from_dict(
        section(type="standard", **parts, **saved)
    ) == model_config_from_dict(section())
    other = section(type="standard", **{**parts, "fitting_net": {"type": "ener"}})
    assert model_config_from_dict(other).type == "standard"
    table = {**TABLE, "use_srtab": [row[:4] for row in TABLE["use_srtab"]]}
    assert (
        model_config_from_dict(section(type="standard", **parts, **table)).type
        == "standard"
    )
