"""A good input becomes a frozen object with DeePMD-kit's keys and defaults, and nothing in it is
ignored in silence.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from config_inputs import GOOD, REMOVE, spoiled, write

from deepmd_ema.config import (
    config_from_dict,
    config_summary,
    config_warnings,
    ignored_options,
    load_config,
    model_config_from_dict,
    run_arguments,
    to_dict,
)
from deepmd_ema.config.schema.optim import AdamWConfig, EnerLossConfig
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

ROOT = Path(__file__).parents[2]
READY = sorted(
    f for f in (ROOT / "configs").iterdir() if f.suffix in (".json", ".yaml")
)
EXAMPLES = sorted(
    f
    for each in ("*", "infrared/*")
    for f in (ROOT / "examples").glob(f"{each}/input.json")
)

# from `normalize` of DeePMD-kit 3.2.0 (deepmd.utils.argcheck) for an input with required keys only;
# what its torch backends do not use for se_e2_a and ener is left out here
PEER_DEFAULTS = {
    "model": {
        "data_stat_nbatch": 10,
        "data_stat_protect": 0.01,
        "pair_exclude_types": [],
        "atom_exclude_types": [],
        "preset_out_bias": None,
        "finetune_head": "",
    },
    "model.descriptor": {
        "sel": "auto",
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "neuron": [10, 20, 40],
        "axis_neuron": 4,
        "activation_function": "tanh",
        "resnet_dt": False,
        "type_one_side": False,
        "precision": "default",
        "trainable": True,
        "exclude_types": [],
        "env_protection": 0.0,
        "set_davg_zero": False,
    },
    "model.fitting_net": {
        "type": "ener",
        "numb_fparam": 0,
        "numb_aparam": 0,
        "default_fparam": None,
        "dim_case_embd": 0,
        "neuron": [120, 120, 120],
        "activation_function": "tanh",
        "precision": "default",
        "resnet_dt": True,
        "trainable": True,
        "rcond": None,
        "atom_ener": [],
        "use_aparam_as_mask": False,
    },
    "learning_rate": {
        "type": "exp",
        "decay_steps": 5000,
        "decay_rate": None,
        "smooth": False,
        "stop_lr_ratio": None,
        "warmup_steps": 0,
        "warmup_ratio": None,
        "warmup_start_factor": 0.0,
    },
    "optimizer": {
        "type": "Adam",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": 0.0,
    },
    "loss": {
        "type": "ener",
        "start_pref_e": 0.02,
        "limit_pref_e": 1.0,
        "start_pref_f": 1000,
        "limit_pref_f": 1.0,
        "start_pref_v": 0.0,
        "limit_pref_v": 0.0,
        "start_pref_ae": 0.0,
        "limit_pref_ae": 0.0,
        "start_pref_pf": 0.0,
        "limit_pref_pf": 0.0,
        "use_default_pf": False,
        "use_huber": False,
        "huber_delta": 0.01,
        "loss_func": "mse",
        "f_use_norm": False,
        "intensive_ener_virial": False,
    },
    "training.training_data": {
        "rglob_patterns": None,
        "batch_size": "auto",
        "auto_prob": "prob_sys_size",
        "sys_probs": None,
        "min_pair_dist": 0.0,
    },
    "training.validation_data": {
        "rglob_patterns": None,
        "batch_size": "auto",
        "auto_prob": "prob_sys_size",
        "sys_probs": None,
        "numb_btch": 1,
    },
    "training": {
        "stat_file_mode": "update",
        "disp_file": "lcurve.out",
        "disp_freq": 1000,
        "save_freq": 1000,
        "save_ckpt": "model.ckpt",
        "save_dir": None,
        "max_ckpt_keep": 5,
        "ckpt_keep_ratio": None,
        "enable_ema": False,
        "ema_decay": 0.999,
        "ema_ckpt_keep": None,
        "change_bias_after_training": False,
        "disp_training": True,
        "disp_avg": False,
        "tensorboard": False,
        "tensorboard_log_dir": "log",
        "tensorboard_freq": 1,
        "zero_stage": 0,
    },
    "validating": {
        "full_validation": False,
        "ema_full_validation": False,
        "validation_freq": 5000,
        "save_best": True,
        "save_best_dir": None,
        "max_best_ckpt": 1,
        "validation_metric": "E:MAE",
        "early_stop": None,
        "full_val_file": "val.log",
        "full_val_start": 0.5,
    },
}
# what DeePMD-kit 3.2.0 writes into out.json for options that are not here, when they are left alone
PEER_LEFT_ALONE = {
    "model.bridging_method": "None",
    "model.bridging_r_inner": 0.5,
    "model.bridging_r_outer": 0.8,
    "model.info": {"observed_type": ["O", "H"]},
    "model.model_branch_alias": [],
    "model.srtab_add_bias": True,
    "loss.start_pref_h": 0.0,
    "loss.limit_pref_h": 0.0,
    "loss.start_pref_gf": 0.0,
    "loss.limit_pref_gf": 0.0,
    "loss.numb_generalized_coord": 0,
    "loss.enable_atom_ener_coeff": False,
    "training.acc_freq": 1,
    "training.enable_profiler": False,
    "training.neighbor_graph_method": "auto",
    "training.profiling": False,
    "training.profiling_file": "timeline.json",
    "validating.amp_infer": False,
    "validating.tf32_infer": False,
}
REQUIRED_ONLY = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a"},
        "fitting_net": {},
    },
    "learning_rate": {"start_lr": 0.001},
    "training": {
        "training_data": {"systems": "data"},
        "validation_data": {"systems": "validation"},
        "numb_steps": 10,
    },
}


def at(values, path):
    for key in path.split("."):
        values = values[key]
    return values


@pytest.mark.parametrize("section", PEER_DEFAULTS)
def test_defaults_are_those_of_deepmd_kit(section):
    found = at(run_arguments().normalize_value(REQUIRED_ONLY), section)
    assert {key: found[key] for key in PEER_DEFAULTS[section]} == PEER_DEFAULTS[section]
    written = at(to_dict(config_from_dict(REQUIRED_ONLY)), section)
    assert {key: written[key] for key in PEER_DEFAULTS[section] if key in written} == {
        key: value for key, value in PEER_DEFAULTS[section].items() if key in written
    }
    short_form = {
        "enable_ema",
        "ema_decay",
        "ema_warmup",
        "ema_ckpt_keep",
        "ema_full_validation",
    }
    assert (
        set(found) - set(written) <= short_form
    )  # an entry of averaging in the normalized config


def test_the_learning_rate_ends_at_5e_8_unless_said_otherwise():
    schedule = config_from_dict(REQUIRED_ONLY).learning_rate
    assert schedule.end_lr == 5e-8
    assert replace(schedule, stop_lr_ratio=0.1).end_lr == pytest.approx(1e-4, rel=1e-12)
    assert replace(schedule, stop_lr=1e-6).end_lr == 1e-6
    assert replace(schedule, warmup_ratio=0.25).num_warmup_steps(10) == 2


def test_what_deepmd_kit_normalized_is_read_back_the_same():
    assert config_from_dict(spoiled(PEER_LEFT_ALONE)) == config_from_dict(GOOD)


def test_a_config_survives_the_way_through_json():
    for values in (
        GOOD,
        REQUIRED_ONLY,
        spoiled({"learning_rate.type": "wsd", "optimizer": {"type": "AdamW"}}),
    ):
        config = config_from_dict(values)
        assert config_from_dict(json.loads(json.dumps(to_dict(config)))) == config
        assert model_config_from_dict(to_dict(config.model)) == config.model


def test_aliases_stand_for_the_canonical_keys():
    changes = {
        "model.descriptor.type": "se_a",
        "model.descriptor.n_axis_neuron": 8,
        "model.fitting_net.neuron": REMOVE,
        "model.fitting_net.n_neuron": [5],
        "training.numb_steps": REMOVE,
        "training.stop_batch": 7,
        "training.training_data.sys_weights": [1.0],
        "training.validation_data.numb_batch": 4,
        "loss.type": "ener_hess",
    }
    config = config_from_dict(spoiled(changes))
    assert isinstance(config.model.descriptor, SeE2AConfig)
    assert (config.model.descriptor.axis_neuron, config.model.fitting_net.neuron) == (
        8,
        [5],
    )
    assert config.training.numb_steps == 7
    assert config.training.training_data.sys_probs == [1.0]
    assert config.training.validation_data.numb_btch == 4
    assert isinstance(config.loss, EnerLossConfig)


def test_keys_that_begin_with_an_underscore_are_comments():
    changes = {
        "_note": 1,
        "model._note": [],
        "model.descriptor._note": {},
        "training.training_data._x": "y",
    }
    assert config_from_dict(
        spoiled({**changes, "$schema": "schema.json"})
    ) == config_from_dict(GOOD)


# ---- older inputs


def test_an_input_of_version_1_is_read_with_a_note_for_each_change():
    old = {
        "_comment": "as of 2019",
        "model": GOOD["model"],
        "learning_rate": {
            "type": "exp",
            "start_lr": 0.001,
            "decay_steps": 50,
            "stop_lr": 1e-8,
        },
        "training": {
            "systems": ["data"],
            "set_prefix": "set",
            "batch_size": 1,
            "stop_batch": 2000,
            "numb_test": 10,
            "opt_type": "AdamW",
            "adam_beta1": 0.8,
            "warmup_steps": 20,
        },
    }
    config = config_from_dict(old)
    assert config.training.training_data.systems == ["data"]
    assert config.optimizer == AdamWConfig(adam_beta1=0.8)
    assert config.learning_rate.warmup_steps == 20
    assert (
        "training.numb_test has no effect and was left out: validation is set by "
        "validation_data.numb_btch now" in (" ".join(config.notes))
    )
    assert (
        "training.warmup_steps was moved to learning_rate.warmup_steps, its place today."
        in config.notes
    )
    assert len(config.notes) == 7


# ---- nothing is ignored in silence

SLOW = {"name": "slow", "decay": 0.99}
WITHOUT_EFFECT = [
    (
        {"training.averaging": [{**SLOW, "half_life_unit": "epochs"}]},
        'training.averaging[0].half_life_unit = "epochs": no effect, decay is given',
    ),
    (
        {
            "training.averaging": [
                SLOW,
                {"type": "power", "name": "p", "sigma_rel": 0.05, "snapshot_freq": 5},
            ]
        },
        "training.averaging[1].snapshot_freq = 5: no effect, snapshots is false",
    ),
    (
        {
            "training.averaging": [{**SLOW, "ckpt_keep": 5}],
            "training.ckpt_keep_ratio": 0.5,
        },
        "training.averaging[0].ckpt_keep = 5: no effect, ckpt_keep_ratio says how many "
        "checkpoints are kept",
    ),
    (
        {
            "training.averaging": [{**SLOW, "full_validation": True}],
            "validating.full_val_start": 1,
        },
        "training.averaging[0].full_validation = true: no effect, validating.full_val_start = 1 "
        "means never",
    ),
    (
        {"training.averaging": [{**SLOW, "layout": "full_tensor"}]},
        'training.averaging[0].layout = "full_tensor": no effect, every process holds all',
    ),
    (
        {"validating.validation_freq": 10},
        "validating.validation_freq = 10: no effect, full_validation and ema_full_",
    ),
    (
        {
            "validating.full_validation": True,
            "validating.save_best": False,
            "validating.max_best_ckpt": 3,
        },
        "validating.max_best_ckpt = 3: no effect, save_best is false",
    ),
    (
        {"training.ckpt_keep_ratio": 0.5, "training.max_ckpt_keep": 3},
        "training.max_ckpt_keep = 3: no effect",
    ),
    (
        {"training.disp_training": False, "training.disp_file": "a"},
        'training.disp_file = "a": no effect',
    ),
    (
        {
            "training.training_data.sys_probs": [1],
            "training.training_data.auto_prob": "prob_uniform",
        },
        "training.training_data.auto_prob",
    ),
    ({"learning_rate.scale_by_worker": "sqrt"}, "learning_rate.scale_by_worker"),
    (
        {"optimizer": {"type": "AdaMuon", "lr_adjust_coeff": 0.1}},
        "optimizer.lr_adjust_coeff = 0.1: no effect",
    ),
    ({"training.compile_options": {"dynamic": False}}, "training.compile_options = "),
    (
        {"training.enable_tf32": True},
        "training.enable_tf32 = true: no effect, no product is in float32",
    ),
    (
        {"learning_rate": {"type": "invsqrt", "start_lr": 1e-3, "stop_lr": 1e-6}},
        "learning_rate.stop_lr = 1e-06: no effect, decay_phase_ratio is 0",
    ),
    (
        {"validating.amp_infer": True},
        "validating.amp_infer = true: no effect, no descriptor has use_amp",
    ),
    (
        {"model.bridging_r_inner": 0.4},
        "model.bridging_r_inner = 0.4: no effect, there is no bridging_method",
    ),
    (
        {"optimizer": {"type": "LKF"}},
        "learning_rate.start_lr = 0.001: no effect, LKF has no learning rate",
    ),
    (
        {"learning_rate.stop_lr": 1e-3, "loss.limit_pref_e": 7.5},
        "loss.limit_pref_e = 7.5: no effect, the learning rate is constant, and so is "
        "start_pref_e = 0.02",
    ),
    (
        {"learning_rate.decay_rate": 1.0, "learning_rate.smooth": True},
        "learning_rate.smooth = true: no effect, the rate is constant",
    ),
    (
        {"loss.loss_func": "mae", "loss.use_huber": True},
        "loss.use_huber = true: no effect, loss_func is mae",
    ),
    (
        {"model.descriptor": {"type": "se_e3", "sel": [4, 8], "set_davg_zero": True}},
        "model.descriptor.set_davg_zero = true: no effect, only angular columns enter",
    ),
    (
        {"model.fitting_net.layer_name": ["a", None, None]},
        "model.fitting_net.layer_name",
    ),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    WITHOUT_EFFECT,
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_an_option_without_effect_is_listed(changes, message):
    found = ignored_options(config_from_dict(spoiled(changes)))
    assert any(line.startswith(message) for line in found), found


def test_what_is_too_long_for_the_run_is_warned_about():
    (found,) = config_warnings(config_from_dict(GOOD))
    assert found.startswith(
        "learning_rate.decay_steps = 5000: not less than the 2,000 steps of the decay; 100 is used"
    )
    by_epochs = spoiled(
        {
            "training.enable_ema": True,
            "training.numb_steps": REMOVE,
            "training.numb_epoch": 5,
        }
    )
    assert config_warnings(config_from_dict(by_epochs)) == []
    assert len(config_warnings(config_from_dict(by_epochs), num_steps=2000)) == 2


def test_the_summary_says_what_the_input_requests():
    changes = {
        "training.enable_ema": True,
        "training.ema_decay": 0.99,
        "validating.ema_full_validation": True,
    }
    lines = [
        f"{name}  {text}"
        for name, text in config_summary(config_from_dict(spoiled(changes)))
    ]
    text = "\n".join(lines)
    for phrase in (
        "O H",
        "rcut 6 angstrom",
        "sel 46 92",
        "20-20",
        "exp: 0.001, falls exponentially to 1e-08",
        "Adam",
        "force 1000 to 1",
        "2,000 steps",
        "EMA over about 100 steps, decay 0.99, warm-up",
        "(ema weights, best by E:MAE)",
    ):
        assert phrase in text
    assert all(len(line) < 140 for line in lines)
    wsd = spoiled(
        {
            "learning_rate.type": "wsd",
            "learning_rate.warmup_steps": 5,
            "training.validation_data": REMOVE,
        }
    )
    text = "\n".join(text for _, text in config_summary(config_from_dict(wsd)))
    assert (
        "rises to 0.001 in 5 steps, stays, and falls with its inverse linear to" in text
    )
    assert "none (training.validation_data is missing)" in text
    rate = spoiled(
        {
            "learning_rate": {
                "type": "invsqrt",
                "start_lr": 1e-3,
                "stop_lr": 1e-6,
                "decay_phase_ratio": 0.1,
            }
        }
    )
    assert (
        "falls as the inverse square root of the step"
        in config_from_dict(rate).learning_rate.summary()
    )


# ---- files


def test_yaml_says_the_same_as_json(tmp_path):
    text = """
model:
  type_map: [O, H]
  descriptor: {type: se_e2_a, sel: [46, 92], rcut: 6.0, rcut_smth: 5e-1, neuron: [10, 20, 40]}
  fitting_net: {neuron: [20, 20]}
learning_rate: {type: exp, start_lr: 1e-3, stop_lr: 1.0e-08}
loss: {start_pref_e: .02, limit_pref_e: 1}
training:
  training_data: {systems: [data], batch_size: 1}
  validation_data: {systems: [validation]}
  numb_steps: 2000
validating: {}
"""
    assert load_config(write(tmp_path, text, "a.yaml")) == load_config(
        write(tmp_path, GOOD)
    )


def test_elements_are_not_taken_for_booleans_in_yaml(tmp_path):
    text = (
        (ROOT / "configs" / "water_wsd.yaml")
        .read_text()
        .replace("[O, H]", "[No, Y, N]")
    )
    assert load_config(write(tmp_path, text, "a.yml")).model.type_map == [
        "No",
        "Y",
        "N",
    ]


@pytest.mark.parametrize(
    "path", READY + EXAMPLES, ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_a_ready_input_is_good_and_wastes_no_option(path):
    config = load_config(path)
    assert ignored_options(config) == []
    assert config.notes == ()
    assert path in EXAMPLES or config_warnings(config) == []
    data = [config.training.training_data, config.training.validation_data]
    for system in [s for d in data if d is not None for s in d.systems]:
        assert system.startswith("../deepmd-kit/") or (path.parent / system).exists(), (
            system
        )  # a clone


def test_the_config_loads_quickly_and_without_torch_and_numpy():
    code = "import sys; from deepmd_ema.config import load_config; load_config(sys.argv[1]); "
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(READY[0])],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "set()"
