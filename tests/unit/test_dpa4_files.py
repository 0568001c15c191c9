"""Files of models dpa4: DeePMD-kit's checkpoints and trees, read and written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from interchange_cases import same_bits
from toy_models import assert_tree_refused, batch_of, evaluate, write_dp

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.deepmd_pt import write_deepmd_pt
from deepmd_ema.interop.trees.dpa4 import DPA4Tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.families.dpa4.section import DPA4Config

GOLDEN = Path(__file__).parents[1] / "golden" / "dpa4_files"
NUMBERS = json.loads((GOLDEN / "numbers.json").read_text())
SMALL = {
    "channels": 4,
    "n_radial": 4,
    "lmax": 2,
    "n_blocks": 2,
    "mixing_layers": 2,
    "rcut": 4.0,
    "ffn_neurons": 4,
    "precision": "float64",
}
BRIDGED = {
    "bridging_method": "zbl",
    "bridging_r_inner": 0.9,
    "bridging_r_outer": 1.7,
    "atom_exclude_types": [1],
}
# options that have arrays of their own
CASES = {
    "defaults": {},
    "no_blocks": {"n_blocks": 0},
    "norms": {
        "so2_norm": True,
        "layer_scale": True,
        "mlp_bias": True,
        "sandwich_norm": [True] * 4,
    },
    "heads": {
        "n_focus": 2,
        "n_atten_head": 2,
        "atten_v_proj": True,
        "atten_o_proj": True,
        "atten_f_mix": True,
    },
    "wide": {
        "extra_node_l": 1,
        "mmax": 2,
        "message_node_so3": True,
        "ffn_so3_grid": True,
        "so3_readout": "mlp",
    },
    "plain": {
        "use_env_seed": False,
        "radial_so2_mode": "none",
        "s2_activation": [False, False],
        "n_atten_head": 0,
    },
}
ATOMS = (np.random.default_rng(4).uniform(0, 4, (7, 3)), [0, 1, 1, 0, 1, 2, 2], None)


def made(changes=None, fitting=None, **more):
    section = {
        "type": "dpa4",
        "type_map": ["O", "H", "Na"],
        "descriptor": {**SMALL, **(changes or {})},
        "fitting_net": {"neuron": [6], "precision": "float64", **(fitting or {})},
        **more,
    }
    config = model_config_from_dict(section)
    model, generator = build_model(config, 0).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64),
                alpha=0.2,
            )
        model.out_bias.copy_(torch.tensor([-3.0, -1.0, 0.5]).view(1, 3, 1))
    return config, model


@pytest.mark.parametrize("suffix", [".dp", ".yaml", ".pt"])
@pytest.mark.parametrize("case", [*CASES, "bridged"])
def test_a_file_gives_back_the_bits(tmp_path, case, suffix):
    bridged = (
        {"exclude_types": [[0, 2]]},
        {"dim_case_embd": 2, "case_film_embd": True, "numb_fparam": 1},
    )
    config, model = (
        made(*bridged, **BRIDGED) if case == "bridged" else made(CASES[case])
    )
    if case == "bridged":
        model.fitting.set_case(1)
        model.descriptor.version_tensor.fill_(1.0)
    file, more = (
        tmp_path / f"a{suffix}",
        {"fparam": np.array([0.3])} if case == "bridged" else {},
    )
    if suffix == ".pt":
        write_deepmd_pt(file, {"": (config, model, {})})
    else:
        write_dp(file, model, config)
    loaded = load_model(file)
    same_bits(loaded.model, model)
    assert (loaded.config.type, loaded.config.bridging) == ("dpa4", config.bridging)
    assert loaded.config.atom_exclude_types == config.atom_exclude_types
    assert loaded.config.pair_exclude_types == config.pair_exclude_types
    found, expected = (
        evaluate(one, ATOMS, **more)["force"] for one in (loaded.model, model)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", NUMBERS)
def test_files_of_deepmd_kit_give_its_energies_forces_and_virials(name):
    expected = NUMBERS[name]
    loaded = load_model(GOLDEN / name)
    batch = batch_of(
        loaded.model, (expected["coord"], expected["types"], np.array(expected["box"]))
    )
    found = loaded.model(batch)
    assert float(found["energy"][0]) == pytest.approx(expected["energy"], rel=1e-10)
    force, virial = np.array(expected["force"]), np.array(expected["virial"])
    np.testing.assert_allclose(
        batch.in_file_order(found["force"]).detach(),
        force,
        atol=1e-10 * np.abs(force).max(),
    )
    np.testing.assert_allclose(
        found["virial"][0].detach(), virial, atol=1e-10 * np.abs(virial).max()
    )


@pytest.mark.parametrize("name", [name for name in NUMBERS if name.endswith(".pt")])
def test_arrays_that_follow_from_options_are_written_as_deepmd_kit_writes_them(
    tmp_path, name
):
    loaded, theirs = (
        load_model(GOLDEN / name),
        torch.load(GOLDEN / name, weights_only=True)["model"],
    )
    write_deepmd_pt(tmp_path / "a.pt", {"": (loaded.config, loaded.model, {})})
    ours = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor) and "min_nbor_dist" not in key:
            assert ours[key].dtype == tensor.dtype, key
            torch.testing.assert_close(ours[key], tensor, rtol=1e-15, atol=0, msg=key)


def test_a_checkpoint_of_before_versions_is_of_the_first(tmp_path):
    config, model = made()
    write_deepmd_pt(tmp_path / "a.pt", {"": (config, model, {})})
    payload = torch.load(tmp_path / "a.pt", weights_only=True)
    del payload["model"]["model.Default.atomic_model.descriptor.version_tensor"]
    torch.save(payload, tmp_path / "b.pt")
    assert float(load_model(tmp_path / "b.pt").model.descriptor.version_tensor) == 1.0


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (
            lambda tree: tree.update(lora={"rank": 2}),
            "lora, low-rank additions to weights, is not available here",
        ),
        (
            lambda tree: tree["atomic_model"].update(dens_fitting={}),
            "dens, a fitting network of forces, is not available",
        ),
        (
            lambda tree: tree["atomic_model"]["descriptor"]["config"].update(
                use_spin=[True]
            ),
            "uses spin, which is not",
        ),
        (
            lambda tree: tree["atomic_model"]["descriptor"]["config"].update(
                add_chg_spin_ebd=True
            ),
            "charge and spin",
        ),
    ],
)
def test_what_a_tree_of_deepmd_kit_may_have_beside_is_refused(tmp_path, change, phrase):
    config, model = made()
    assert_tree_refused(tmp_path, config, model, change, phrase)


@pytest.mark.parametrize("case", CASES)
def test_parameters_end_as_those_of_deepmd_kit_by_which_hybrid_muon_chooses(case):
    config, model = made(CASES[case])
    in_tree = DPA4Tree(DPA4Config).write(model.descriptor, config)["@variables"]
    theirs = dict(zip(model.descriptor.state_dict(), in_tree))
    for name, _ in model.descriptor.named_parameters():
        own, other = (
            [part for part in path.split(".") if not part.isdigit()]
            for path in (name, theirs[name])
        )
        assert own[-1] == other[-1]
