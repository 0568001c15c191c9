"""Several tasks that start from a file: of one model or of several, of this program or of DeePMD-kit."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from config_inputs import write
from helpers import assert_same, write_system
from test_train import load
from test_train_sharing import input_of

from deepmd_ema import cli
from deepmd_ema.infer.load import load_model

pytestmark = pytest.mark.timeout(300)

PEER_FILE = str(Path(__file__).parent / "golden" / "peer_checkpoints" / "pt_heads.pt")
OF_TASK = {"out_bias", "out_std", "fitting.case_embd"}
STILL = {"start_lr": 1e-30, "stop_lr": 1e-31}  # the weights of step 1 are those of the start


def write_data(folder):
    for k, task in enumerate(("water", "ice")):
        for n in (1, 2):
            write_system(folder / f"{task}{n}", frames=4, natoms=5 + 2 * k, seed=10 * k + n)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two tasks that share all (file "all"), of two that share nothing ("nothing"), and of one ("one")."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(folder)
        for way in ("all", "nothing"):
            write(folder, input_of(way, numb_steps=4))
            assert cli.main(["train", "input.json"]) == 0
            Path("model.ckpt-4.pt").rename(f"{way}.pt")
        values = input_of("nothing", numb_steps=4)
        model, training = values["model"]["model_dict"]["water"], values["training"]
        model["fitting_net"]["dim_case_embd"] = 0
        model["type_map"] = ["O", "H"]
        data = training.pop("data_dict")["water"]
        del training["model_prob"], values["loss_dict"]
        write(folder, {**values, "model": model, "training": {**training, **data}})
        assert cli.main(["train", "input.json"]) == 0
        Path("model.ckpt-4.pt").rename("one.pt")
    return folder


@pytest.fixture
def desk(tmp_path, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(way, *options, learning_rate=STILL, heads=None, section=None):
    """Train one step that moves nothing and return the weights, live ones, by name."""
    values = input_of(way, numb_steps=1)
    values["learning_rate"] = learning_rate
    for task, head in (heads or {}).items():
        values["model"]["model_dict"][task]["finetune_head"] = head
    if section is not None:
        values["model"] = section(values["model"])
    write(Path.cwd(), values)
    assert cli.main(["train", "input.json", *options]) == 0
    return load("model.ckpt-1.pt")["model"]


def of(task, weights):
    return {name.removeprefix(f"{task}."): value for name, value in weights.items() if name.startswith(f"{task}.")}


def without(names, weights):
    return {name: value for name, value in weights.items() if name not in names}


def test_each_task_starts_from_the_model_that_it_names(trained, desk, capsys):
    before = load(trained / "nothing.pt")["model"]
    after = start("nothing", "--finetune", str(trained / "nothing.pt"), heads={"water": "ice", "ice": "water"})
    said = capsys.readouterr().err
    assert "fine-tuning task water from" in said
    assert "output bias of task ice moved by a fit of label minus prediction" in said
    for task, head in (("water", "ice"), ("ice", "water")):
        assert_same(without(OF_TASK, of(task, after)), without(OF_TASK, of(head, before)))
        assert not torch.equal(of(task, after)["out_bias"], of(head, before)["out_bias"])


def test_a_task_without_a_head_continues_from_the_model_of_its_name_and_another_is_fresh(trained, desk, capsys):
    def renamed(model):
        models = model["model_dict"]
        return {**model, "model_dict": {"steam": models["ice"], "water": models["water"]}}

    values = input_of("nothing", numb_steps=1)
    before = load(trained / "nothing.pt")["model"]
    values["learning_rate"], values["model"] = STILL, renamed(values["model"])
    data = values["training"]["data_dict"]
    values["training"] |= {"data_dict": {"water": data["water"], "steam": data["ice"]}, "model_prob": {}}
    del values["loss_dict"]
    write(desk, values)
    assert cli.main(["train", "input.json", "--finetune", str(trained / "nothing.pt")]) == 0
    said = capsys.readouterr().err
    assert "holds water, ice: no model.model_dict.steam.finetune_head chooses one" in said
    assert "output bias" not in said
    after = load("model.ckpt-1.pt")["model"]
    assert_same(of("water", after), of("water", before))
    steam, first = of("steam", after), of("water", before)
    for name in steam:
        if name.endswith("weight") or name == "out_bias":
            assert torch.equal(steam[name], first[name]) == name.startswith("descriptor"), name


def test_what_tasks_share_comes_from_the_first_and_cases_stay_apart(trained, desk):
    before = load(trained / "nothing.pt")["model"]
    after = start("all", "--finetune", str(trained / "nothing.pt"), heads={"water": "ice"})
    shared = {name for name in of("ice", before) if name not in OF_TASK}
    for task in ("water", "ice"):
        assert_same({n: of(task, after)[n] for n in shared}, {n: of("ice", before)[n] for n in shared})
    # ice continues with its case, water cannot have the same with the same network
    assert torch.equal(of("ice", after)["fitting.case_embd"], of("ice", before)["fitting.case_embd"])
    assert int(of("water", after)["fitting.case_embd"].argmax()) == int(
        of("water", before)["fitting.case_embd"].argmax()
    )


def test_a_fresh_task_takes_the_network_that_it_shares_from_the_file(trained, desk):
    before = load(trained / "all.pt")["model"]
    after = start("all", "--finetune", str(trained / "all.pt"), heads={"water": "RANDOM"})
    nets = {name for name in of("ice", before) if name.startswith("fitting.nets")}
    assert_same({n: of("water", after)[n] for n in nets}, {n: of("ice", before)[n] for n in nets})
    cases = [int(of(task, after)["fitting.case_embd"].argmax()) for task in ("water", "ice")]
    assert sorted(cases) == [0, 1]
    assert cases[1] == int(of("ice", before)["fitting.case_embd"].argmax())


@pytest.mark.parametrize("head", [None, "Default"])
def test_several_tasks_start_from_one_model(head, trained, desk, capsys):
    before = load(trained / "one.pt")["model"]

    def no_cases(model):
        for section in model["model_dict"].values():
            section["fitting_net"]["dim_case_embd"] = 0
        return model

    heads = dict.fromkeys(("water", "ice"), head) if head else {}
    after = start("nothing", "--finetune", str(trained / "one.pt"), heads=heads, section=no_cases)
    said = capsys.readouterr().err
    assert ("holds one model: no model.model_dict.ice.finetune_head" in said) == (head is None)
    for task in ("water", "ice"):
        now = of(task, after)
        for name in before:
            if name.endswith("weight"):
                same = name.startswith("descriptor") or head is not None
                assert torch.equal(now[name], before[name]) == same, (task, name)


def test_the_sections_of_a_file_are_taken_for_several_tasks(desk):
    """Also where tasks share them, and but for ``trainable``."""
    section = {
        "shared_dict": {"elements": ["H", "O"], "any": {"trainable": False}},
        "model_dict": {
            "water": {"type_map": "elements", "descriptor": "any", "fitting_net": {}},
            "ice": {
                "type_map": "elements",
                "descriptor": "any",
                "fitting_net": {"neuron": [5]},
                "finetune_head": "RANDOM",
            },
        },
    }
    after = start("nothing", "--finetune", PEER_FILE, "--use-pretrain-script", section=lambda model: section)
    expected = load_model(PEER_FILE, head="water")
    out = json.loads(Path("out.json").read_text())["model"]
    assert out["shared_dict"]["any"] == {**expected.info.config["model"]["descriptor"], "trainable": False}
    assert out["model_dict"]["water"]["fitting_net"] == expected.info.config["model"]["fitting_net"]
    assert out["model_dict"]["ice"]["fitting_net"]["neuron"] == [5]
    back = expected.model.type_map.index("H"), expected.model.type_map.index("O")
    bias = of("water", after)["out_bias"]
    assert torch.equal(bias, expected.model.out_bias[:, list(back)]), "water keeps the energies of its elements"


def peer_section(**changes):
    """Return the models of DeePMD-kit's file as an input has them, which share their descriptor."""
    models = {head: load_model(PEER_FILE, head=head).info.config["model"] for head in ("water", "ice")}
    section = {
        "shared_dict": {"elements": models["water"]["type_map"], "desc": models["water"]["descriptor"]},
        "model_dict": {
            head: {"type_map": "elements", "descriptor": "desc", "fitting_net": model["fitting_net"]}
            for head, model in models.items()
        },
    }
    return copy.deepcopy({**section, **changes})


def test_tasks_start_from_all_models_of_a_checkpoint_of_deepmd_kit(desk, capsys):
    after = start("nothing", "--init-model", PEER_FILE, section=lambda model: peer_section())
    for head in ("water", "ice"):
        expected = dict(load_model(PEER_FILE, head=head).model.state_dict())
        assert_same(without({"out_std"}, of(head, after)), without({"out_std"}, expected))


@pytest.mark.parametrize(
    ("way", "heads", "options", "message"),
    [
        ("nothing", {}, ["--finetune", "nothing.pt", "--model-branch", "ice"], "input.json has several tasks. Name"),
        ("nothing", {"ice": "steam"}, ["--finetune", "nothing.pt"], "no head 'steam'. It has water, ice"),
        ("nothing", {"ice": "water"}, ["--finetune", "one.pt"], "so there is no head 'water'"),
        (
            "nothing",
            {"ice": "Default"},
            ["--finetune", "one.pt"],
            'fresh fitting network ("finetune_head": "RANDOM" in model.model_dict.ice)',
        ),
        (
            "nothing",
            {},
            ["--init-model", PEER_FILE, "--use-pretrain-script"],
            "has several models and does not say what they share",
        ),
        ("nothing", {}, ["--init-model", "one.pt"], "one model without a name, and none for water, ice of the input"),
    ],
)
def test_what_several_tasks_cannot_start_from_is_a_message(way, heads, options, message, trained, desk, capsys):
    values = input_of(way, numb_steps=1)
    for task, head in heads.items():
        values["model"]["model_dict"][task]["finetune_head"] = head
    write(desk, values)
    assert cli.main(["train", "input.json", options[0], str(trained / options[1]), *options[2:]]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_one_task_needs_one_model_of_several(trained, desk, capsys):
    values = json.loads((trained / "input.json").read_text())
    write(desk, values)
    assert cli.main(["train", "input.json", "--init-model", str(trained / "all.pt")]) == 2
    assert "holds the models water, ice, and the input has one task. Choose" in capsys.readouterr().err


def test_heads_have_no_effect_where_all_models_are_taken(trained, desk, capsys):
    start("all", "--init-model", str(trained / "all.pt"), heads={"ice": "water"})
    said = 'model.model_dict.ice.finetune_head = "water": no effect without --finetune'
    assert said in capsys.readouterr().err


def test_a_restart_of_a_fine_tuned_run_of_two_tasks_is_exact(trained, desk):
    values = input_of("all")
    values["model"]["model_dict"]["water"]["finetune_head"] = "ice"
    write(desk, values)
    assert cli.main(["train", "input.json", "--finetune", str(trained / "all.pt")]) == 0
    whole = {name: load(name) for name in ("model.ckpt-8.pt", "model_ema.ckpt-8.pt")}
    assert cli.main(["train", "input.json", "--restart", "model.ckpt-4.pt"]) == 0
    for name, content in whole.items():
        assert_same(load(name), content, name)


def test_a_network_measures_the_parameters_of_frames_the_same_for_a_task_that_comes_later(desk):
    """The new task had the mean of all data now, and the others that of before."""
    for folder in desk.iterdir():
        np.save(folder / "set.000" / "fparam.npy", np.random.default_rng(len(folder.name)).normal(3, 2, (4, 1)))
    values = input_of("all", numb_steps=4)
    values["model"]["shared_dict"]["net"] |= {"numb_fparam": 1, "dim_case_embd": 3}
    write(desk, values)
    assert cli.main(["train", "input.json"]) == 0
    models, training = values["model"]["model_dict"], values["training"]
    models["steam"] = models["water"]
    training["data_dict"]["steam"] = {"training_data": {"systems": ["ice2"]}}
    training["model_prob"]["steam"] = 0.5
    training["numb_steps"] = 5
    write(desk, values)
    assert cli.main(["train", "input.json", "--restart", "model.ckpt-4.pt", "--allow-config-change"]) == 0
    after = load("model.ckpt-5.pt")["model"]
    for name in ("fitting.fparam_avg", "fitting.fparam_inv_std"):
        assert torch.equal(of("steam", after)[name], of("water", after)[name])
        assert torch.equal(of("ice", after)[name], of("water", after)[name])
