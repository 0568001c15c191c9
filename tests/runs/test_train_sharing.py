"""Tasks that share parts of their models: what is one tensor, what stays with each task, with every
optimizer.
"""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from config_inputs import write
from helpers import assert_same
from parallel_cases import assert_near
from parallel_runs import train as train_ranks
from shared_tasks import DPA, NET, WAYS, input_of, write_data
from shared_tasks import desk as desk
from training_runs import load

from deepmd_ema import cli
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.optim.lkf import LKF

pytestmark = pytest.mark.timeout(480)


def shared_names(weights):
    """Return the names, without the task, of tensors that both tasks have with equal values."""
    own = {
        task: {
            n.removeprefix(f"{task}."): t
            for n, t in weights.items()
            if n.startswith(f"{task}.")
        }
        for task in ("water", "ice")
    }
    both = own["water"].keys() & own["ice"].keys()
    return {
        n
        for n in both
        if own["water"][n].is_floating_point()
        and torch.equal(own["water"][n], own["ice"][n])
    }


@pytest.mark.parametrize("way", list(WAYS))
def test_what_is_shared_stays_equal_and_what_is_not_goes_apart(way, desk, capsys):
    write(desk, input_of(way))
    assert cli.main(["train", "input.json"]) == 0
    said = capsys.readouterr().err
    assert "heads     water, ice" in said
    assert "dp-ema freeze -c model_ema.ckpt.pt --head water" in said
    for file in ("model.ckpt.pt", "model_ema.ckpt.pt"):
        shared = shared_names(load(desk / file)["model"])
        nets = {n for n in shared if n.startswith("fitting.nets")}
        embedding = {n for n in shared if "type_embedding" in n}
        rest = {
            n for n in shared if n.startswith("descriptor") and n.endswith("weight")
        } - embedding
        assert bool(nets) == (way in ("all", "the fitting network"))
        assert bool(embedding) == (way in ("all", "the type embedding"))
        assert bool(rest) == (way == "all")
        if way == "a part of a hybrid":
            weights = load(desk / file)["model"]
            first, second = "water.descriptor.parts.0.", "ice.descriptor."
            same = {
                n.removeprefix(first): t
                for n, t in weights.items()
                if n.startswith(first)
            }
            assert_same(
                same,
                {
                    n.removeprefix(second): t
                    for n, t in weights.items()
                    if n.startswith(second)
                },
            )
        assert "out_bias" not in shared
        assert "fitting.case_embd" not in shared


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """A run of two tasks that share all."""
    folder = tmp_path_factory.mktemp("run")
    write_data(folder)
    write(folder, input_of("all"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "input.json"]) == 0
    return folder


@pytest.fixture
def at_run(shared_run, monkeypatch):
    monkeypatch.chdir(shared_run)


def test_each_head_is_a_model_of_its_own_live_and_averaged(at_run):
    coord, types = np.random.default_rng(0).uniform(0, 4, (6, 3)), ["O", "H"] * 3
    energies = set()
    for words in ([], ["--use-ema"]):
        for head in ("water", "ice"):
            loaded = load_model("model.ckpt.pt", head=head, use_average=bool(words))
            energy = Potential(loaded, device="cpu").evaluate(coord, types).energy
            assert (
                cli.main(["freeze", "--head", head.upper(), "-o", "head.dp", *words])
                == 0
            )
            np.testing.assert_allclose(
                Potential("head.dp", device="cpu").evaluate(coord, types).energy,
                energy,
                rtol=1e-12,
            )
            energies.add(float(np.ravel(energy)[0]))
        own = load_model("model_ema.ckpt.pt", head="ice").model.state_dict()
    assert_same(dict(own), dict(loaded.model.state_dict()))
    assert len(energies) == 4


def test_the_energies_of_one_head_change_in_a_file_of_all(at_run, capsys):
    before = load("model.ckpt-8.pt")["model"]
    assert (
        cli.main(
            [
                "change-bias",
                "model.ckpt.pt",
                "-s",
                "ice2",
                "--head",
                "ICE",
                "-o",
                "one.pt",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "model.ckpt.pt: ice, live weights of step 8\noutput bias: moved by a fit"
        in said
    )
    assert "wrote one.pt, in which water stays as it is" in said
    after = load("one.pt")["model"]
    own = {"ice.out_bias", "ice.out_std"}
    assert_same(
        {n: v for n, v in after.items() if n not in own},
        {n: v for n, v in before.items() if n not in own},
    )
    assert not torch.equal(after["ice.out_bias"], before["ice.out_bias"])
    assert (
        cli.main(
            [
                "change-bias",
                "one.pt",
                "-b",
                "-3",
                "-2",
                "--head",
                "water",
                "-o",
                "both.pt",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert cli.main(["show", "both.pt"]) == 0
    said = capsys.readouterr().out
    assert "water: set to values given" in said
    assert "ice: moved by a fit of label minus prediction, 4 frames of ice2" in said
    assert load("both.pt")["model"]["water.out_bias"].view(-1).tolist() == [-3, -2]


def test_without_a_head_the_message_names_them(at_run, capsys):
    values = input_of("all")
    parts, training = values["model"]["shared_dict"], values["training"]
    one = {"type_map": parts["elements"], "descriptor": DPA, "fitting_net": NET}
    training |= training.pop("data_dict")["ice"]
    del training["model_prob"], values["loss_dict"]
    write(Path(), {**values, "model": one}, "one.json")
    which = "several models; which? It has water, ice: choose one with --head."
    alone = "of several tasks (ice, water), and the input has one task"
    for words, phrase in (
        (["train", "--restart", "model.ckpt.pt", "one.json"], alone),
        (
            ["train", "--init-model", "model.ckpt.pt", "--head", "steam", "one.json"],
            "--model-branch or finetune_head.",
        ),
        (["freeze"], which),
        (["test", "-m", "model.ckpt.pt", "-s", "ice2"], which),
        (["change-bias", "model.ckpt.pt"], which),
    ):
        assert cli.main(words) == 2
        assert phrase in capsys.readouterr().err
    assert (
        cli.main(
            [
                "test",
                "-m",
                "model.ckpt.pt",
                "--head",
                "ICE",
                "--valid-data",
                "input.json",
            ]
        )
        == 0
    )
    assert "model.ckpt.pt: ice, live weights of step 8" in capsys.readouterr().out


def test_averages_found_after_training_are_ranked_by_the_errors_of_a_task(desk, capsys):
    averages = [
        {"name": f"p{n}", "type": "power", "sigma_rel": n / 100, "snapshots": True}
        for n in (5, 10)
    ]
    values = input_of(
        "all", averaging=averages, numb_steps=24, save_freq=2, save_dir="files"
    )
    del values["training"]["enable_ema"], values["training"]["ema_decay"]
    write(desk, values)
    assert cli.main(["train", "input.json"]) == 0
    assert cli.main(["posthoc", "."]) == 2
    assert "choose one with --head" in capsys.readouterr().err
    assert cli.main(["posthoc", ".", "--head", "ice"]) == 0
    made = load_model("model_posthoc.pt", head="water")
    assert made.info.weights == "posthoc"
    assert shared_names(load(desk / "model_posthoc.pt")["model"]) >= {
        "fitting.nets.0.layers.0.weight"
    }


def test_epochs_of_each_task_give_the_length_and_the_shares(desk, capsys):
    values = input_of("nothing", num_epoch_dict={"water": 3, "ice": 1}, model_prob={})
    del values["training"]["numb_steps"]
    write(desk, values)
    assert cli.main(["train", "input.json"]) == 0
    assert load(desk / "model.ckpt.pt")["step"] == 8  # 2 batches of each: 3 x 2 + 1 x 2


def with_steam(values):
    """Return the input with a third task, which is never drawn, before the others."""
    values = copy.deepcopy(values)
    steam = copy.deepcopy(values["model"]["model_dict"]["water"])
    values["model"]["model_dict"] = {"steam": steam, **values["model"]["model_dict"]}
    values["training"]["data_dict"]["steam"] = {
        "training_data": {"systems": ["ice2"], "batch_size": 1}
    }
    values["training"]["model_prob"]["steam"] = 0
    return values


@pytest.mark.parametrize(
    ("way", "change"), [("all", "added"), ("all", "removed"), ("nothing", "removed")]
)
def test_tasks_that_stay_continue_bitwise_when_another_comes_or_goes(
    way, change, desk, capsys
):
    # room for a third case
    few = json.loads(
        json.dumps(input_of(way)).replace('"dim_case_embd": 2', '"dim_case_embd": 3')
    )
    many = with_steam(few)
    before, after = (few, many) if change == "added" else (many, few)
    write(desk, before)
    write(desk, after, "after.json")
    assert cli.main(["train", "input.json"]) == 0
    whole = {
        name: load(desk / name) for name in ("model.ckpt-8.pt", "model_ema.ckpt-8.pt")
    }
    assert cli.main(["train", "--restart", "model.ckpt-4.pt", "after.json"]) == 2
    assert (
        f"task steam: {'new' if change == 'added' else 'in the checkpoint only'}"
        in capsys.readouterr().err
    )
    assert (
        cli.main(
            [
                "train",
                "--restart",
                "model.ckpt-4.pt",
                "after.json",
                "--allow-config-change",
            ]
        )
        == 0
    )
    for name, unbroken in whole.items():
        now = load(desk / name)
        stay = [n for n in now["model"] if n.startswith(("water.", "ice."))]
        assert_same(
            {n: now["model"][n] for n in stay},
            {n: unbroken["model"][n] for n in stay},
            name,
        )
    cases = [
        now["model"][f"{task}.fitting.case_embd"]
        for task in after["model"]["model_dict"]
    ]
    assert len({int(case.argmax()) for case in cases}) == len(cases)
    if change == "added":
        first, second = (
            now["model"][f"{task}.descriptor.block.mean"] for task in ("steam", "water")
        )
        assert torch.equal(first, second)


KINDS = {
    "Adam": {},
    "AdamW": {"weight_decay": 0.01},
    "AdaMuon": {},
    "HybridMuon": {"enable_gram": False},
    "LKF": {"kf_blocksize": 64, "kf_start_pref_f": 2.0},
}
STEPS, HALF = 8, 4
FILES = (f"model.ckpt-{STEPS}.pt", f"model_ema.ckpt-{STEPS}.pt")


def config_of(way, kind, **training):
    """Return the input of two tasks for one optimizer."""
    values = input_of(way, **training)
    if kind == "LKF":
        del values["loss_dict"]  # it fits no virials
    return {**values, "optimizer": {"type": kind, **KINDS[kind]}}


@pytest.mark.parametrize(
    ("way", "kind", "stage"),
    [
        ("all", "Adam", 3),
        ("the type embedding", "Adam", 3),
        ("all", "AdaMuon", 1),
        ("all", "HybridMuon", 2),
    ],
)
def test_two_ranks_train_what_tasks_share_as_one_process_does(
    tmp_path, way, kind, stage
):
    """With all in common stages 2 and 3 had failed."""
    for ranks, zero_stage in ((1, 0), (2, stage)):
        values = config_of(way, kind, zero_stage=zero_stage)
        for task in values["training"]["data_dict"].values():
            task["training_data"]["batch_size"] = 2 // ranks
        write_data(tmp_path / str(ranks))
        train_ranks(tmp_path / str(ranks), ranks, values)
    for name in FILES:  # moments of Adam beside Muon are in float32
        assert_near(
            load(tmp_path / "1" / name), load(tmp_path / "2" / name), tolerance=1e-6
        )


def trained(values, *options):
    """Train and return the last checkpoint."""
    write(Path(), values)
    assert cli.main(["train", "input.json", *options]) == 0
    return load("model.ckpt.pt")


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_with_shared_parts_is_the_same_run_to_the_last_bit(kind):
    values = config_of("the fitting network", kind)
    whole, first = trained(values), load(f"model.ckpt-{HALF}.pt")["model"]
    again = trained(values, "--restart", f"model.ckpt-{HALF}.pt")
    for part in ("model", "optimizer", "averages"):
        assert_same(whole[part], again[part])
    for name in first:
        assert not (
            name.endswith("weight") and torch.equal(first[name], whole["model"][name])
        ), name


def test_weights_of_other_tasks_share_no_block_and_stay_as_they_are():
    tasks = {"shared": ["a", "b"], "own": ["a"], "other": ["b"]}
    parameters = {
        name: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for name in tasks
    }
    alone = {
        name: torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        for name in ("shared", "own")
    }
    both, one = LKF(parameters.items(), 100, tasks), LKF(alone.items(), 3)
    assert [len(c) for c in both.state_dict()["covariances"]] == [3, 3, 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradients = [
            torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2)
        ]
        error = torch.tensor(0.3, dtype=torch.float64)
        both.update(gradients, error, torch.ones(()), "a")
        one.update(gradients, error, torch.ones(()))
    assert_same(
        {name: parameters[name].detach() for name in alone},
        {n: p.detach() for n, p in alone.items()},
    )
    assert torch.equal(parameters["other"], torch.ones(3, dtype=torch.float64))
    *_, untouched = both.state_dict()["covariances"]
    assert torch.equal(untouched, torch.eye(3, dtype=torch.float64))


@pytest.mark.usefixtures("desk")
def test_covariances_do_not_continue_with_other_tasks(capsys):
    values = config_of("all", "LKF", numb_steps=2, save_freq=2)
    trained(values)
    for section in (
        values["model"]["model_dict"],
        values["training"]["data_dict"],
        values["training"]["model_prob"],
    ):
        del section["ice"]
    write(Path(), values)
    assert (
        cli.main(
            [
                "train",
                "input.json",
                "--restart",
                "model.ckpt-2.pt",
                "--allow-config-change",
            ]
        )
        == 2
    )
    assert (
        'optimizer.type = "LKF": its covariances are of blocks'
        in capsys.readouterr().err
    )
