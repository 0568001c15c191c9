"""Mistakes of an input get one message each, with place, what was found, what is expected and what
to do.
"""

import json
import re
import time
from dataclasses import fields

import pytest
from config_inputs import (
    GOOD,
    REMOVE,
    assert_refused,
    assert_refused_by_dargs,
    problems_of,
    spoiled,
    write,
)

from deepmd_ema.config import (
    as_launched,
    config_from_dict,
    ignored_options,
    load_config,
    model_config_from_dict,
)
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.errors import ConfigError

# changes to a good input -> its only message after the name of the file; " ... " is any text
WRONG = [
    ({"modle": {}}, "modle ... unknown key ... Did you mean model?"),
    (
        {"model.descriptor.rcut_smooth": 1},
        "model.descriptor.rcut_smooth ... unknown key ... rcut_smth",
    ),
    (
        {"training.zzz": 1},
        "training.zzz ... unknown key. Known: training_data, ... numb_steps, stop_batch",
    ),
    (
        {"training.start_lr": 1.0},
        "training.start_lr ... It belongs to learning_rate.start_lr",
    ),
    (
        {"learning_rate.type": "cosine", "learning_rate.decay_steps": 5},
        "learning_rate.decay_steps ... type exp",
    ),
    (
        {"training.solve_last_layer": True},
        "training.solve_last_layer = true ... was removed, since virials got worse ... Remove it; "
        "an average",
    ),
    (
        {"validating.physics": {}},
        "validating.physics = {} ... was removed. Remove it, and run `dp-ema test",
    ),
    (
        {"validating.early_stop": {"metric": "P:LIMITS", "patience": 2}},
        'validating.early_stop.metric = "P:LIMITS" ... was removed. Use F:RMSE or another error',
    ),
    (
        {"model": REMOVE},
        "model ... required, but missing ... the model that is trained",
    ),
    (
        {"model.type_map": REMOVE},
        'model.type_map ... required, but missing ... ["O", "H"]',
    ),
    (
        {"model.type_map": REMOVE, "model.typemap": ["O"]},
        "model.typemap ... Did you mean type_map, which is required",
    ),
    (
        {"model.descriptor.rcut": 1000000000.0},
        "model.descriptor.rcut = 1000000000.0 ... a number > 0 and at most 100",
    ),
    (
        {"training.numb_steps": 1000.0},
        "training.numb_steps = 1000.0 ... a number with a fraction part; write 1000",
    ),
    (
        {"training.numb_steps": True},
        "training.numb_steps = true ... a whole number >= 0",
    ),
    (
        {"training.enable_ema": "true"},
        'training.enable_ema = "true" ... true or false. Write true, without quotes',
    ),
    ({"training.enable_ema": 1}, "training.enable_ema = 1 ... Write true."),
    (
        {"training.disp_file": None},
        "training.disp_file = null ... Remove the key to get the default",
    ),
    (
        {"learning_rate.start_lr": "0.001"},
        'learning_rate.start_lr = "0.001" ... Write the number without quotes',
    ),
    (
        {"model.descriptor.neuron": 20},
        "model.descriptor.neuron = 20 ... list ... Write [20]",
    ),
    ({"model.descriptor.neuron": []}, "model.descriptor.neuron = [] ... at least one"),
    (
        {"training.training_data": "data"},
        'training.training_data = "data" ... expected a section {...}',
    ),
    (
        {"training.training_data.systems": []},
        "training.training_data.systems = [] ... a folder or a list",
    ),
    ({"training.ema_decay": 1.0}, "training.ema_decay = 1.0 ... >= 0 and < 1"),
    ({"training.zero_stage": 4}, "training.zero_stage = 4 ... expected 0, 1, 2 or 3"),
    (
        {"training.ckpt_keep_ratio": 1.0},
        "training.ckpt_keep_ratio = 1.0 ... > 0 and < 1",
    ),
    ({"training.seed": 10**18}, "training.seed = 1000 ... at most 18 digits"),
    ({"training.save_ckpt": "out/"}, 'training.save_ckpt = "out/" ... name of a file'),
    (
        {"learning_rate.stop_lr_ratio": 2.0, "learning_rate.stop_lr": REMOVE},
        "learning_rate.stop_lr_ratio ... <= 1",
    ),
    (
        {"model.descriptor.sel": "auto:0.5"},
        'model.descriptor.sel = "auto:0.5" ... "auto:1.2"',
    ),
    (
        {"training.training_data.batch_size": "auto:²"},
        'training.training_data.batch_size = "auto:²": expected',
    ),
    (
        {"training.training_data.batch_size": "mix:0"},
        'training.training_data.batch_size = "mix:0": expected',
    ),
    (
        {"training.training_data.auto_prob": "prob_sys_size;0:1:0"},
        "training.training_data.auto_prob ... begin:end",
    ),
    (
        {"model.descriptor.activation_function": "tanj"},
        "model.descriptor.activation_function ... Did you mean tanh?",
    ),
    (
        {"training.training_data.auto_prob": "prob_size"},
        "training.training_data.auto_prob ... prob_sys_size",
    ),
    (
        {"training.training_data.sys_probs": [0.9, 0.9]},
        "training.training_data.sys_probs ... add up to 1",
    ),
    ({"loss.huber_delta": [0.1, 0.1]}, "loss.huber_delta ... three of them"),
    (
        {"optimizer": {"type": "Adma"}},
        'optimizer.type = "Adma" ... unknown ... Did you mean Adam? ... AdamW, AdamWScheduleFree, '
        "AdaMuon",
    ),
    (
        {"loss.loss_func": "rmse"},
        'loss.loss_func = "rmse" ... Did you mean mse? ... Known: mse, mae',
    ),
    (
        {"training.stop_batch": 5},
        "training.stop_batch ... the same option as numb_steps",
    ),
    (
        {"model.descriptor.type": "loc_frame"},
        'model.descriptor.type = "loc_frame" ... not available in dp-ema ... se_e2_a',
    ),
    (
        {"optimizer": {"type": "HybridMuon", "muon_mode": "3d"}},
        "optimizer.muon_mode ... slice, flat, 2d",
    ),
    (
        {"training.enable_compile": "auto"},
        'training.enable_compile = "auto" ... was removed ... Use true for long',
    ),
    (
        {"training.compile_options": {"mode": "fast"}},
        'training.compile_options.mode = "fast" ... reduce-overhead',
    ),
    (
        {"model.spin": {"use_spin": [True]}},
        "model.spin ... not available in dp-ema ... Models of magnetic spins are not ... another "
        "model",
    ),
    (
        {"model.descriptor.precision": "bfloat16"},
        "model.descriptor.precision ... not available in dp-ema ... float32",
    ),
    ({"nvnmd": {"version": 0}}, "nvnmd ... not available in dp-ema"),
    (
        {"model.lora": {"rank": 4}},
        'model.lora = {"rank": 4} ... not available in dp-ema ... start from a checkpoint by '
        "--finetune",
    ),
    (
        {"model.use_compile": True, "training.enable_compile": False},
        "model.use_compile = true: training.enable_compile = false, ... Give both the same value, "
        "or remove one.",
    ),
    (
        {"validating.validation_metric": "FM:MAE"},
        "validating.validation_metric ... not available in dp-ema",
    ),
    (
        {"training.averaging": {"name": "slow", "decay": 0.99}},
        "training.averaging = { ... Put [ ] around the section.",
    ),
    (
        {"training.loggers": [{"type": "wandbb"}]},
        'training.loggers[0].type = "wandbb": unknown. Did you mean wandb? Known: tensorboard,',
    ),
    (
        {"training.loggers": [{"type": "wandb", "projekt": "a"}]},
        "training.loggers[0].projekt: unknown key ... project",
    ),
    (
        {"training.loggers": [{"project": "a"}]},
        "training.loggers[0].type: required, but missing ... wandb",
    ),
    (
        {"training.averaging": "ema"},
        'training.averaging = "ema": expected a list of sections [{...}, {...}].',
    ),
    (
        {"training.save_ckpt": "a\0b"},
        "training.save_ckpt = ... expected a text without the characters",
    ),
    (
        {"model.descriptor.sel": [10**12, 40]},
        "model.descriptor.sel = ... with one whole number per element of",
    ),
]
# what does not fit together
BROKEN = [
    ({"model.type_map": ["H", "H"]}, "model.type_map ... H occurs more than once"),
    (
        {"model.descriptor.rcut_smth": 6},
        "model.descriptor.rcut_smth = 6 ... less than rcut = 6 (angstrom)",
    ),
    (
        {"model.descriptor.axis_neuron": 41},
        "model.descriptor.axis_neuron = 41 ... at most 40, the last number of neuron",
    ),
    (
        {"model.descriptor.sel": [46]},
        "model.descriptor.sel = [46] ... length 1, expected 2",
    ),
    (
        {"model.preset_out_bias": {"energy": [1.0]}},
        "model.preset_out_bias = [1.0] ... length 1, expected 2",
    ),
    (
        {"model.pair_exclude_types": [[0, 2]]},
        "model.pair_exclude_types ... type 2 does not exist",
    ),
    (
        {"model.descriptor.exclude_types": [[0, 2]]},
        "model.descriptor.exclude_types ... expected 0 to 1",
    ),
    (
        {"model.fitting_net.default_fparam": [1.0]},
        "model.fitting_net.default_fparam ... expected numb_fparam = 0",
    ),
    (
        {"model.fitting_net.trainable": [True]},
        "model.fitting_net.trainable ... length 1, expected 3",
    ),
    (
        {"model.atom_exclude_types": [0, 1]},
        "model.atom_exclude_types = [0, 1] ... every type is excluded",
    ),
    (
        {"model.preset_out_bias": {"energy": [1.0, "x"]}},
        'model.preset_out_bias ... energy has "x": expected a number, or null',
    ),
    (
        {"learning_rate.stop_lr_ratio": 0.1},
        "learning_rate.stop_lr_ratio = 0.1 ... stop_lr is given too",
    ),
    (
        {"learning_rate.stop_lr": 1.0},
        "learning_rate.stop_lr = 1 ... at most start_lr = 0.001",
    ),
    (
        {"learning_rate.type": "wsd", "learning_rate.stop_lr": 0},
        "learning_rate.stop_lr = 0 ... inverse_linear",
    ),
    (
        {"learning_rate.warmup_steps": 10, "learning_rate.warmup_ratio": 0.1},
        "learning_rate.warmup_ratio ... Remove one",
    ),
    (
        {"learning_rate.warmup_steps": 2000},
        "learning_rate.warmup_steps = 2000 ... less than training.numb_steps = 2000",
    ),
    ({"loss.f_use_norm": True}, 'loss.f_use_norm = true ... "loss_func": "mae"'),
    (
        {"loss.use_huber": True, "loss.relative_f": 1.0},
        "loss.relative_f = 1 ... not possible with use_huber",
    ),
    (
        {"training.zero_stage": 2, "loss.start_pref_h": 5},
        "training.zero_stage = 2 ... second derivatives need all parameters on every rank. Use 0 "
        "or 1, or remove",
    ),
    (
        {"optimizer": {"type": "LKF"}, "training.zero_stage": 2},
        "training.zero_stage = 2 ... LKF trains in one process only. Use 0, or another optimizer.",
    ),
    (
        {"optimizer": {"type": "LKF"}, "training.gradient_max_norm": 5},
        "training.gradient_max_norm = 5 ... not possible with optimizer.type LKF",
    ),
    (
        {"optimizer": {"type": "LKF"}, "training.accumulate": 4},
        "training.accumulate = 4 ... LKF updates weights with each batch. Use 1, or another "
        "optimizer.",
    ),
    (
        {
            "training.accumulate": 2,
            "training.enable_compile": True,
            "training.compile_options": {"mode": "reduce-overhead"},
        },
        "training.accumulate = 2 ... not possible with CUDA graphs of torch.compile",
    ),
    (
        {"optimizer": {"type": "LKF"}, "training.training_data.frame_weights": True},
        "training.training_data.frame_weights = true: LKF does not weigh frames. Set it to false",
    ),
    *(
        (
            {"optimizer": {"type": "LKF"}, f"loss.{field.name}": 0.5},
            f"loss.{field.name} = 0.5 ... LKF fits energies and forces only. Set it to 0.",
        )
        for field in fields(EnerLossConfig)
        if "_pref_" in field.name and field.name[-2:] not in ("_e", "_f")
    ),
    (
        {
            "loss.start_pref_e": 0,
            "loss.start_pref_f": 0,
            "loss.limit_pref_e": 0,
            "loss.limit_pref_f": 0,
        },
        "loss ... every weight is 0",
    ),
    (
        {"training.numb_epoch": 2},
        "training.numb_epoch = 2 ... numb_steps = 2000 is given too",
    ),
    (
        {"training.validation_fraction": 0.1},
        "training.validation_fraction = 0.1 ... validation_data is given too",
    ),
    (
        {"training.stat_file_mode": "read"},
        "training.stat_file_mode ... needs stat_file beside it",
    ),
    (
        {"training.validation_data": REMOVE, "validating.full_validation": True},
        "validating.full_validation = true ... needs training.validation_data",
    ),
    (
        {
            "validating.full_validation": True,
            "validating.full_val_file": "./lcurve.out",
        },
        "validating.full_val_file: validation of live would be written to lcurve.out, as the "
        "learning curve of live is. ",
    ),
    (
        {"validating.ema_full_validation": True, "validating.full_val_start": 1.0},
        'validating.ema_full_validation = true: needs "enable_ema": true',
    ),
    (
        {
            "validating.full_validation": True,
            "validating.early_stop": {"patience": 3, "weights": "ema"},
        },
        'validating.early_stop.weights = "ema" ... no full validation. With it: live.',
    ),
    (
        {
            "validating.full_validation": True,
            "validating.validation_metric": "S:RMSE",
            "loss.start_pref_v": 1,
        },
        'validating.validation_metric = "S:RMSE" ... must both be > 0',
    ),
    (
        {"optimizer": {"type": "LKF"}, "loss.loss_func": "mae"},
        'loss.loss_func = ... LKF does not know it. Set it to "mse".',
    ),
    (
        {"validating.full_validation": True, "training.save_ckpt": "best.ckpt"},
        "validating.save_best_dir: the link to the best weights of live would be written to "
        "best.ckpt.pt, as the link to the",
    ),
    (
        {"training.numb_steps": REMOVE},
        'training: numb_steps or numb_epoch is required. Add one, e.g. "numb_steps": 100000.',
    ),
    (
        {"model.descriptor.rcut": "six", "model.descriptor.rcut_smth": 0.5},
        "model.descriptor.rcut = ",
    ),
    (
        {"training.warmup_steps": 3, "learning_rate.warmup_steps": 4},
        "training.warmup_steps: the old place of learning_rate.warmup_steps",
    ),
    (
        {"validating.test_data_dict": {"c": {"systems": ["x"]}}},
        "validating.test_data_dict: this is an input of one task. There it is",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=[text for _, text in WRONG])
def test_a_mistake_gets_one_message_with_its_place(changes, text):
    assert_refused(spoiled(changes), text)
    if not {"training.stop_batch", "model.use_compile"} & set(
        changes
    ):  # an option at two places
        assert_refused_by_dargs(spoiled(changes))


MORE = [
    {**spoiled({}), 2: 3},
    spoiled({"training": {**GOOD["training"], 2: 3}}),
    spoiled({"model.preset_out_bias": {"energy": [True, 1.0]}}),
    spoiled({"model.preset_out_bias": {"energy": [10**400, 1.0]}}),
    spoiled({"model.fitting_net.atom_ener": ["1", None]}),
    spoiled({"learning_rate.start_lr": float("nan")}),
]


@pytest.mark.parametrize("values", MORE, ids=repr)
def test_values_that_no_file_holds_are_refused(values):
    assert problems_of(values)
    assert_refused_by_dargs(values)
    with pytest.raises(ConfigError, match=r"the config = \[\]: expected a section"):
        config_from_dict([])


@pytest.mark.parametrize(("changes", "text"), BROKEN, ids=[text for _, text in BROKEN])
def test_a_broken_rule_has_a_message(changes, text):
    assert_refused(spoiled(changes), text)


def test_mixed_precision_is_accepted_with_one_line():
    given = {"compute_prec": "float16", "output_prec": "float32"}
    config = config_from_dict(spoiled({"training.mixed_precision": given}))
    (line,) = [
        text
        for text in ignored_options(config)
        if text.startswith("training.mixed_precision")
    ]
    assert line.endswith(
        ": no effect, the precision is that of descriptor and fitting_net"
    )


@pytest.mark.parametrize("name", ["input.json", "input.yaml"])
def test_comments_may_repeat(name, tmp_path):
    text = json.dumps(GOOD)
    comments = (
        '{"_comment": "the first", "_comment": {"a": 1, "a": 2}, '
        '"model": {"_a": 1, "_a": 2, '
    )
    path = tmp_path / name
    path.write_text(text.replace('{"model": {', comments, 1))
    assert load_config(path) == config_from_dict(GOOD, str(path))


def test_an_input_of_version_0_is_one_problem(tmp_path):
    old = {
        "use_smooth": True,
        "sel_a": [12, 20],
        "rcut": 4.0,
        "filter_neuron": [4, 8],
        "n_neuron": [8],
        "seed": 1,
    }
    old |= {"systems": ["train"], "stop_batch": 20, "batch_size": 2, "coord_norm": True}
    path = tmp_path / "input.json"
    path.write_text(json.dumps(old, indent=1))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [problem] = caught.value.problems
    assert problem.startswith(
        f"{path}: an input of DeePMD-kit 0.x, with all options at the top. Expected the sections"
    )


def test_an_option_given_twice_is_reported_for_each():
    values = spoiled({"training.numb_steps": REMOVE})
    values["training"] |= {"stop_batch": 3, "numb_steps": 5, "num_steps": 7}
    assert problems_of(values) == [
        f"input.json: training.{name}: the same option as stop_batch. Remove one of the two."
        for name in ("numb_steps", "num_steps")
    ]
    with pytest.raises(ConfigError, match=r"n_neuron: the same option as neuron\."):
        model_config_from_dict(
            {**GOOD["model"], "fitting_net": {"neuron": [4], "n_neuron": [5]}}
        )


def test_all_mistakes_come_at_once_with_lines_in_the_order_of_the_file(tmp_path):
    text = """{"model": {"type_map": ["O", "H"], "descriptor": {"type": "se_e2_a", "sel": [46, 92],
  "rcutt": 6.0,
  "rcut_smth": "0.5"}, "fitting_net": {}},
  "learning_rate": {"start_lr": 0.001}, "training": {"training_data": {"systems": "data"},
  "numb_steps": 1000.0, "zero_stage": 4},
  "validating": {"ema_full_validation": true}}"""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    places = [p.removeprefix(f"{path}:").split(" ")[:2] for p in caught.value.problems]
    assert places == [
        ["2:", "model.descriptor.rcutt:"],
        ["3:", "model.descriptor.rcut_smth"],
        ["5:", "training.numb_steps"],
        ["5:", "training.zero_stage"],
        ["6:", "validating.ema_full_validation"],
    ]


def test_sharing_out_in_a_process_that_no_launcher_started_is_stage_0_with_a_note():
    """`dp-ema check` called such an input good, and `dp-ema train` refused it."""
    config = config_from_dict(spoiled({"training.zero_stage": 2}))
    alone = as_launched(config, launched=False)
    assert alone.training.zero_stage == 0
    (note,) = alone.notes
    assert note == (
        "training.zero_stage = 2: no launcher has started this process, which trains with 0. "
        "Launch with: export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 dp-ema train '<dict>'"
    )
    assert as_launched(config, launched=True) == config


def test_the_kalman_filter_on_several_processes_is_refused_at_the_start():
    config = config_from_dict(spoiled({"optimizer": {"type": "LKF"}}))
    with pytest.raises(
        ConfigError,
        match=r'^<dict>: optimizer.type = "LKF": .* one process only, and 2 were launched\.',
    ):
        as_launched(config, launched=True, num_ranks=2)
    assert as_launched(config, launched=True, num_ranks=1) == config


# text of a file -> what its only message holds
BROKEN_JSON = [
    ("   \n", "the file is empty"),
    ("[1, 2]", ":1: expected an object ... found a list"),
    ("3", "found a number"),
    ('{"a": [1, 2,]}', "a comma before the closing bracket"),
    ('{\n  # one\n  "a": 1\n}', ":2:3: not JSON ... JSON has no comments"),
    ('{\n  "a": 1 // one\n}', "JSON has no comments"),
    ("{\"a\": 'x'}", "texts stand in double quotes"),
    ('{"a": True}', "write true, false and null in lower case"),
    ('{"a": .5}', "a number begins with a digit"),
    ('{\n"a": -Infinity}', ":2: -Infinity is no JSON number"),
    ('{"a": 1', "the text ends too early"),
    ('{"a": 1\n "b": 2}', ":2:2 ... a comma or a closing bracket is missing"),
    ('{"a" 1}', "a colon is missing"),
    ("{a: 1}", "a key in double quotes"),
    ('{"a": 1}}', "something follows after the end"),
    ('{"a": "\xff"}', "not a text file"),
    ('{"a": "x\ny"}', "a text is not closed on its line"),
    ('{"a": "C:\\data"}', "a backslash in a text is written twice"),
    ('{"a": 1,,"b": 2}', "a comma too many"),
    ("[" * 100000, "nested too deeply"),
    ('{"a": ' + "1" * 5000 + "}", "digits"),
    (
        '{"a": 1,\n"b": {"c": 1, "c": 2},\n"a": 2}',
        ":2: b.c: given twice, first on line 2 ... :3: a: given twice",
    ),
]
BROKEN_YAML = [
    ("1: 2\n", "a key must be a text. Put it in quotes."),
    ("# only a comment\n", "expected an object ... found nothing"),
    ("model: {a: 1\n", "not YAML"),
    ("a: *nowhere\n", "undefined alias"),
    ("model:\n\ttype_map: [O]\n", ":2: not YAML: a tab. Indent with spaces only."),
    ("a: &x\n  b: *x\n", "an anchor that contains itself"),
    ("model: a: b\n", ":1:9: not YAML: a colon where none can be"),
    ("a: 1\nb:\n  c: 1\n  c: 2\n", ":4: b.c: given twice, first on line 3"),
    (
        "a: !!python/object:os.system x\n",
        "not YAML ... could not determine a constructor",
    ),
    ("a: !!timestamp x\n", "not YAML ... a tag"),
    ("a: \x07\n", "not YAML ... special characters"),
    ("a: " + "[" * 200 + "]" * 200, "nested too deeply"),
    (
        "\n".join(
            [
                "a0: &a0 [1, 1]",
                *(
                    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]"
                    for n in range(1, 12)
                ),
            ]
        ),
        "anchors that expand to more than 100,000 values",
    ),
    (
        "\n".join(
            [
                "a0: &a0 {x: 1}",
                *(
                    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}"
                    for n in range(1, 12)
                ),
            ]
        ),
        "anchors that expand to more than 100,000 values",
    ),
]


@pytest.mark.parametrize(
    ("name", "text", "phrases"),
    [("input.json", *row) for row in BROKEN_JSON]
    + [("input.yaml", *row) for row in BROKEN_YAML],
)
def test_a_text_that_cannot_be_read_says_where_and_why(tmp_path, name, text, phrases):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    assert re.search(
        ".*".join(map(re.escape, phrases.split(" ... "))), message, re.DOTALL
    ), message
    assert (
        time.process_time() - began < 5
    )  # all memory or for ever, if anchors are not refused


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    write(tmp_path, GOOD)
    with pytest.raises(
        ConfigError, match=r"inputt\.json: no such file\. There is: input\.json\."
    ):
        load_config(tmp_path / "inputt.json")
    with pytest.raises(
        ConfigError, match=r"is a folder, expected a \.json, \.yaml or \.yml file"
    ):
        load_config(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"input\.toml: expected a file that ends in \.json, \.yaml or \.yml",
    ):
        load_config(write(tmp_path, "a = 1", "input.toml"))
