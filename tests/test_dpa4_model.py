"""The model of type dpa4, and its options that other models do not have."""

import pytest
from config_inputs import spoiled

from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.errors import ConfigError

SMALL = {"channels": 8, "n_blocks": 1, "lmax": 1, "mixing_layers": 1, "rcut": 4.0}


def section(**changes):
    return {"type": "dpa4", "type_map": ["O", "H"], "descriptor": SMALL, "fitting_net": {}, **changes}


@pytest.mark.parametrize("name", ["dpa4", "DPA4", "SeZM", "sezm"])
def test_its_parts_need_no_type(name):
    config = model_config_from_dict(section(type=name))
    assert (config.type, config.descriptor.type, config.fitting_net.type) == ("dpa4", "dpa4", "dpa4_ener")
    assert model_config_from_dict(to_dict(config)) == config


def test_parts_of_another_type_are_refused():
    parts = {"descriptor": {"type": "se_atten", "sel": 20}, "fitting_net": {"type": "ener"}}
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(section(**parts))
    text = str(refused.value)
    assert 'model.descriptor.type = "se_atten": unknown. Known: dpa4.' in text
    assert 'model.fitting_net.type = "ener": unknown.' in text


def test_a_table_is_for_other_models():
    with pytest.raises(ConfigError, match=r"model\.use_srtab: unknown key here\. It belongs to .* of type standard"):
        model_config_from_dict(section(use_srtab="table.txt"))


def test_its_switches_hold_for_the_run():
    model = section(use_compile=True, enable_tf32=True, bridging_method="ZBL")
    config = config_from_dict(spoiled({"model": model}))
    assert (config.training.enable_compile, config.training.enable_tf32) == (True, True)
    assert (config.model.bridging.inner, config.model.bridging.outer) == (0.5, 0.8)
