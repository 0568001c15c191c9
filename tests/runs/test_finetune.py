"""Fine-tuning: weights of a file on other data, elements and fitting networks, for one task or
several.
"""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from changed_options import MODELS_OF_TYPES, changed_sections, replaced
from config_inputs import write
from helpers import assert_same, tiny_input, write_system
from shared_tasks import input_of as tasks_of
from shared_tasks import write_data
from toy_models import TYPES, toy_model, write_dp
from training_runs import load

from deepmd_ema import checkpoint, cli
from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.fields import plain
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import CheckpointError, ConfigError, UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.model.build import build_model
from deepmd_ema.model.element_mapping import carried_over
from deepmd_ema.training.weights import (
    Source,
    Start,
    load_pretrained,
    report_differences,
)

HEADS = str(Path(__file__).parents[1] / "golden" / "peer_checkpoints" / "pt_heads.pt")


# options that may differ from those of the file without a word
OF_THE_RUN = {
    "atom_ener",
    "data_stat_nbatch",
    "data_stat_protect",
    "finetune_bias",
    "finetune_head",
    "interpolate",
    "model_branch_alias",
    "preset_out_bias",
    "rcond",
    "seed",
    "trainable",
    "type_map",
}
# the default has two spellings, of which null is one
WITH_TWO_SPELLINGS = {
    "l_schedule",
    "ln_eps",
    "precision",
    "stripped_type_embedding",
    "temperature",
}
STILL = {
    "start_lr": 1e-30,
    "stop_lr": 1e-31,
}  # the weights of step 1 are those of the start
ATTENTION = {
    "type": "se_atten",
    "sel": 60,
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8],
    "axis_neuron": 4,
    "attn": 8,
    "attn_layer": 1,
    "tebd_dim": 4,
    "seed": 1,
    "set_davg_zero": False,
}


def input_of(elements, *, steps=2, descriptor=ATTENTION, **changes):
    config = tiny_input(
        ["data"], num_steps=steps, type_map=elements, training__save_freq=2, **changes
    )
    config["model"]["descriptor"] = dict(descriptor)
    return config


def train(config, *options):
    Path("input.json").write_text(json.dumps(config))
    return cli.main(["train", "input.json", "--device", "cpu", *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A file of a model of O and H that was trained."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_system("data", frames=4, seed=1)
        assert train(input_of(["O", "H"], training__enable_ema=True)) == 0
    return str(folder / "model.ckpt.pt")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the data of two tasks, and with an element that the trained model does not
    know.
    """
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    write_system("data", frames=4, seed=5, elements=("H", "O", "Na"))


def test_elements_of_the_file_keep_their_weights_and_new_ones_get_their_own(
    trained, desk, capsys
):
    config = input_of(["Na", "H", "O"], steps=1, learning_rate=STILL)
    assert train(config, "--finetune", trained) == 0
    said = capsys.readouterr().err
    assert (
        f"fine-tuning {trained}: live weights of step 2; new elements Na; fitting network of the "
        "file" in said
    )
    old, new = (
        checkpoint.load(trained)["model"],
        checkpoint.load("model.ckpt-1.pt")["model"],
    )
    for name in (
        "descriptor.block.mean",
        "descriptor.block.stddev",
        "descriptor.type_embedding.net.layers.0.weight",
    ):
        there, here = old[name].flatten(1), new[name].flatten(1)
        if (
            "type_embedding" in name
        ):  # its skip connection adds the identity, of another size, to the weight
            there = there + torch.eye(2).repeat(1, 2)
        torch.testing.assert_close(here[[2, 1]], there, rtol=1e-14, atol=1e-14)
    for name, value in old.items():
        if name.startswith(
            ("fitting.nets", "descriptor.block.embedding", "descriptor.block.layers")
        ):
            torch.testing.assert_close(new[name], value, rtol=1e-14, atol=1e-14)
    assert float(new["descriptor.block.stddev"][0, 0, 0]) not in (
        0.1,
        1.0,
    )  # Na: measured


def test_the_nearest_pair_is_that_of_the_file_or_of_the_data(trained, desk):
    """It was that of the file, so that frames as near as the new data were called an
    extrapolation.
    """
    content, config = checkpoint.load(trained), input_of(["O", "H"], steps=1)
    write_system("data", frames=4, seed=5)
    found = []
    for name, nearest in (("near.pt", 0.1), ("far.pt", 9.0)):
        checkpoint.save(name, {**content, "min_nbor_dist": nearest})
        assert train(config, "--init-model", name) == 0
        found.append(checkpoint.load("model.ckpt-1.pt")["min_nbor_dist"])
    assert train(config) == 0
    assert found == [0.1, checkpoint.load("model.ckpt-1.pt")["min_nbor_dist"]]


def test_the_bias_is_moved_to_the_data_and_a_restart_is_exact(trained, desk, capsys):
    config = input_of(
        ["H", "O", "Na"], steps=4, training__enable_ema=True, model__finetune_bias="fit"
    )
    assert train(config, "--finetune", trained) == 0
    assert re.search(
        r"energies differ by .*, on 4 training frames: the output bias was moved",
        capsys.readouterr().err,
    )
    straight = checkpoint.load("model.ckpt-4.pt")
    assert train(config, "--restart", "model.ckpt-2.pt") == 0
    again = checkpoint.load("model.ckpt-4.pt")
    for part in ("model", "optimizer", "averages"):
        assert content_digest(again[part]) == content_digest(straight[part]), part


def test_the_model_section_is_taken_from_the_file(trained, desk, capsys):
    config = input_of(["H", "O", "Na"])
    config["model"] = {
        "type_map": ["H", "O", "Na"],
        "descriptor": {"trainable": False},
        "fitting_net": {},
    }
    options = ["--finetune", trained, "--use-pretrain-script"]
    assert train(config, *options) == 0
    used = json.loads(Path("out.json").read_text())["model"]
    there = checkpoint.load(trained)["config"]["model"]
    assert used["descriptor"] == {**there["descriptor"], "trainable": False}
    assert used["fitting_net"] == there["fitting_net"]
    assert used["type_map"] == ["H", "O", "Na"]
    straight = checkpoint.load("model.ckpt-2.pt")["model"]
    Path("model.ckpt-2.pt").rename("first.pt")
    config["training"]["numb_steps"] = 3
    assert train(config, "--restart", "first.pt", "--use-pretrain-script") == 0
    assert checkpoint.load("model.ckpt-3.pt")["model"].keys() == straight.keys()
    assert train(config) == 2  # the sections are in the file only
    assert "model.descriptor" in capsys.readouterr().err


def test_types_that_a_part_of_a_hybrid_excludes_are_not_taken_to_other_elements(
    tmp_path,
):
    config, model = toy_model("hybrid", {"exclude_types": [[0, 1]]})
    write_dp(tmp_path / "model.dp", model, config)
    start = load_pretrained(str(tmp_path / "model.dp"))
    with pytest.raises(
        ConfigError,
        match=r"descriptor.list\[0\].exclude_types, descriptor.list\[1\].exclude_types of",
    ):
        start.model_section({"type_map": TYPES[::-1]})


def test_options_that_change_what_weights_mean_are_reported(trained, desk, capsys):
    """The user saw: a model of a shorter cutoff started from weights of another without a word."""
    write_system("data", frames=4, seed=5, elements=("O", "H"))
    Path("table.txt").write_text("".join(f"{0.5 + 0.5 * k} 1 1 1\n" for k in range(12)))
    config = input_of(["O", "H"], steps=1, descriptor={**ATTENTION, "rcut": 3.5})
    config["model"] |= {"use_srtab": "table.txt", "sw_rmin": 0.5, "sw_rmax": 0.8}
    assert train(config, "--init-model", trained) == 0
    said = capsys.readouterr().err
    assert (
        "model.descriptor.rcut was 4.0 where the weights were trained, is 3.5 here"
        in said
    )
    assert "model.use_srtab is not that of the file" in said
    config["training"]["numb_steps"] = 2
    config["model"]["finetune_head"] = "water"
    Path("data/set.000/energy.npy").unlink()
    assert train(config, "--restart", "model.ckpt-1.pt") == 0
    assert "where the weights were trained" not in capsys.readouterr().err
    assert train(config) == 0
    assert (
        'model.finetune_head = "water": no effect without --finetune or --init-model'
        in capsys.readouterr().err
    )
    del config["model"]["finetune_head"]
    assert train(config, "--finetune", trained) == 0
    assert (
        "no training frame has a label to compare the output bias with"
        in capsys.readouterr().err
    )


QUANTITIES = {
    "energy": {"type": "ener", "neuron": [4]},
    "dipole": {"type": "dipole", "neuron": [4]},
    "polarizability": {"type": "polar", "neuron": [4]},
    "gap[1]": {"type": "property", "property_name": "gap", "neuron": [4]},
    "modulus[1]": {"type": "property", "property_name": "modulus", "neuron": [4]},
    "dos[4]": {"type": "dos", "numb_dos": 4, "neuron": [4]},
}


@pytest.mark.parametrize("way", ["init-model", "finetune", "head", "random"])
@pytest.mark.parametrize("here", QUANTITIES)
@pytest.mark.parametrize("there", QUANTITIES)
def test_a_fitting_network_of_another_quantity_is_refused(there, here, way):
    """A gap started from an energy model with its network and a bias of -5 eV per atom: shapes
    agreed.
    """
    saved, new = (
        model_config_from_dict(
            tiny_input(["data"], model__fitting_net=QUANTITIES[name])["model"]
        )
        for name in (there, here)
    )
    place = "model" if way != "head" else "model.model_dict.new"
    name = "" if way != "head" else "new"
    source = Source(None, fresh_fitting=way == "random")
    start = Start(
        Path("old.pt"),
        {name: source},
        fine_tunes=way != "init-model",
        saved={name: saved},
    )
    task = SimpleNamespace(model=new, place=lambda _: place)
    run = SimpleNamespace(tasks={name: task}, training=SimpleNamespace(seed=1))
    if there == here or way == "random":
        assert start.adopt_from_checkpoint(run) is run
        return
    expected = (
        rf"old.pt: a model of {re.escape(there)}, and {place}.fitting_net predicts "
        rf"{re.escape(here)}: .*RANDOM"
    )
    with pytest.raises(CheckpointError, match=expected):
        start.adopt_from_checkpoint(run)


@pytest.mark.parametrize("name", MODELS_OF_TYPES)
def test_a_change_of_any_option_of_a_model_is_reported(name, caplog):
    """Options are those of the declaration: a new one is tried as well."""
    saved = model_config_from_dict(MODELS_OF_TYPES[name])
    report_differences(saved, saved, "model")
    assert not caplog.records
    silent = set()
    for place, values in changed_sections(plain(saved), type(saved)):
        reported = []
        for value in values:
            with suppress(UserError):
                changed = model_config_from_dict(replaced(plain(saved), place, value))
                if plain(changed) == plain(saved):
                    continue
                caplog.clear()
                report_differences(saved, changed, "model")
                reported.append(bool(caplog.records))
                if reported[-1]:
                    break
        if reported and not any(reported):
            silent.add(place[-1])
    assert silent <= {*OF_THE_RUN, *WITH_TWO_SPELLINGS}


@pytest.mark.parametrize("name", ["dpa2", "dpa3", "se_atten", "se_e2_a"])
def test_numbers_of_neighbors_that_the_data_decide_are_no_difference(name, caplog):
    values = copy.deepcopy(MODELS_OF_TYPES[name])
    saved = model_config_from_dict(values)
    sections = [
        part
        for part in (values["descriptor"], *values["descriptor"].values())
        if isinstance(part, dict)
    ]
    for section in sections:
        section |= dict.fromkeys(
            {"sel", "nsel", "e_sel", "a_sel", "three_body_sel"} & section.keys(), "auto"
        )
    assert "auto" in [value for section in sections for value in section.values()]
    report_differences(saved, model_config_from_dict(values), "model")
    assert not caplog.records


@pytest.mark.parametrize(
    ("section", "value", "moved"),
    [
        (("atom_exclude_types",), [0], [1]),
        (("pair_exclude_types",), [[0, 0]], [[1, 1]]),
        (("descriptor", "exclude_types"), [[0, 1]], [[1, 0]]),
        (("fitting_net", "sel_type"), [0], [1]),
        (("fitting_net", "scale"), [1.0, 2.0], [2.0, 1.0]),
    ],
)
def test_options_by_number_of_an_element_are_compared_by_its_name(
    section, value, moved, caplog
):
    kind = {"type": "polar", "neuron": [4]}
    values = tiny_input(["data"], model__fitting_net=kind)["model"]
    saved, same, other = (
        model_config_from_dict(
            replaced({**values, "type_map": type_map}, section, given)
        )
        for type_map, given in (
            (["O", "H"], value),
            (["H", "O"], moved),
            (["H", "O"], value),
        )
    )
    report_differences(saved, same, "model")
    assert not caplog.records
    report_differences(saved, other, "model")
    assert bool(caplog.records) == (
        section != ("descriptor", "exclude_types")
    )  # a pair is the same in either order


@pytest.mark.parametrize(("name", "value"), [("sel_type", [0]), ("scale", [1.0, 2.0])])
def test_options_of_elements_are_not_taken_to_another_order(name, value):
    """Dipoles moved from O to H."""
    values = tiny_input(
        ["data"], model__fitting_net={"type": "polar", "neuron": [4], name: value}
    )["model"]
    config = model_config_from_dict(values)
    model = SimpleNamespace(type_map=config.type_map, state_dict=dict)
    start = Start(
        Path("old.pt"),
        {"": Source(SimpleNamespace(model=model))},
        fine_tunes=True,
        config={"model": values},
        saved={"": config},
    )
    assert start.model_section({"type_map": ["O", "H"]})["fitting_net"][name] == value
    with pytest.raises(
        ConfigError, match=f"fitting_net.{name} of old.pt counts elements by number"
    ):
        start.model_section({"type_map": ["H", "O"]})


def test_a_fresh_fitting_network_may_have_another_shape(trained, desk, capsys):
    config = input_of(
        ["H", "O", "Na"], model__fitting_net={"neuron": [5, 5, 5], "seed": 3}
    )
    assert train(config, "--finetune", trained) == 2
    said = capsys.readouterr().err
    assert f"{trained}: its weights do not fit the model of this input." in said
    assert "--model-branch RANDOM" in said
    assert train(config, "--finetune", trained, "--model-branch", "random") == 0
    said = capsys.readouterr().err
    assert "fitting network fresh" in said
    assert "output bias moved" not in said


def test_a_head_of_a_multi_task_file_is_fine_tuned(desk):
    loaded = load_model(HEADS, head="ice")
    descriptor = {**loaded.info.config["model"]["descriptor"], "sel": [20, 20]}
    config = input_of(["H", "O"], steps=1, descriptor=descriptor, learning_rate=STILL)
    config["model"]["fitting_net"] = loaded.info.config["model"]["fitting_net"]
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    assert train(config, "--finetune", HEADS, "--model-branch", "ice") == 0
    of_command_line = checkpoint.load("model.ckpt-1.pt")["model"]
    expected = carried_over(loaded.model, build_model(config_from_dict(config).model))
    assert all(
        torch.equal(of_command_line[n], value)
        for n, value in expected.items()
        if n.endswith("weight")
    )
    config["model"]["finetune_head"] = "ice"
    assert train(config, "--finetune", HEADS) == 0
    assert content_digest(
        checkpoint.load("model.ckpt-1.pt")["model"]
    ) == content_digest(of_command_line)


def test_without_a_head_the_fitting_network_of_a_multi_task_file_is_fresh(desk, capsys):
    config = input_of(["O", "H"], steps=1)
    config["model"] = {
        "type_map": ["O", "H"],
        "descriptor": {},
        "fitting_net": {"neuron": [5]},
    }
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    assert train(config, "--finetune", HEADS, "--use-pretrain-script") == 0
    said = capsys.readouterr().err
    assert (
        f"{HEADS} holds water, ice: no --model-branch chooses one, so the fitting network starts "
        "anew" in said
    )
    assert json.loads(Path("out.json").read_text())["model"]["fitting_net"][
        "neuron"
    ] == [5]


BY_TYPE = {
    "type": "se_e2_a",
    "sel": [24, 24],
    "rcut": 4.0,
    "rcut_smth": 1.0,
    "neuron": [4, 8],
    "axis_neuron": 4,
}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"descriptor": {**ATTENTION, "attn_layer": 2}},
            ["-t", "FILE"],
            "missing there: descriptor",
        ),
        (
            {"descriptor": {**BY_TYPE, "sel": [9] * 3}},
            ["-t", "FILE"],
            "not of this model: ",
        ),
        (
            {},
            ["-t", "FILE", "--model-branch", "ice"],
            "so there is no head 'ice'. Leave it out",
        ),
        (
            {"model__finetune_head": "water"},
            ["-t", HEADS, "--head", "ice"],
            '--model-branch ice: input.json has model.finetune_head = "water". Expected one head',
        ),
        (
            {},
            ["--use-pretrain-script"],
            "takes the section `model` from a file, and none is given",
        ),
        ({}, ["-r", "FILE", "--model-branch", "x"], "--model-branch: chooses a model"),
        ({}, ["-t", HEADS, "--head", "steam"], "no head 'steam'"),
    ],
)
def test_what_cannot_be_fine_tuned_is_a_message(
    changes, options, message, trained, desk, capsys
):
    config = input_of(["H", "O", "Na"], **changes)
    assert (
        train(config, *[trained if word == "FILE" else word for word in options]) == 2
    )
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_descriptor_without_a_type_embedding_takes_another_order_only(desk, capsys):
    write_system("first", frames=4, seed=5, elements=("H", "O"))
    first = {"training__training_data__systems": ["first"]}
    assert (
        train(input_of(["O", "H"], descriptor={**BY_TYPE, "sel": [24, 20]}, **first))
        == 0
    )
    Path("model.ckpt-2.pt").rename("first.pt")
    config = input_of(
        ["H", "O"], steps=1, descriptor={**BY_TYPE, "sel": [24, 20]}, **first
    )
    assert train(config, "-t", "first.pt") == 2
    assert "sel must be [20, 24] for H O, as there" in capsys.readouterr().err
    config["model"]["descriptor"]["sel"] = [20, 24]
    assert train(config, "-t", "first.pt") == 0
    capsys.readouterr()
    assert (
        train(
            input_of(["Na", "H", "O"], descriptor={**BY_TYPE, "sel": [9, 24, 24]}),
            "-t",
            "first.pt",
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "first.pt: elements O H there, Na H O here: its descriptor has networks for each element"
        in said
    )
    assert (
        "No option changes that. Train from the start, or fine-tune a model with a type embedding"
        in said
    )


def test_a_frozen_model_is_fine_tuned_with_the_sel_of_the_file(trained, desk, capsys):
    frozen = "frozen.dp"
    assert cli.main(["convert", trained, frozen, "--use-ema"]) == 0
    config = input_of(
        ["H", "O", "Na"], steps=1, descriptor={**ATTENTION, "sel": "auto"}
    )
    assert train(config, "--finetune", frozen) == 0
    said = capsys.readouterr().err
    assert f"fine-tuning {frozen}: averaged weights (ema) of step 2" in said
    assert "model.descriptor." not in said
    assert json.loads(Path("out.json").read_text())["model"]["descriptor"]["sel"] in (
        60,
        [60],
    )
    config = input_of(["O", "H"], steps=1)
    write_system("data", frames=4, seed=5, elements=("O", "H"))
    assert train(config, "--init-model", frozen) == 0
    assert f"weights of {frozen} (ema, step 2)" in capsys.readouterr().err
    assert train(config, "--restart", frozen) == 2
    said = capsys.readouterr().err
    assert "a frozen model holds weights only, not the state of a run" in said
    assert f"--init-model {frozen}" in said


OF_TASK = {"out_bias", "out_std", "fitting.case_embd"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Files of two tasks that share nothing ("nothing.pt"), and of one of their models
    ("one.pt").
    """
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(folder)
        write(folder, tasks_of("nothing", numb_steps=4))
        assert cli.main(["train", "input.json"]) == 0
        Path("model.ckpt-4.pt").rename("nothing.pt")
        assert cli.main(["convert", "nothing.pt", "one.pt", "--head", "water"]) == 0
    return folder


def train_tasks(way, *options, change=lambda values: None, **heads):
    """Train one step that moves nothing and return the exit code."""
    values = tasks_of(way, numb_steps=1)
    values["learning_rate"] = STILL
    for task, head in heads.items():
        values["model"]["model_dict"][task]["finetune_head"] = head
    change(values)
    write(Path(), values)
    return cli.main(["train", "input.json", *options])


def start(*given, **how):
    """Return the live weights after such a step, by name."""
    assert train_tasks(*given, **how) == 0
    return load("model.ckpt-1.pt")["model"]


def of(task, weights):
    return {
        name.removeprefix(f"{task}."): value
        for name, value in weights.items()
        if name.startswith(f"{task}.")
    }


def without(names, weights):
    return {name: value for name, value in weights.items() if name not in names}


def test_each_task_starts_from_the_model_that_it_names(runs, desk, capsys):
    before = load(runs / "nothing.pt")["model"]
    after = start(
        "nothing", "--finetune", str(runs / "nothing.pt"), water="ice", ice="water"
    )
    said = capsys.readouterr().err
    assert "fine-tuning task water from" in said
    assert re.search(
        "task ice: energies differ by .* another reference, .* the output bias was moved",
        said,
    )
    for task, head in (("water", "ice"), ("ice", "water")):
        assert_same(
            without(OF_TASK, of(task, after)), without(OF_TASK, of(head, before))
        )
        assert not torch.equal(
            of(task, after)["out_bias"], of(head, before)["out_bias"]
        )


def test_a_task_without_a_head_continues_from_the_model_of_its_name_and_another_is_fresh(
    runs, desk, capsys
):
    def rename(values):
        for section in (values["model"]["model_dict"], values["training"]["data_dict"]):
            section["steam"] = section.pop("ice")
        values["training"]["model_prob"] = values["loss_dict"] = {}

    before = load(runs / "nothing.pt")["model"]
    after = start("nothing", "--finetune", str(runs / "nothing.pt"), change=rename)
    said = capsys.readouterr().err
    assert (
        "holds water, ice: no model.model_dict.steam.finetune_head chooses one" in said
    )
    assert "was moved" not in said
    assert_same(of("water", after), of("water", before))
    steam, first = of("steam", after), of("water", before)
    for name in steam:
        if name.endswith("weight") or name == "out_bias":
            assert torch.equal(steam[name], first[name]) == name.startswith(
                "descriptor"
            ), name


def test_several_tasks_start_from_one_model(runs, desk, capsys):
    before = load(runs / "one.pt")["model"]
    after = start("nothing", "--finetune", str(runs / "one.pt"), water="Default")
    assert (
        "holds one model: no model.model_dict.ice.finetune_head"
        in capsys.readouterr().err
    )
    for task in ("water", "ice"):
        now = of(task, after)
        for name in (name for name in before if name.endswith("weight")):
            same = name.startswith("descriptor") or task == "water"
            assert torch.equal(now[name], before[name]) == same, (task, name)


def test_the_sections_of_a_file_are_taken_for_several_tasks(desk):
    """Also where tasks share them, and but for ``trainable``."""
    task = {"type_map": "elements", "descriptor": "any"}
    fresh = {**task, "fitting_net": {"neuron": [5]}, "finetune_head": "RANDOM"}
    section = {
        "shared_dict": {"elements": ["H", "O"], "any": {"trainable": False}},
        "model_dict": {"water": {**task, "fitting_net": {}}, "ice": fresh},
    }
    after = start(
        "nothing",
        "--finetune",
        HEADS,
        "--use-pretrain-script",
        change=lambda v: v.update(model=section),
    )
    expected, out = (
        load_model(HEADS, head="water"),
        json.loads(Path("out.json").read_text())["model"],
    )
    assert out["shared_dict"]["any"] == {
        **expected.info.config["model"]["descriptor"],
        "trainable": False,
    }
    assert (
        out["model_dict"]["water"]["fitting_net"]
        == expected.info.config["model"]["fitting_net"]
    )
    assert out["model_dict"]["ice"]["fitting_net"]["neuron"] == [5]
    back = [expected.model.type_map.index(element) for element in ("H", "O")]
    assert torch.equal(
        of("water", after)["out_bias"], expected.model.out_bias[:, back]
    )  # as in the file


def test_tasks_start_from_all_models_of_a_checkpoint_of_deepmd_kit(desk):
    loaded = {head: load_model(HEADS, head=head) for head in ("water", "ice")}
    sections = {head: one.info.config["model"] for head, one in loaded.items()}
    shared = {
        "elements": sections["water"]["type_map"],
        "desc": sections["water"]["descriptor"],
    }
    models = {
        head: {
            "type_map": "elements",
            "descriptor": "desc",
            "fitting_net": section["fitting_net"],
        }
        for head, section in sections.items()
    }
    model = {"shared_dict": shared, "model_dict": models}
    after = start(
        "nothing",
        "--init-model",
        HEADS,
        change=lambda values: values.update(model=model),
    )
    for head, one in loaded.items():
        assert_same(
            without({"out_std"}, of(head, after)),
            without({"out_std"}, dict(one.model.state_dict())),
        )


@pytest.mark.parametrize(
    ("heads", "options", "message"),
    [
        (
            {},
            ["--finetune", "nothing.pt", "--model-branch", "ice"],
            "input.json has several tasks. Name",
        ),
        (
            {"ice": "steam"},
            ["--finetune", "nothing.pt"],
            "no head 'steam'. It has water, ice",
        ),
        ({"ice": "water"}, ["--finetune", "one.pt"], "so there is no head 'water'"),
        (
            {},
            ["--init-model", HEADS, "--use-pretrain-script"],
            "does not say what they share",
        ),
        (
            {},
            ["--init-model", "one.pt"],
            "one model without a name, and none for water, ice of the input",
        ),
    ],
)
def test_what_several_tasks_cannot_start_from_is_a_message(
    heads, options, message, runs, desk, capsys
):
    assert (
        train_tasks(
            "nothing", options[0], str(runs / options[1]), *options[2:], **heads
        )
        == 2
    )
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
