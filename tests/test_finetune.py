"""Fine-tuning: weights of a file on other data, with other elements, another fitting network and another bias."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import tiny_input, write_system
from toy_models import TYPES, toy_model, write_dp

from deepmd_ema import checkpoint, cli
from deepmd_ema.config import RunConfig, config_from_dict, load
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import ConfigError
from deepmd_ema.infer.load import load_model
from deepmd_ema.model.build import build_model
from deepmd_ema.model.element_mapping import carried_over
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.training.request import TrainRequest
from deepmd_ema.training.run import run_training
from deepmd_ema.training.weights import load_pretrained
from deepmd_ema.utils import seed_for

PEER_FILES = Path(__file__).parent / "golden" / "peer_checkpoints"
ATTENTION = {"type": "se_atten", "sel": 60, "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 4,
             "attn": 8, "attn_layer": 1, "tebd_dim": 4, "seed": 1, "set_davg_zero": False}  # fmt: skip


def input_of(elements, *, steps=2, descriptor=ATTENTION, **changes):
    config = tiny_input(["data"], num_steps=steps, type_map=elements, training__save_freq=2, **changes)
    config["model"]["descriptor"] = dict(descriptor)
    return config


def train(config, *options):
    Path("input.json").write_text(json.dumps(config))
    return cli.main(["train", "input.json", "--device", "cpu", *options])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a model of O and H, and its folder."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_system("data", frames=4, seed=1)
        assert train(input_of(["O", "H"], training__enable_ema=True)) == 0
    return folder


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with data of another composition, with an element that the trained model does not know."""
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=5, elements=("H", "O", "Na"))
    return tmp_path


def first_weights(file, config, **options):
    """Return the weights that a run starts from, without statistics of new elements and the bias."""
    run = config_from_dict(config)
    model = build_model(run.model, seed_for("weights", run.training.seed))
    start = load_pretrained(str(file), **options)
    start.load_weights(ModelSet({"": model}))
    return model.state_dict()


def test_elements_of_the_file_keep_their_weights_and_new_ones_get_their_own(trained, desk, capsys):
    file = trained / "model.ckpt.pt"
    config = input_of(["Na", "H", "O"], steps=1, learning_rate__start_lr=1e-30, learning_rate__stop_lr=1e-31)
    assert train(config, "--finetune", str(file)) == 0
    said = capsys.readouterr().err
    assert f"fine-tuning {file}: live weights of step 2; new elements Na; fitting network of the file" in said
    old, new = checkpoint.load(file)["model"], checkpoint.load("model.ckpt-1.pt")["model"]
    for name in ("descriptor.block.mean", "descriptor.block.stddev", "descriptor.type_embedding.net.layers.0.weight"):
        there, here = old[name].flatten(1), new[name].flatten(1)
        if "type_embedding" in name:  # its skip connection adds the identity, of another size, to the weight
            there, here = there + torch.eye(2).repeat(1, 2), here
        torch.testing.assert_close(here[[2, 1]], there, rtol=1e-14, atol=1e-14)
    for name, value in old.items():
        if name.startswith(("fitting.nets", "descriptor.block.embedding", "descriptor.block.layers")):
            torch.testing.assert_close(new[name], value, rtol=1e-14, atol=1e-14)
    assert float(new["descriptor.block.stddev"][0, 0, 0]) not in (0.1, 1.0)  # Na: measured


@pytest.mark.parametrize("option", ["--finetune", "--init-model", "--restart"])
def test_a_start_parses_and_checks_its_input_once_and_reads_its_file_once(option, trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    monkeypatch.chdir(tmp_path / "run")
    options = {option: "model.ckpt.pt"} if option == "--restart" else {option: str(trained / "model.ckpt.pt")}
    with (
        mock.patch.object(load, "read_config_file", wraps=load.read_config_file) as parse,
        mock.patch.object(load, "rule_problems", wraps=load.rule_problems) as check,
        mock.patch.object(checkpoint.file, "read_archive", wraps=checkpoint.file.read_archive) as read,
    ):
        assert train(input_of(["O", "H"], training__enable_ema=True), *next(iter(options.items()))) == 0
    # the section of the model in the file is checked by itself
    runs = [call for call in check.call_args_list if isinstance(call.args[0], RunConfig)]
    assert (parse.call_count, len(runs), read.call_count) == (1, 1, 1)


def test_a_request_is_refused_beside_other_options():
    with pytest.raises(TypeError, match="run_training: restart belongs into the request"):
        run_training(TrainRequest("input.json"), restart="model.ckpt.pt")


def test_the_bias_is_moved_to_the_data(trained, desk, capsys):
    assert train(input_of(["H", "O", "Na"], steps=1), "--finetune", str(trained / "model.ckpt.pt")) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if "output bias moved by a fit" in line)
    before, after = map(float, re.search(r"mean residual (\S+) meV/atom before, (\S+) after", line).groups())
    assert abs(before) > 100
    assert abs(after) < 1e-6


def test_a_subset_and_another_order_are_taken_over(trained, desk):
    write_system("data", frames=4, seed=6, elements=("H",))
    config = input_of(["H"])
    assert train(config, "-t", str(trained / "model.ckpt.pt")) == 0
    assert checkpoint.load("model.ckpt-2.pt")["model"]["out_bias"].shape == (1, 1, 1)


def test_a_restart_of_a_fine_tuned_run_is_exact(trained, desk):
    config = input_of(["H", "O", "Na"], steps=4, training__enable_ema=True)
    assert train(config, "--finetune", str(trained / "model.ckpt.pt")) == 0
    straight = checkpoint.load("model.ckpt-4.pt")
    assert train(config, "--restart", "model.ckpt-2.pt") == 0
    again = checkpoint.load("model.ckpt-4.pt")
    for part in ("model", "optimizer", "averages"):
        assert content_digest(again[part]) == content_digest(straight[part]), part


def test_averages_start_from_the_weights_of_the_file(trained, desk):
    file, decay = trained / "model.ckpt.pt", 0.75
    config = input_of(
        ["H", "O"], steps=1, training__enable_ema=True, training__ema_decay=decay, training__ema_warmup=False
    )
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    assert train(config, "--finetune", str(file)) == 0
    begin, end = first_weights(file, config), checkpoint.load("model.ckpt-1.pt")
    average = checkpoint.load("model_ema.ckpt-1.pt")["model"]
    for name in end["averages"]["profiles"]["ema"]["weights"]:
        expected = decay * begin[name] + (1 - decay) * end["model"][name]
        torch.testing.assert_close(average[name], expected, rtol=1e-12, atol=1e-14)


def test_the_model_section_is_taken_from_the_file(trained, desk, capsys):
    config = input_of(["H", "O", "Na"])
    config["model"] = {"type_map": ["H", "O", "Na"], "descriptor": {"trainable": False}, "fitting_net": {}}
    options = ["--finetune", str(trained / "model.ckpt.pt"), "--use-pretrain-script"]
    assert train(config, *options) == 0
    used = json.loads(Path("out.json").read_text())["model"]
    there = checkpoint.load(trained / "model.ckpt.pt")["config"]["model"]
    assert used["descriptor"] == {**there["descriptor"], "trainable": False}
    assert used["fitting_net"] == there["fitting_net"]
    assert used["type_map"] == ["H", "O", "Na"]
    assert train(config) == 2  # the sections are in the file only
    assert "model.descriptor" in capsys.readouterr().err


def test_types_that_a_part_of_a_hybrid_excludes_are_not_taken_to_other_elements(tmp_path):
    config, model = toy_model("hybrid", {"exclude_types": [[0, 1]]})
    write_dp(tmp_path / "model.dp", model, config)
    start = load_pretrained(str(tmp_path / "model.dp"))
    assert start.model_section({"type_map": TYPES})["descriptor"]["list"][1]["exclude_types"] == [[0, 1]]
    with pytest.raises(ConfigError, match=r"descriptor.list\[0\].exclude_types, descriptor.list\[1\].exclude_types of"):
        start.model_section({"type_map": TYPES[::-1]})


@pytest.mark.parametrize("option", ["--finetune", "--init-model"])
def test_options_that_change_what_weights_mean_are_reported(option, trained, desk, capsys):
    """The user saw: a model of a shorter cutoff started from weights of another without a word."""
    write_system("data", frames=4, seed=5, elements=("O", "H"))
    Path("table.txt").write_text("".join(f"{0.5 + 0.5 * k} 1 1 1\n" for k in range(12)))
    config = input_of(["O", "H"], steps=1, descriptor={**ATTENTION, "rcut": 3.5})
    config["model"] |= {"use_srtab": "table.txt", "sw_rmin": 0.5, "sw_rmax": 0.8}
    assert train(config, option, str(trained / "model.ckpt.pt")) == 0
    said = capsys.readouterr().err
    assert "model.descriptor.rcut was 4.0 where the weights were trained, is 3.5 here" in said
    assert "model.use_srtab is not that of the file" in said
    used = Path("out.json").read_text()
    assert "[0.5, 1.0, 1.0, 1.0],\n" in used  # a row of a table on one line
    assert json.loads(used)["model"]["descriptor"]["neuron"] == [4, 8]
    config["training"]["numb_steps"] = 2
    assert train(config, "--restart", "model.ckpt-1.pt") == 0
    assert "where the weights were trained" not in capsys.readouterr().err
    Path("table.txt").write_text("".join(f"{0.5 + 0.5 * k} 1 1 2\n" for k in range(12)))
    assert train(config, "--restart", "model.ckpt-1.pt") == 2
    assert re.search(r"model.use_srtab: \[\[0.5, .{190,}\.\.\. in the checkpoint", capsys.readouterr().err)


def test_a_restart_takes_the_model_section_from_its_checkpoint(trained, desk):
    config = input_of(["H", "O", "Na"], steps=4)
    config["model"] = {"type_map": ["H", "O", "Na"], "descriptor": {}, "fitting_net": {}}
    assert train(config, "--finetune", str(trained / "model.ckpt.pt"), "--use-pretrain-script") == 0
    straight = checkpoint.load("model.ckpt-4.pt")["model"]
    assert train(config, "--restart", "model.ckpt-2.pt", "--use-pretrain-script") == 0
    assert all(
        torch.equal(value, straight[name]) for name, value in checkpoint.load("model.ckpt-4.pt")["model"].items()
    )


def test_a_fresh_fitting_network_may_have_another_shape(trained, desk, capsys):
    config = input_of(["H", "O", "Na"], model__fitting_net={"neuron": [5, 5, 5], "seed": 3})
    file = str(trained / "model.ckpt.pt")
    assert train(config, "--finetune", file) == 2
    said = capsys.readouterr().err
    assert f"{file}: its weights do not fit the model of this input." in said
    assert "--model-branch RANDOM" in said
    assert train(config, "--finetune", file, "--model-branch", "random", "-v", "DEBUG") == 0
    said = capsys.readouterr().err
    assert "fitting network fresh" in said
    assert "output bias moved" not in said
    assert "energy of each element: " in said


@pytest.mark.parametrize("head", ["water", "ice"])
def test_a_head_of_a_multi_task_file_is_fine_tuned(head, desk):
    file = PEER_FILES / "pt_heads.pt"
    loaded = load_model(file, head=head)
    config = input_of(["H", "O"], steps=1, descriptor={**loaded.info.config["model"]["descriptor"], "sel": [20, 20]})
    config["model"]["fitting_net"] = loaded.info.config["model"]["fitting_net"]
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    for options in (["--finetune"], ["--finetune", "--use-pretrain-script"]):
        assert train(config, *options[1:], options[0], str(file), "--model-branch", head) == 0
    of_command_line = checkpoint.load("model.ckpt-1.pt")["model"]
    config["model"]["finetune_head"] = head
    assert train(config, "--finetune", str(file)) == 0
    assert content_digest(checkpoint.load("model.ckpt-1.pt")["model"]) == content_digest(of_command_line)
    begin = first_weights(file, config, heads={"": head})
    expected = carried_over(loaded.model, build_model(config_from_dict(config).model))
    assert all(torch.equal(begin[name], value) for name, value in expected.items())


def test_a_head_of_the_input_is_for_a_start_from_a_file(desk, capsys):
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    config = input_of(["H", "O"], steps=1, model__finetune_head="water")
    assert train(config) == 0
    assert 'model.finetune_head = "water": no effect without --finetune or --init-model' in capsys.readouterr().err
    del config["model"]["finetune_head"]
    config["training"]["numb_steps"] = 2
    assert train(config, "--restart", "model.ckpt.pt") == 0, "it says nothing of how a run continues"


def test_without_a_head_the_fitting_network_of_a_multi_task_file_is_fresh(desk, capsys):
    file = PEER_FILES / "pt_heads.pt"
    config = input_of(["O", "H"], steps=1)
    config["model"] = {"type_map": ["O", "H"], "descriptor": {}, "fitting_net": {"neuron": [5]}}
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    assert train(config, "--finetune", str(file), "--use-pretrain-script") == 0
    said = capsys.readouterr().err
    assert f"{file} holds water, ice: no --model-branch chooses one, so the fitting network starts anew" in said
    assert json.loads(Path("out.json").read_text())["model"]["fitting_net"]["neuron"] == [5]


def test_options_of_another_descriptor_are_reported(trained, desk, capsys):
    config = input_of(["H", "O", "Na"], descriptor={**ATTENTION, "rcut": 3.9, "trainable": False})
    assert train(config, "--finetune", str(trained / "model.ckpt.pt")) == 0
    said = capsys.readouterr().err
    assert "model.descriptor.rcut was 4.0 where the weights were trained, is 3.9 here" in said
    assert "trainable was" not in said


BY_TYPE = {"type": "se_e2_a", "sel": [24, 24], "rcut": 4.0, "rcut_smth": 1.0, "neuron": [4, 8], "axis_neuron": 4}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            input_of(["H", "O", "Na"], descriptor={**ATTENTION, "attn_layer": 2}),
            ["-t", "FILE"],
            "missing there: descriptor",
        ),
        (input_of(["H", "O", "Na"], descriptor={**BY_TYPE, "sel": [9] * 3}), ["-t", "FILE"], "not of this model: "),
        (
            input_of(["H", "O", "Na"]),
            ["-t", "FILE", "--model-branch", "ice"],
            "so there is no head 'ice'. Leave it out",
        ),
        (input_of(["H", "O", "Na"]), ["-t", "nothing.pt"], "no such file"),
        (
            input_of(["H", "O", "Na"], model__finetune_head="water"),
            ["-t", str(PEER_FILES / "pt_heads.pt"), "--head", "ice"],
            '--model-branch ice: input.json has model.finetune_head = "water". Expected one head',
        ),
        (
            input_of(["H", "O", "Na"]),
            ["--use-pretrain-script"],
            "takes the section `model` from a file, and none is given",
        ),
        (input_of(["H", "O", "Na"]), ["-i", "FILE"], "Use the type_map of the file, or --finetune"),
        (input_of(["H", "O", "Na"]), ["-r", "FILE", "--model-branch", "x"], "--model-branch: chooses a model"),
        (input_of(["H", "O", "Na"]), ["-t", str(PEER_FILES / "pt_heads.pt"), "--head", "steam"], "no head 'steam'"),
    ],
)
def test_what_cannot_be_fine_tuned_is_a_message(config, options, message, trained, desk, capsys):
    assert train(config, *[str(trained / "model.ckpt.pt") if word == "FILE" else word for word in options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_descriptor_without_a_type_embedding_takes_another_order_only(desk, capsys):
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    assert train(input_of(["O", "H"], descriptor={**BY_TYPE, "sel": [24, 20]})) == 0
    Path("model.ckpt-2.pt").rename("first.pt")
    config = input_of(["H", "O"], steps=1, descriptor={**BY_TYPE, "sel": [24, 20]})
    assert train(config, "-t", "first.pt") == 2
    assert "sel must be [20, 24] for H O, as there" in capsys.readouterr().err
    config["model"]["descriptor"]["sel"] = [20, 24]
    assert train(config, "-t", "first.pt") == 0


@pytest.mark.parametrize("options", [[], ["--use-pretrain-script"], ["--model-branch", "RANDOM"]])
def test_networks_of_elements_with_a_new_element_are_refused_without_advice_that_leads_nowhere(desk, capsys, options):
    write_system("first", frames=4, seed=5, elements=("H", "O"))
    config = input_of(["O", "H"], steps=1, descriptor=BY_TYPE, training__training_data__systems=["first"])
    assert train(config) == 0
    Path("model.ckpt-1.pt").rename("first.pt")
    config = input_of(["Na", "H", "O"], steps=1, descriptor={**BY_TYPE, "sel": [9, 24, 24]})
    capsys.readouterr()
    assert train(config, "-t", "first.pt", *options) == 2
    said = capsys.readouterr().err
    assert "first.pt: elements O H there, Na H O here: its descriptor has networks for each element" in said
    assert "No option changes that. Train from the start, or fine-tune a model with a type embedding" in said
    assert not any(word in said for word in ("--use-pretrain-script", "RANDOM", "has length"))


def test_a_frozen_model_is_fine_tuned_with_the_sel_of_the_file(trained, desk, capsys):
    frozen = str(desk / "frozen.dp")
    assert cli.main(["convert", str(trained / "model.ckpt.pt"), frozen, "--use-ema"]) == 0
    config = input_of(["H", "O", "Na"], steps=1, descriptor={**ATTENTION, "sel": "auto"})
    assert train(config, "--finetune", frozen) == 0
    said = capsys.readouterr().err
    assert f"fine-tuning {frozen}: averaged weights (ema) of step 2" in said
    assert "model.descriptor." not in said
    assert json.loads(Path("out.json").read_text())["model"]["descriptor"]["sel"] in (60, [60])
    assert train(input_of(["H", "O", "Na"], steps=1), "--finetune", frozen) == 0
    assert "model.descriptor." not in capsys.readouterr().err


def test_a_run_in_which_no_frame_has_an_energy_keeps_the_bias(trained, desk, capsys):
    write_system("data", frames=4, seed=5, elements=("H", "O"))
    for file in Path("data").rglob("energy.npy"):
        file.unlink()
    assert train(input_of(["H", "O"], steps=1), "--finetune", str(trained / "model.ckpt.pt")) == 0
    assert "no training frame has an energy to fit the output bias to" in capsys.readouterr().err
    old, new = (checkpoint.load(file)["model"]["out_bias"] for file in (trained / "model.ckpt.pt", "model.ckpt-1.pt"))
    assert torch.equal(new, old.flip(1))


def test_a_file_is_read_once_for_a_start(trained, desk, monkeypatch):
    files, read = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **how: files.append(path) or read(path, **how))
    assert train(input_of(["H", "O", "Na"], steps=1), "--finetune", str(trained / "model.ckpt.pt")) == 0
    assert len(files) == 1
