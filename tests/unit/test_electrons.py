"""Electronic configurations of free atoms."""

import hashlib

import pytest

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.config.elements import SYMBOLS, occupied_states
from deepmd_ema.errors import ConfigError

# made_by: the table electronic_configuration_embedding of deepmd.utils.econf_embd of DeePMD-kit
# 3.2.0, hashlib.sha256((np.array(list(table.values())) ==
# 1).astype(np.uint8).tobytes()).hexdigest()
OF_DEEPMD_KIT = "4c313bf3765747380abd37c815f0cd6e703842ab3cb8ab41856c4e0a2261338f"


def test_the_table_is_that_of_deepmd_kit():
    table = bytes(state for symbol in SYMBOLS for state in occupied_states(symbol))
    assert hashlib.sha256(table).hexdigest() == OF_DEEPMD_KIT


@pytest.mark.parametrize("descriptor", ["se_atten", "se_atten_v2", "se_e3_tebd"])
def test_names_that_are_no_elements_are_refused(descriptor):
    section = {"type": descriptor, "sel": 8, "use_econf_tebd": True}
    with pytest.raises(
        ConfigError,
        match=r"use_econf_tebd = true: type_map has \"OW\", expected symbols of elements",
    ):
        model_config_from_dict(
            {"type_map": ["OW", "H"], "descriptor": section, "fitting_net": {}}
        )
