"""Sections of models: mistakes in them by name, options without effect, numbers of neighbors,
statistics by part.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny_input
from linear_models import FIT, NETWORKS, TABLE, WEIGHTS, rows, section
from toy_models import (
    FLOW,
    REPFORMER,
    REPINIT,
    TRICLINIC,
    batch_of,
    model_section,
    toy_atoms,
    toy_model,
)
from toy_models import TABLE as SHORT

from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.rules import ignored_options
from deepmd_ema.errors import ConfigError
from deepmd_ema.findings import ERROR, texts_of
from deepmd_ema.geometry import neighbor_statistics

# changes of the descriptor, changes of the model, and the message
OF_DESCRIPTORS = {
    "dpa2": [
        (
            {"repinit": {**REPINIT, "rcut_smth": 5.0}},
            {},
            "repinit.rcut_smth = 5: expected less than rcut = 4",
        ),
        (
            {"repinit": {**REPINIT, "axis_neuron": 20}},
            {},
            "repinit.axis_neuron = 20: expected at most 16",
        ),
        (
            {"repinit": {**REPINIT, "three_body_rcut": 4.5}},
            {},
            "three_body_rcut = 4.5: expected at most rcut = 4",
        ),
        (
            {"three_body_rcut_smth": 3.5},
            {},
            "repinit.three_body_rcut_smth = 3.5: expected less than three_",
        ),
        (
            {"three_body_sel": 50},
            {},
            "repinit.three_body_sel = 50: expected at most repformer.nsel = 40",
        ),
        (
            {"repinit": {**REPINIT, "nsel": "some"}},
            {},
            'repinit.nsel = "some": expected a whole number > 0',
        ),
        (
            {"repformer": {**REPFORMER, "rcut": 4.0}},
            {},
            "repformer.rcut = 4: expected less than repinit.rcut = 4",
        ),
        (
            {"repformer": {**REPFORMER, "nsel": 60}},
            {},
            "repformer.nsel = 60: expected less than repinit.nsel = 60",
        ),
        (
            {"repformer": {**REPFORMER, "nsel": 70}},
            {},
            "repformer.nsel = 70: expected at most repinit.nsel = 60",
        ),
        (
            {"repformer": {**REPFORMER, "axis_neuron": 7}},
            {},
            "repformer.axis_neuron = 7: expected at most g2_dim = 6",
        ),
        (
            {"update_g1_has_grrg": False, "update_g1_has_drrd": False},
            {},
            "the layer of all terms would have no input",
        ),
        ({"update_style": "res"}, {}, 'repformer.update_style = "res"'),
        ({"exclude_types": [[0, 3]]}, {}, "exclude_types: type 3 does not exist"),
    ],
    "dpa3": [
        (
            {"a_rcut_smth": 3.0},
            {},
            "descriptor.repflow.a_rcut_smth = 3: expected less than a_rcut = 3",
        ),
        (
            {"a_rcut": 5.0},
            {},
            "descriptor.repflow.a_rcut = 5: expected at most e_rcut = 4",
        ),
        (
            {"a_sel": 61},
            {},
            "descriptor.repflow.a_sel = 61: expected at most e_sel = 60",
        ),
        ({"e_sel": "many"}, {}, 'repflow.e_sel = "many": expected a whole number > 0'),
        (
            {"axis_neuron": 7},
            {},
            "axis_neuron = 7: expected at most 6, the smaller of n_dim and e_dim",
        ),
        (
            {"a_compress_rate": 3},
            {},
            "a_compress_rate = 3: expected a number of which twice divides a_dim = 4",
        ),
        (
            {
                "a_compress_rate": 1,
                "a_compress_use_split": True,
                "a_compress_e_rate": 4,
            },
            {},
            "e_dim = 6: expected at",
        ),
        (
            {"use_dynamic_sel": True, "smooth_edge_update": False},
            {},
            "use_dynamic_sel = true: needs smooth",
        ),
        (
            {"sequential_update": True, "update_style": "res_avg"},
            {},
            "sequential_update = true: needs update_style",
        ),
        (
            {"sequential_update": True, "update_angle": False},
            {},
            "sequential_update = true: needs update_angle",
        ),
        (
            {"use_exp_switch": True, "e_rcut_smth": 0.0},
            {},
            "e_rcut_smth = 0: use_exp_switch divides by it",
        ),
        (
            {"add_chg_spin_ebd": True},
            {},
            "add_chg_spin_ebd = true: expected false: charge and spin",
        ),
        (
            {"default_chg_spin": [0.0, 1.0]},
            {},
            "default_chg_spin = [0.0, 1.0]: expected null: charge and spin",
        ),
    ],
    "se_atten": [
        (
            {},
            {"use_srtab": "missing.txt"},
            'use_srtab = "missing.txt": expected a readable text file',
        ),
        ({}, {**SHORT, "use_srtab": [[1.0, 2.0], [2.0, 1.0]]}, "at least three rows"),
        (
            {},
            {**SHORT, "use_srtab": [[1.0, 2.0], [2.0, 1.0], [4.0, 0.0]]},
            "even steps",
        ),
        (
            {},
            {**SHORT, "use_srtab": [row[:4] for row in SHORT["use_srtab"]]},
            "energies of 3 pairs, expected 6",
        ),
        (
            {},
            {**SHORT, "use_srtab": SHORT["use_srtab"][:50]},
            "with energies that are not 0, and rcut is 4",
        ),
        ({}, {**SHORT, "sw_rmin": None}, "model.sw_rmin: required beside use_srtab"),
        (
            {},
            {**SHORT, "sw_rmax": 0.5},
            "expected more than sw_rmin = 0.7, at most rcut = 4",
        ),
        (
            {"interpolate": "sometimes"},
            {},
            'interpolate = "sometimes": unknown. Known: auto, always, never',
        ),
        (
            {"activation_function": "tahn"},
            {},
            'activation_function = "tahn": unknown. Did you mean tanh?',
        ),
    ],
    "dpa4": [
        (
            {},
            {"bridging_method": "lj"},
            'bridging_method = "lj": expected "zbl", or "none".',
        ),
        (
            {},
            {"bridging_method": "zbl", "bridging_r_inner": 0.9},
            "bridging_r_outer = 0.8: expected more than bridging",
        ),
        (
            {},
            {"bridging_method": "zbl", "bridging_r_outer": 5},
            "at most rcut = 4 (angstrom)",
        ),
        (
            {},
            {"bridging_method": "zbl", "type_map": ["O", "H", "X"]},
            "X is no element, whose charge zbl needs.",
        ),
        (
            {},
            {"bridging_method": "zbl", **SHORT},
            "model.use_srtab: bridging_method is given too, and both act at",
        ),
    ],
    "se_e2_a": [
        (
            {},
            {"bridging_method": "zbl"},
            "the descriptor se_e2_a does not have it, nor in DeePMD-kit.",
        )
    ],
}


@pytest.mark.parametrize(
    ("descriptor", "number"),
    [(name, k) for name, of in OF_DESCRIPTORS.items() for k in range(len(of))],
)
def test_what_does_not_fit_together_is_named(descriptor, number):
    changes, of_model, phrase = OF_DESCRIPTORS[descriptor][number]
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(model_section(descriptor, changes, **of_model))
    assert phrase in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"weights": [1.0, 2.0]},
            "model.weights = [1.0, 2.0]: has length 2, expected 3",
        ),
        (
            {"weights": "avg"},
            'model.weights = "avg": expected "mean", "sum", or a list of numbers',
        ),
        (
            {"models": [TABLE], "weights": "sum"},
            "model.models: expected at least one part with a descriptor",
        ),
        (
            {
                "models": [NETWORKS[0], {"type": "frozen", "model_file": "a.dp"}],
                "weights": "sum",
            },
            'model.models[1].type = "frozen": known to DeePMD-kit, not available',
        ),
        (
            {"models": [NETWORKS[0], section()], "weights": "sum"},
            "Put its parts here, with weights",
        ),
        (
            {
                "models": [
                    NETWORKS[0],
                    {**TABLE, "rcut": 9.0, "tab_file": rows()[:30]},
                ],
                "weights": "sum",
            },
            "with energies that are not 0, and rcut is 9",
        ),
        (
            {
                "models": [NETWORKS[0], {**TABLE, "type_map": ["O", "H"]}],
                "weights": "sum",
            },
            'model.models[1].type_map = ["O", "H"]: expected all elements of the model; Na is '
            "missing",
        ),
        (
            {
                "models": [
                    {
                        **NETWORKS[0],
                        "fitting_net": FIT | {"atom_ener": [1.0, 2.0, 3.0]},
                    },
                    TABLE,
                ],
                "weights": "sum",
            },
            "model.models[0].fitting_net.atom_ener = [1.0, 2.0, 3.0]: the energies of the "
            "elements are fitted for the whole",
        ),
        (
            {
                "models": [
                    {**NETWORKS[0], "fitting_net": FIT | {"numb_fparam": n}}
                    for n in (1, 2)
                ],
                "weights": "sum",
            },
            "model.models: numb_fparam of the fitting networks is [1, 2], expected one value",
        ),
        ({"shared_dict": {"a": {}}}, "model.shared_dict"),
    ],
)
def test_what_does_not_fit_in_a_sum_is_refused(changes, phrase):
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(section(**{"weights": WEIGHTS, **changes}))
    assert phrase in str(refused.value)


def test_options_without_effect_are_listed():
    descriptors = {
        "dpa2": {
            "repinit": {**REPINIT, "use_three_body": False},
            "repformer": {**REPFORMER, "update_style": "res_avg"},
        },
        "dpa3": {"repflow": {**FLOW, "optim_update": False, "sel_reduce_factor": 5.0}},
    }
    lines = [
        line.removeprefix("model.descriptor.")
        for name, parts in descriptors.items()
        for line in ignored_options(
            config_from_dict(
                tiny_input(["data"], model__descriptor={"type": name, **parts})
            )
        )
    ]
    assert {
        "repinit.three_body_rcut = 3.0: no effect, use_three_body is false",
        "repformer.update_residual = 0.05: no effect, update_style is res_avg",
        "repflow.optim_update = false: no effect, both values are the same function",
        "repflow.sel_reduce_factor = 5.0: no effect, use_dynamic_sel is false",
    } <= {*lines}


def test_skip_stat_is_the_older_name_of_a_fixed_spread():
    flow = toy_model("dpa3", {"skip_stat": True, "fix_stat_std": 0.7})[
        0
    ].descriptor.repflow
    assert (flow.skip_stat, flow.fix_stat_std) == (False, 0.3)


def test_numbers_of_neighbors_are_counted_at_the_cutoff_of_each_part():
    found = SimpleNamespace(max_total=50, max_within={3.2: 22, 3.0: 19}.get)
    auto = {"nsel": "auto", "three_body_sel": "auto"}
    descriptor = model_config_from_dict(model_section("dpa2", auto)).descriptor
    assert descriptor.neighbors is None
    counted = descriptor.with_neighbors(found)
    assert (
        counted.repinit.nsel,
        counted.repformer.nsel,
        counted.repinit.three_body_sel,
    ) == (
        56,
        24,
        20,
    )
    assert counted.neighbors == (56,)
    assert descriptor.with_neighbors_of(counted) == counted
    assert list(counted.inner_neighbors()) == [
        ("repinit.three_body_sel", 3.0, 20),
        ("repformer.nsel", 3.2, 24),
    ]
    few = descriptor.with_neighbors(
        SimpleNamespace(max_total=0, max_within=lambda rcut: 0)
    )
    # as in small molecules: still one more where it looks farther
    assert texts_of(ERROR, few.findings(["O", "H", "Na"])) == []
    assert (few.repinit.nsel, few.repformer.nsel) == (8, 4)


def test_auto_counts_neighbors_within_each_cutoff():
    coord, types = toy_atoms()
    found = neighbor_statistics([(coord, TRICLINIC, types)], 4.0, 3)
    images = np.einsum(
        "nk,kx->nx", np.indices((9, 9, 9)).reshape(3, -1).T - 4, TRICLINIC
    )
    distance = np.linalg.norm(coord[:, None] - coord + images[:, None, None], axis=-1)
    most = [
        ((distance < rcut) & (distance > 0)).sum((0, 2)).max() for rcut in (4.0, 3.0)
    ]
    assert [found.max_within(rcut) for rcut in (4.0, 3.0)] == most
    assert found.max_total == most[0]
    for e_sel, a_sel, ratios in (
        ("auto", "auto:1.5", (1.1, 1.5)),
        (90, "auto", (None, 1.1)),
    ):
        config = model_config_from_dict(
            model_section("dpa3", {"e_sel": e_sel, "a_sel": a_sel})
        ).descriptor
        assert config.neighbors is None
        flow = config.with_neighbors(found).repflow
        wanted = [
            90 if ratio is None else 4 * int(np.ceil(int(n * ratio) / 4))
            for n, ratio in zip(most, ratios)
        ]
        assert [flow.e_sel, flow.a_sel] == wanted


def test_statistics_of_each_part_stand_in_its_own_folder():
    _, model = toy_model("dpa2", {"set_davg_zero": False})
    sums = model.descriptor.measure(batch_of(model, (*toy_atoms(0, 7), TRICLINIC)))
    assert set(sums) == set(model.descriptor.sum_names)
    folders = {name.partition("/")[0] for name in sums}
    assert [len(folder) for folder in folders] == [
        40
    ] * 3  # SHA-1, as DeePMD-kit names them
    model.descriptor.apply_statistics(sums)
    for name, sel in (("repinit", 60), ("repformer", 40), ("angles", 30)):
        mean = getattr(model.descriptor, name).mean
        assert mean.shape == (3, sel, 4)
        assert (mean[..., 0] > 0).all()
        assert (mean[..., 1:] == 0).all()


def test_the_spread_of_the_environment_comes_from_the_data_only_if_it_is_not_fixed():
    (_, fixed), (_, measured) = (
        toy_model("dpa3", {"fix_stat_std": value}) for value in (0.4, 0.0)
    )
    batch = batch_of(fixed, (*toy_atoms(), TRICLINIC))
    assert fixed.descriptor.measure(batch) == {}
    sums = measured.descriptor.measure(batch)
    assert list(sums) == list(measured.descriptor.sum_names)
    measured.descriptor.mean.zero_()
    measured.descriptor.apply_statistics(sums)
    assert not measured.descriptor.mean.any()
    radial = measured.descriptor.stddev[:, 0, 0]
    assert (radial > 0.01).all()
    assert radial.unique().numel() == 3
