"""Every mistake of an input gets one message with its place, what was found, what is expected and what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
from config_inputs import GOOD, REMOVE, spoiled, write

from deepmd_ema.config import (
    as_launched,
    config_from_dict,
    ignored_options,
    load_config,
    model_config_from_dict,
)
from deepmd_ema.config.registry import Family
from deepmd_ema.config.schema.model import FITTINGS
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.families.ener.section import EnerFittingConfig

NOT_YET = "known to DeePMD-kit, not available in dp-ema "


def problems_of(values):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(values, "input.json")
    return caught.value.problems


# changes to a good input -> what the one message begins with (after the file) and what it holds
BAD = [
    # unknown keys, at three depths
    ({"modle": {}}, "modle", ["unknown key", "Did you mean model?"]),
    ({"training.disp_frek": 1}, "training.disp_frek", ["unknown key", "disp_freq"]),
    ({"model.descriptor.rcut_smooth": 1}, "model.descriptor.rcut_smooth", ["unknown key", "rcut_smth"]),
    ({"training.training_data.batchsize": 1}, "training.training_data.batchsize", ["Did you mean batch_size?"]),
    ({"training.Seed": 1}, "training.Seed", ["Did you mean seed?"]),
    ({"training.zzz": 1}, "training.zzz", ["unknown key. Known: training_data, ", "numb_steps, stop_batch"]),
    ({"training.start_lr": 1.0}, "training.start_lr", ["It belongs to learning_rate.start_lr"]),
    ({"learning_rate.ema_decay": 0.9}, "learning_rate.ema_decay", ["It belongs to training.ema_decay"]),
    ({"learning_rate.type": "cosine", "learning_rate.decay_steps": 5}, "learning_rate.decay_steps", ["type exp"]),
    (
        {"training.numb_steps": REMOVE, "training.numb_stepz": 5},
        "training.numb_stepz",
        ["Did you mean numb_step or numb_steps?"],
    ),
    # removed options
    (
        {"training.solve_last_layer": True},
        "training.solve_last_layer = true",
        ["was removed, since virials got worse", "Remove it; an average (enable_ema)"],
    ),
    ({"validating.physics": {}}, "validating.physics = {}", ["was removed. Remove it, and run `dp-ema test"]),
    (
        {"validating.early_stop": {"metric": "P:LIMITS", "patience": 2}},
        'validating.early_stop.metric = "P:LIMITS"',
        ["was removed. Use F:RMSE or another error"],
    ),
    # required keys
    ({"model": REMOVE}, "model", ["required, but missing", "the model that is trained"]),
    ({"learning_rate": REMOVE}, "learning_rate", ["required, but missing"]),
    ({"learning_rate.start_lr": REMOVE}, "learning_rate.start_lr", ["required, but missing", "a number > 0"]),
    ({"model.type_map": REMOVE}, "model.type_map", ["required, but missing", '["O", "H"]']),
    ({"model.type_map": REMOVE, "model.typemap": ["O"]}, "model.typemap", ["Did you mean type_map, which is required"]),
    ({"training.training_data.systems": REMOVE}, "training.training_data.systems", ["required, but missing"]),
    ({"model.descriptor.type": REMOVE}, "model.descriptor.type", ["required, but missing", "se_e2_a"]),
    ({"model.descriptor.rcut": 1e9}, "model.descriptor.rcut = 1000000000.0", ["a number > 0 and at most 100"]),
    # wrong types
    ({"training.numb_steps": 1e3}, "training.numb_steps = 1000.0", ["a number with a fraction part; write 1000"]),
    ({"training.numb_steps": "1000"}, 'training.numb_steps = "1000"', ["without quotes"]),
    ({"training.numb_steps": True}, "training.numb_steps = true", ["a whole number >= 0"]),
    ({"training.enable_ema": "true"}, 'training.enable_ema = "true"', ["true or false. Write true, without quotes"]),
    ({"training.enable_ema": 1}, "training.enable_ema = 1", ["Write true."]),
    ({"training.seed": 1.5}, "training.seed = 1.5", ["a whole number >= 0"]),
    ({"training.disp_file": None}, "training.disp_file = null", ["Remove the key to get the default"]),
    ({"learning_rate.start_lr": "0.001"}, 'learning_rate.start_lr = "0.001"', ["Write the number without quotes"]),
    ({"learning_rate.start_lr": True}, "learning_rate.start_lr = true", ["a number > 0"]),
    ({"learning_rate.start_lr": float("nan")}, "learning_rate.start_lr = NaN", ["expected"]),
    ({"learning_rate.start_lr": float("inf")}, "learning_rate.start_lr = Infinity", ["finite"]),
    ({"model.descriptor.neuron": 20}, "model.descriptor.neuron = 20", ["list", "Write [20]"]),
    ({"model.descriptor.neuron": [10, True]}, "model.descriptor.neuron = [10, true]", ["list"]),
    ({"model.descriptor.neuron": []}, "model.descriptor.neuron = []", ["at least one"]),
    ({"model.descriptor": []}, "model.descriptor = []", ["expected a section {...}"]),
    ({"training.training_data": "data"}, 'training.training_data = "data"', ["expected a section {...}"]),
    ({"validating": None}, "validating = null", ["expected a section {...}"]),
    ({"training.training_data.systems": []}, "training.training_data.systems = []", ["a folder or a list"]),
    ({"training.training_data.systems": [1]}, "training.training_data.systems = [1]", ["a folder or a list"]),
    # out of range
    ({"training.ema_decay": 1.0}, "training.ema_decay = 1.0", [">= 0 and < 1"]),
    ({"training.ema_decay": -0.1}, "training.ema_decay = -0.1", [">= 0 and < 1"]),
    ({"training.zero_stage": 4}, "training.zero_stage = 4", ["expected 0, 1, 2 or 3"]),
    ({"training.ckpt_keep_ratio": 1.0}, "training.ckpt_keep_ratio = 1.0", ["> 0 and < 1"]),
    ({"training.ema_ckpt_keep": 0}, "training.ema_ckpt_keep = 0", ["a whole number > 0"]),
    ({"training.numb_steps": -1}, "training.numb_steps = -1", [">= 0"]),
    ({"training.seed": 10**18}, "training.seed = 1000", ["at most 18 digits"]),
    ({"learning_rate.start_lr": 10**400}, "learning_rate.start_lr = 1000", ["at most 18 digits"]),
    ({"training.seed": -1}, "training.seed = -1", [">= 0"]),
    ({"training.save_ckpt": "out/"}, 'training.save_ckpt = "out/"', ["name of a file"]),
    ({"learning_rate.start_lr": 0}, "learning_rate.start_lr = 0", ["> 0"]),
    ({"learning_rate.stop_lr_ratio": 2.0, "learning_rate.stop_lr": REMOVE}, "learning_rate.stop_lr_ratio", ["<= 1"]),
    ({"model.descriptor.sel": "auto:0.5"}, 'model.descriptor.sel = "auto:0.5"', ['"auto:1.2"']),
    ({"model.descriptor.sel": "all"}, 'model.descriptor.sel = "all"', ['"auto"']),
    ({"training.training_data.batch_size": "auto:"}, "training.training_data.batch_size", ["auto:N"]),
    ({"training.training_data.batch_size": 0}, "training.training_data.batch_size = 0", ["whole number > 0"]),
    ({"training.training_data.auto_prob": "prob_size"}, "training.training_data.auto_prob", ["prob_sys_size"]),
    ({"training.training_data.auto_prob": "prob_sys_size;2:1:1"}, "training.training_data.auto_prob", ["begin:end"]),
    ({"training.training_data.sys_probs": [0.9, 0.9]}, "training.training_data.sys_probs", ["add up to 1"]),
    ({"training.training_data.sys_probs": [0.5]}, "training.training_data.sys_probs", ["add up to 1"]),
    ({"loss.huber_delta": [0.1, 0.1]}, "loss.huber_delta", ["three of them"]),
    # one of several
    (
        {"optimizer": {"type": "Adma"}},
        'optimizer.type = "Adma"',
        ["unknown", "Did you mean Adam?", "AdamW, AdamWScheduleFree, AdaMuon"],
    ),
    (
        {"model.descriptor.type": "se_e2"},
        'model.descriptor.type = "se_e2"',
        ["unknown", "Did you mean se_e2_", "Known: se_e2_a, "],
    ),
    ({"model.descriptor.type": 3}, "model.descriptor.type = 3", ["unknown", "Known: se_e2_a"]),
    ({"loss.loss_func": "rmse"}, 'loss.loss_func = "rmse"', ["Did you mean mse?", "Known: mse, mae"]),
    ({"model.descriptor.activation_function": "tahn"}, "model.descriptor.activation_function", ["Did you mean tanh?"]),
    ({"model.descriptor.precision": "single"}, "model.descriptor.precision", ["Known: default, float64, float32"]),
    ({"validating.validation_metric": "E:ME"}, 'validating.validation_metric = "E:ME"', ["E:MAE"]),
    # the same option twice
    ({"training.stop_batch": 5}, "training.stop_batch", ["the same option as numb_steps"]),
    # what DeePMD-kit has and we do not
    ({"model.descriptor.type": "loc_frame"}, 'model.descriptor.type = "loc_frame"', [NOT_YET, "se_e2_a"]),
    ({"model.fitting_net.type": "dos"}, 'model.fitting_net.type = "dos"', [NOT_YET, "ener"]),
    ({"model.type": "frozen"}, 'model.type = "frozen"', [NOT_YET]),
    ({"optimizer": {"type": "HybridMuon", "muon_mode": "3d"}}, "optimizer.muon_mode", ["slice, flat, 2d"]),
    ({"optimizer": {"type": "LKF", "kf_start_pref_f": 0}}, "optimizer.kf_start_pref_f = 0", ["> 0"]),
    ({"loss.type": "tensor"}, 'loss.type = "tensor"', [NOT_YET]),
    ({"loss.start_pref_gf": 1}, "loss.start_pref_gf = 1", [NOT_YET]),
    ({"loss.enable_atom_ener_coeff": True}, "loss.enable_atom_ener_coeff", [NOT_YET]),
    ({"training.enable_compile": "yes"}, 'training.enable_compile = "yes"', ["true or false", "Write true"]),
    (
        {"training.enable_compile": "auto"},
        'training.enable_compile = "auto"',
        ["was removed", "Use true for long"],
    ),
    ({"training.compile_options": {"mode": "fast"}}, 'training.compile_options.mode = "fast"', ["reduce-overhead"]),
    ({"training.enable_tf32": "high"}, 'training.enable_tf32 = "high"', ["true or false"]),
    ({"training.acc_freq": 2}, "training.acc_freq = 2", [NOT_YET]),
    ({"training.acc_freq": True}, "training.acc_freq = true", [NOT_YET]),
    ({"training.profiling": True}, "training.profiling = true", [NOT_YET]),
    ({"training.enable_profiler": True}, "training.enable_profiler = true", [NOT_YET]),
    (
        {"model.spin": {"use_spin": [True]}},
        "model.spin",
        [NOT_YET, "Models of magnetic spins are not", "another model"],
    ),
    ({"model.modifier": {"type": "dipole_charge"}}, "model.modifier", [NOT_YET]),
    ({"model.fitting_net.use_aparam_as_mask": True}, "model.fitting_net.use_aparam_as_mask = true", [NOT_YET]),
    ({"model.descriptor.precision": "bfloat16"}, "model.descriptor.precision", [NOT_YET, "float32"]),
    ({"model.fitting_net.activation_function": "custom_silu:2"}, "model.fitting_net.activation", [NOT_YET, "tanh"]),
    (
        {"model.descriptor": {"type": "hybrid", "list": [{"type": "se_e2_a", "precision": "float16"}]}},
        'model.descriptor.list[0].precision = "float16"',
        [NOT_YET],
    ),
    ({"nvnmd": {"version": 0}}, "nvnmd", [NOT_YET]),
    ({"model.lora": {"rank": 4}}, 'model.lora = {"rank": 4}', [NOT_YET, "start from a checkpoint by --finetune"]),
    (
        {"model.use_compile": True, "training.enable_compile": False},
        "model.use_compile = true: training.enable_compile = false, and a run has one of them.",
        ["Give both the same value, or remove one."],
    ),
    ({"validating.early_stop": {"patience": 0}}, "validating.early_stop.patience = 0", ["> 0"]),
    ({"validating.early_stop": {"patience": 2, "metric": "F"}}, 'validating.early_stop.metric = "F"', ["E:MAE"]),
    ({"validating.validation_metric": "FM:MAE"}, "validating.validation_metric", [NOT_YET]),
]


@pytest.mark.parametrize(("changes", "place", "phrases"), BAD, ids=lambda v: v if isinstance(v, str) else None)
def test_a_mistake_gets_one_message_with_its_place(changes, place, phrases):
    found = problems_of(spoiled(changes))
    assert len(found) == 1, found
    assert found[0].startswith(f"input.json: {place}"), found[0]
    for phrase in phrases:
        assert phrase in found[0]


# what does not fit together in the section `model` -> changes, where the message is, what it says
BROKEN_MODELS = {
    "elements_stand_once": ({"model.type_map": ["H", "H"]}, "model.type_map", "H occurs more than once"),
    "smoothing_begins_inside_cutoff": (
        {"model.descriptor.rcut_smth": 6},
        "model.descriptor.rcut_smth = 6",
        "less than rcut = 6 (angstrom)",
    ),
    "axis_fits_embedding": (
        {"model.descriptor.axis_neuron": 41},
        "model.descriptor.axis_neuron = 41",
        "at most 40, the last number of neuron",
    ),
    "one_sel_per_element": ({"model.descriptor.sel": [46]}, "model.descriptor.sel = [46]", "length 1, expected 2"),
    "one_atom_ener_per_element": (
        {"model.fitting_net.atom_ener": [1.0]},
        "model.fitting_net.atom_ener = [1.0]",
        "length 1, expected 2",
    ),
    "one_preset_bias_per_element": (
        {"model.preset_out_bias": {"energy": [1.0]}},
        "model.preset_out_bias = [1.0]",
        "length 1, expected 2",
    ),
    "excluded_pairs_exist": (
        {"model.pair_exclude_types": [[0, 2]]},
        "model.pair_exclude_types",
        "type 2 does not exist",
    ),
    "descriptor_excluded_pairs_exist": (
        {"model.descriptor.exclude_types": [[0, 2]]},
        "model.descriptor.exclude_types",
        "expected 0 to 1",
    ),
    "excluded_types_exist": ({"model.atom_exclude_types": [5]}, "model.atom_exclude_types", "type 5 does not exist"),
    "default_fparam_has_all_parameters": (
        {"model.fitting_net.default_fparam": [1.0]},
        "model.fitting_net.default_fparam",
        "expected numb_fparam = 0",
    ),
    "trainable_names_all_layers": (
        {"model.fitting_net.trainable": [True]},
        "model.fitting_net.trainable",
        "length 1, expected 3",
    ),
    "every_type_is_excluded": (
        {"model.atom_exclude_types": [0, 1]},
        "model.atom_exclude_types = [0, 1]",
        "every type is excluded",
    ),
    "a_preset_bias_is_a_number": (
        {"model.preset_out_bias": {"energy": [1.0, "x"]}},
        "model.preset_out_bias",
        'energy has "x": expected a number, or null',
    ),
}


@pytest.mark.parametrize(("changes", "place", "phrase"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_what_does_not_fit_together_in_a_model_is_reported(changes, place, phrase):
    (found,) = problems_of(spoiled(changes))
    assert found.startswith(f"input.json: {place}")
    assert phrase in found


# name of a rule -> changes that break it, where the message is, what it says
BROKEN_RULES = {
    "model_fits_together": ({"model.type_map": ["H", "H"]}, "model.type_map", "H occurs more than once"),
    "descriptor_fits_together": (
        {"model.descriptor.axis_neuron": 41},
        "model.descriptor.axis_neuron = 41",
        "at most 40",
    ),
    "fitting_net_fits_together": (
        {"model.fitting_net.atom_ener": [1.0]},
        "model.fitting_net.atom_ener = [1.0]",
        "length 1, expected 2",
    ),
    "one_end_of_learning_rate": (
        {"learning_rate.stop_lr_ratio": 0.1},
        "learning_rate.stop_lr_ratio = 0.1",
        "stop_lr is given too",
    ),
    "learning_rate_goes_down": (
        {"learning_rate.stop_lr": 1.0},
        "learning_rate.stop_lr = 1",
        "at most start_lr = 0.001",
    ),
    "inverse_decay_ends_above_zero": (
        {"learning_rate.type": "wsd", "learning_rate.stop_lr": 0},
        "learning_rate.stop_lr = 0",
        "inverse_linear",
    ),
    "one_length_of_warmup": (
        {"learning_rate.warmup_steps": 10, "learning_rate.warmup_ratio": 0.1},
        "learning_rate.warmup_ratio",
        "Remove one",
    ),
    "warmup_ends_in_the_run": (
        {"learning_rate.warmup_steps": 2000},
        "learning_rate.warmup_steps = 2000",
        "less than training.numb_steps = 2000",
    ),
    "force_norm_needs_mae_or_huber": ({"loss.f_use_norm": True}, "loss.f_use_norm = true", '"loss_func": "mae"'),
    "huber_has_no_weighted_forces": (
        {"loss.use_huber": True, "loss.relative_f": 1.0},
        "loss.relative_f = 1",
        "not possible with use_huber",
    ),
    "huber_has_no_weighted_forces_of_atoms": (
        {"loss.use_huber": True, "loss.limit_pref_pf": 1.0},
        "loss.start_pref_pf = 0",
        "not possible with use_huber",
    ),
    "huber_has_no_hessian_at_the_end": (
        {"loss.use_huber": True, "loss.limit_pref_h": 1.0},
        "loss.limit_pref_h = 1",
        "not possible with use_huber",
    ),
    "huber_has_no_hessian": (
        {"loss.use_huber": True, "loss.start_pref_h": 5},
        "loss.start_pref_h = 5",
        "not possible with use_huber",
    ),
    "hessian_needs_whole_parameters": (
        {"training.zero_stage": 2, "loss.start_pref_h": 5},
        "training.zero_stage = 2",
        "second derivatives need all parameters on every rank. Use 0 or 1, or remove loss.start_pref_h",
    ),
    "lkf_shares_nothing_out": (
        {"optimizer": {"type": "LKF"}, "training.zero_stage": 2},
        "training.zero_stage = 2",
        "LKF trains in one process only. Use 0, or choose Adam, AdamW, AdaMuon or HybridMuon.",
    ),
    "lkf_does_not_clip": (
        {"optimizer": {"type": "LKF"}, "training.gradient_max_norm": 5},
        "training.gradient_max_norm = 5",
        "not possible with optimizer.type LKF",
    ),
    "lkf_takes_one_batch": (
        {"optimizer": {"type": "LKF"}, "training.accumulate": 4},
        "training.accumulate = 4",
        "LKF updates weights with each batch. Use 1, or another optimizer.",
    ),
    "graphs_of_the_compiler_do_not_accumulate": (
        {
            "training.accumulate": 2,
            "training.enable_compile": True,
            "training.compile_options": {"mode": "reduce-overhead"},
        },
        "training.accumulate = 2",
        "not possible with CUDA graphs of torch.compile",
    ),
    "lkf_fits_energies_and_forces": (
        {"optimizer": {"type": "LKF"}, "loss.limit_pref_v": 0.5},
        "loss.limit_pref_v = 0.5",
        "LKF fits energies and forces only. Set it to 0.",
    ),
    "something_is_minimized": (
        {f"loss.{when}_pref_{t}": 0 for when in ("start", "limit") for t in "ef"},
        "loss",
        "every weight is 0",
    ),
    "one_length_of_run": ({"training.numb_epoch": 2}, "training.numb_epoch = 2", "numb_steps = 2000 is given too"),
    "validation_frames_have_one_origin": (
        {"training.validation_fraction": 0.1},
        "training.validation_fraction = 0.1",
        "validation_data is given too",
    ),
    "reading_statistics_needs_a_file": (
        {"training.stat_file_mode": "read"},
        "training.stat_file_mode",
        "needs stat_file beside it",
    ),
    "full_validation_needs_data": (
        {"training.validation_data": REMOVE, "validating.full_validation": True},
        "validating.full_validation = true",
        "needs training.validation_data",
    ),
    "files_have_names_of_their_own": (
        {"validating.full_validation": True, "validating.full_val_file": "./lcurve.out"},
        "validating.full_val_file: ",
        "validation of live would be written to lcurve.out, as the learning curve of live is. Choose another name.",
    ),
    "early_stop_watches_validated_weights": (
        {"validating.full_validation": True, "validating.early_stop": {"patience": 3, "weights": "ema"}},
        'validating.early_stop.weights = "ema"',
        "no full validation. With it: live.",
    ),
    "metric_is_trained": (
        {"validating.full_validation": True, "validating.validation_metric": "S:RMSE", "loss.start_pref_v": 1},
        'validating.validation_metric = "S:RMSE"',
        "must both be > 0",
    ),
}


def test_validation_of_the_short_form_needs_the_short_form():
    (found,) = problems_of(spoiled({"validating.ema_full_validation": True, "validating.full_val_start": 1.0}))
    assert found.startswith('input.json: validating.ema_full_validation = true: needs "enable_ema": true')


@pytest.mark.parametrize(("changes", "place", "phrase"), BROKEN_RULES.values(), ids=BROKEN_RULES)
def test_a_broken_rule_has_a_message(changes, place, phrase):
    (found,) = problems_of(spoiled(changes))
    assert found.startswith(f"input.json: {place}"), found
    assert phrase in found


def test_checkpoints_may_not_take_the_name_of_the_link_to_the_best_one():
    (found,) = problems_of(spoiled({"validating.full_validation": True, "training.save_ckpt": "best.ckpt"}))
    assert found == (
        "input.json: validating.save_best_dir: the link to the best weights of live would be written to best.ckpt.pt, "
        "as the link to the newest weights of live is. Choose another name."
    )


@pytest.mark.parametrize("given", [{"compute_prec": "float16", "output_prec": "float32"}, {}])
def test_mixed_precision_is_accepted_with_one_line(given):
    config = config_from_dict(spoiled({"training.mixed_precision": given}))
    (line,) = [text for text in ignored_options(config) if text.startswith("training.mixed_precision")]
    assert line.endswith(": no effect, the precision is that of descriptor and fitting_net")
    (found,) = problems_of(spoiled({"training.mixed_precision": {"compute": "float16"}}))
    assert "training.mixed_precision.compute: unknown key" in found


def test_a_run_without_a_length_is_refused():
    (found,) = problems_of(spoiled({"training.numb_steps": REMOVE}))
    assert found == ('input.json: training: numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.')


def test_all_mistakes_come_at_once_with_lines_in_the_order_of_the_file(tmp_path):
    text = """{
  "model": {
    "type_map": ["O", "H"],
    "descriptor": {"type": "se_e2_a", "sel": [46, 92],
      "rcutt": 6.0,
      "rcut_smth": "0.5"
    },
    "fitting_net": {}
  },
  "learning_rate": {"start_lr": 0.001},
  "training": {
    "training_data": {"systems": "data"},
    "numb_steps": 1000.0,
    "zero_stage": 4
  },
  "validating": {"ema_full_validation": true}
}
"""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    places = [p.removeprefix(f"{path}:").split(" ")[:2] for p in caught.value.problems]
    assert places == [
        ["5:", "model.descriptor.rcutt:"],
        ["6:", "model.descriptor.rcut_smth"],
        ["13:", "training.numb_steps"],
        ["14:", "training.zero_stage"],
        ["16:", "validating.ema_full_validation"],
        ["16:", "validating.ema_full_validation"],
    ]


def test_a_missing_key_is_placed_on_the_line_of_its_section(tmp_path):
    path = write(tmp_path, spoiled({"model.type_map": REMOVE}))
    with pytest.raises(ConfigError, match=r"input\.json:2: model\.type_map: required, but missing"):
        load_config(path)


def test_a_mistake_in_an_alias_is_named_as_it_is_spelled(tmp_path):
    path = write(tmp_path, spoiled({"training.numb_steps": REMOVE, "training.stop_batch": -1}))
    with pytest.raises(ConfigError, match=r"training\.stop_batch = -1: expected a whole number >= 0"):
        load_config(path)
    changes = {"training.numb_steps": REMOVE, "training.stop_batch": 5, "learning_rate.warmup_steps": 9}
    assert "training.numb_steps = 5" in problems_of(spoiled(changes))[0]


def test_a_rule_is_silent_about_a_value_that_is_wrong_in_itself():
    (found,) = problems_of(spoiled({"model.descriptor.rcut": "six", "model.descriptor.rcut_smth": 0.5}))
    assert "model.descriptor.rcut = " in found


def test_a_model_section_alone_is_checked_with_its_rules():
    assert model_config_from_dict(GOOD["model"]).type_map == ["O", "H"]
    with pytest.raises(ConfigError, match=r"model\.descriptor\.sel.*length 1, expected 2"):
        model_config_from_dict(spoiled({"model.descriptor.sel": [3]})["model"], "frozen.dp")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("loss_func", "mae", '"mse"'), ("use_huber", True, "false"), ("relative_f", 0.1, "null")],
)
def test_errors_that_the_kalman_filter_does_not_know_are_refused(name, value, shown):
    (found,) = problems_of(spoiled({"optimizer": {"type": "LKF"}, f"loss.{name}": value}))
    assert f"loss.{name} = " in found
    assert f"LKF does not know it. Set it to {shown}." in found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharing_out_in_a_process_that_no_launcher_started_is_stage_0_with_a_note(stage):
    """`dp-ema check` called such an input good, and `dp-ema train` refused it."""
    config = config_from_dict(spoiled({"training.zero_stage": stage}))
    alone = as_launched(config, launched=False)
    assert alone.training.zero_stage == 0
    (note,) = alone.notes
    assert note == (
        f"training.zero_stage = {stage}: no launcher has started this process, which trains with 0. "
        "Launch with: export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 dp-ema train '<dict>'"
    )
    assert as_launched(config, launched=True) == config


def test_the_kalman_filter_on_several_processes_is_refused_at_the_start():
    config = config_from_dict(spoiled({"optimizer": {"type": "LKF"}}))
    with pytest.raises(
        ConfigError, match=r'^<dict>: optimizer.type = "LKF": .* one process only, and 2 were launched\.'
    ):
        as_launched(config, launched=True, num_ranks=2)
    assert as_launched(config, launched=True, num_ranks=1) == config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_processes_started_by_torchrun_may_train_at_every_stage(stage, size):
    config = config_from_dict(spoiled({"training.zero_stage": stage}))
    assert as_launched(config, launched=True, num_ranks=size) == config


# text of a file -> what its one message holds
BROKEN_JSON = [
    ("", ["the file is empty"]),
    ("   \n", ["the file is empty"]),
    ("[1, 2]", [":1: expected an object", "found a list"]),
    ("3", ["expected an object", "found a number"]),
    ('{"a": 1,\n}', ["not JSON", "a comma before the closing bracket"]),
    ('{"a": [1, 2,]}', ["a comma before the closing bracket"]),
    ('{\n  "a": 1 // one\n}', [":2:", "JSON has no comments"]),
    ('{\n  # one\n  "a": 1\n}', [":2:3: not JSON", "JSON has no comments"]),
    ("{'a': 1}", [":1:2", "texts stand in double quotes"]),
    ("{\"a\": 'x'}", ["texts stand in double quotes"]),
    ('{"a": True}', ["write true, false and null in lower case"]),
    ('{"a": .5}', ["a number begins with a digit"]),
    ('{\n"a": NaN}', [":2: NaN is no JSON number"]),
    ('{\n"a": -Infinity}', [":2: -Infinity is no JSON number"]),
    ('{"a": 1', ["the text ends too early"]),
    ('{"a": 1\n "b": 2}', [":2:2", "a comma or a closing bracket is missing"]),
    ('{"a" 1}', ["a colon is missing"]),
    ("{a: 1}", ["a key in double quotes"]),
    ('{"a": 1}}', ["something follows after the end"]),
    ('{"a": "x\ny"}', ["a text is not closed on its line"]),
    ('{"a": "C:\\data"}', ["a backslash in a text is written twice"]),
    ('{"a": 1,,"b": 2}', ["a comma too many"]),
    ('{"a": 1,\n"b": {"c": 1, "c": 2},\n"a": 2}', [":2: b.c: given twice, first on line 2", ":3: a: given twice"]),
    ("[" * 100000, ["nested too deeply"]),
    ('{"a":' * 600 + "1" + "}" * 600, ["nested too deeply"]),
    ('{"a": ' + "1" * 5000 + "}", ["digits"]),
]


@pytest.mark.parametrize(("text", "phrases"), BROKEN_JSON)
def test_a_text_that_is_no_json_says_where_and_why(tmp_path, text, phrases):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    for phrase in phrases:
        assert phrase in message


BROKEN_YAML = [
    ("", ["the file is empty"]),
    ("# only a comment\n", ["expected an object", "found nothing"]),
    ("- a\n- b\n", ["expected an object", "found a list"]),
    ("model:\n\ttype_map: [O]\n", [":2: not YAML: a tab. Indent with spaces only."]),
    ("model: {a: 1\n", ["not YAML"]),
    ("model: a: b\n", [":1:9: not YAML: a colon where none can be"]),
    ("a: 1\nb:\n  c: 1\n  c: 2\n", [":4: b.c: given twice, first on line 3"]),
    ("a: &x\n  b: *x\n", ["an anchor that contains itself"]),
    ("a: !!python/object:os.system x\n", ["not YAML", "could not determine a constructor"]),
    ("a: !!bool x\n", ["not YAML", "a tag"]),
    ("a: !!timestamp x\n", ["not YAML", "a tag"]),
    ("a: !!int x\n", ["not YAML", "a tag"]),
    ("a: \x07\n", ["not YAML", "special characters"]),
    ("a: " + "[" * 200 + "]" * 200, ["nested too deeply"]),
    (
        "\n".join(["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]),
        ["anchors that expand to more than 100,000 values"],
    ),
    ("a: *nowhere\n", ["not YAML", "found undefined alias"]),
]


@pytest.mark.parametrize(("text", "phrases"), BROKEN_YAML)
def test_a_text_that_is_no_yaml_says_where_and_why(tmp_path, text, phrases):
    path = write(tmp_path, text, "input.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    for phrase in phrases:
        assert phrase in message


def test_yaml_mistakes_carry_their_lines(tmp_path):
    text = "learning_rate:\n  start_lr: 1e-3\nmodel:\n  type_map: [O]\n  descriptor: {type: se_e2_a}\n"
    text += "  fitting_net: {}\ntraining:\n  training_data:\n    systems: data\n  numb_steps: 1e3\n  2: 3\n"
    path = write(tmp_path, text, "input.yml")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [p.removeprefix(f"{path}") for p in caught.value.problems] == [
        ":10: training.numb_steps = 1000.0: expected a whole number >= 0. "
        "1000.0 is a number with a fraction part; write 1000.",
        ":11: training.2: a key must be a text. Put it in quotes.",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"inputt\.json: no such file\. There is: input\.json\."):
        load_config(tmp_path / "inputt.json")
    with pytest.raises(ConfigError, match=r"is a folder, expected a \.json, \.yaml or \.yml file"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"input\.toml: expected a file that ends in \.json, \.yaml or \.yml"):
        load_config(write(tmp_path, "a = 1", "input.toml"))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\x80\x04\x95")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(binary)


def test_json_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "input.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert load_config(path) == config_from_dict(GOOD)


@dataclass(frozen=True, kw_only=True)
class OtherFitting(EnerFittingConfig):
    """Another network."""

    type: ClassVar[str] = "other"


OTHER = Family(OtherFitting, "no_package:Other")


def test_an_unknown_fitting_is_answered_with_those_of_the_registry(monkeypatch):
    monkeypatch.setitem(FITTINGS.own, "other", f"{__name__}:OTHER")
    with pytest.raises(ConfigError, match=r'model\.fitting_net\.type = "othr": unknown\. Did you mean other\?'):
        config_from_dict(spoiled({"model.fitting_net": {"type": "othr"}}))
    assert isinstance(
        config_from_dict(spoiled({"model.fitting_net": {"type": "other"}})).model.fitting_net, OtherFitting
    )


def test_an_option_given_twice_is_reported_where_the_second_is(tmp_path):
    values = spoiled({"training.numb_steps": REMOVE})
    values["training"] |= {"stop_batch": 3, "numb_steps": 5, "num_steps": 7}
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, values))
    place = f"{tmp_path / 'input.json'}"
    text = (tmp_path / "input.json").read_text().splitlines()
    lines = [next(n for n, line in enumerate(text, 1) if f'"{key}"' in line) for key in ("numb_steps", "num_steps")]
    assert caught.value.problems == [
        f"{place}:{lines[0]}: training.numb_steps: the same option as stop_batch. Remove one of the two.",
        f"{place}:{lines[1]}: training.num_steps: the same option as stop_batch. Remove one of the two.",
    ]
    with pytest.raises(ConfigError, match=r"n_neuron: the same option as neuron\."):
        model_config_from_dict({**GOOD["model"], "fitting_net": {"neuron": [4], "n_neuron": [5]}})
