"""The output bias of a model of a file on data: a shift of each element is moved, an error of a
model is not.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_input, write_system
from training_runs import load

from deepmd_ema.cli import main
from deepmd_ema.config import load_config, model_config_from_dict
from deepmd_ema.model.build import build_model
from deepmd_ema.model.element_mapping import carried_over
from deepmd_ema.model.output_bias import FrameEnergies, move_bias, with_given_energies

ELEMENTS = ["O", "H", "C"]
GAP = {"type": "property", "property_name": "gap", "neuron": [4]}
KINDS = {
    "energy": {"type": "ener", "neuron": [4]},
    "gap": {**GAP, "intensive": True},
    "magnetization": {**GAP, "task_dim": 2},
    "one for all": {**GAP, "distinguish_types": False},
    "dos": {"type": "dos", "numb_dos": 4, "neuron": [4]},
    "polar": {"type": "polar", "neuron": [4], "scale": [2.0, 0.5, 1.0]},
}
MIXED = {
    "type": "se_atten",
    "sel": 20,
    "rcut": 4.0,
    "neuron": [2, 4],
    "axis_neuron": 2,
    "attn_layer": 0,
}
SHAPES = {
    "energy": (),
    "gap": (1,),
    "magnetization": (2,),
    "one for all": (1,),
    "dos": (4,),
    "polar": (9,),
}


def gathered(kind, shift, noise, frames=20, seed=0, **model):
    """Return frames whose labels differ from the predictions by ``shift`` (T, ...) of the bias, and
    ``noise``.
    """
    rng, shape = np.random.default_rng(seed), SHAPES[kind]
    values = (
        tiny_input(["data"], type_map=ELEMENTS, model__fitting_net=KINDS[kind])["model"]
        | model
    )
    found = FrameEnergies(model_config_from_dict(values))
    found._counts.append(rng.integers(1, 9, (frames, 3)).astype(float))
    found._predicted.append(rng.normal(size=(frames, *shape)))
    noise = (
        noise
        * rng.normal(size=(frames, *shape))
        * (1 if found.config.fitting_net.intensive else 15)
    )
    found._labels.append(found._predicted[0] + found.effect @ shift + noise)
    return found


def shift_of(kind, size, seed=1):
    """Return a shift of each element as a model of this kind can have it."""
    shift = size * (1 + np.random.default_rng(seed).random((3, *SHAPES[kind])))
    if kind == "one for all":
        shift[:] = shift[0]
    return np.eye(3).ravel() * shift[:, :1] if kind == "polar" else shift


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "noise"), [(100.0, 0.1), (-1.0, 0.05), (0.0, 0.1), (0.02, 0.1), (0.0, 0.0)]
)
def test_a_shift_is_moved_and_an_error_is_not(kind, size, noise):
    bias, std = shift_of(kind, 5.0, seed=2), np.ones((3, *SHAPES[kind]))
    frames = gathered(kind, shift := shift_of(kind, size), noise)
    found = move_bias(frames, bias, std)
    assert found.is_moved == (abs(size) >= 1.0)
    if not found.is_moved:
        np.testing.assert_array_equal(found.bias, bias)
        assert "no other reference" in found.evidence(frames.config)
        return
    np.testing.assert_allclose(found.bias - bias, shift, atol=5 * noise)
    assert np.sign(found.shift) == np.sign(size)
    factor = np.ravel(frames.config.fitting_net.bias_effect).mean()
    assert abs(size) * min(1, factor) < abs(found.shift) * 3 < 9 * abs(size)
    assert found.spread < 3 * noise
    kept = move_bias(frames, bias, std, how="keep")
    np.testing.assert_array_equal(kept.bias, bias)
    assert kept.is_of_another_method
    assert ": another reference" in kept.evidence(frames.config)


def test_a_bias_that_is_one_for_all_moves_with_elements_that_the_data_lack():
    """Predictions take it from the first element."""
    frames = gathered("one for all", 0 * shift_of("one for all", 1.0), 0.01)
    frames._counts[0][:, 0] = 0
    frames._labels[0] = frames._predicted[0] + 40.0 * frames.counts.sum(
        1, keepdims=True
    )
    found = move_bias(frames, np.zeros((3, 1)), np.ones((3, 1)))
    assert found.is_moved
    np.testing.assert_allclose(found.bias, 40.0)


@pytest.mark.parametrize(("size", "is_moved"), [(0.03, False), (0.08, True)])
def test_an_even_error_of_a_model_is_no_shift_of_energies(size, is_moved):
    """Of frames of a phase of its own a model is wrong by nearly the same."""
    frames = gathered("energy", np.full(3, size), 0.001)
    assert move_bias(frames, np.zeros(3), np.ones(3)).is_moved == is_moved


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_elements_does_not_matter(kind):
    bias, std, order = (
        shift_of(kind, 5.0, seed=2),
        np.ones((3, *SHAPES[kind])),
        [2, 0, 1],
    )
    frames = gathered(kind, shift_of(kind, 3.0), 0.1)
    other = gathered(kind, shift_of(kind, 3.0), 0.1)
    other._counts[0] = other._counts[0][:, order]
    if kind == "polar":
        fitting = {**KINDS[kind], "scale": [KINDS[kind]["scale"][k] for k in order]}
        other.config = model_config_from_dict(
            tiny_input(["x"], type_map=ELEMENTS, model__fitting_net=fitting)["model"]
        )
    for how in ("fit", "keep"):
        here, there = (
            move_bias(*of, std, new, how)
            for *of, new in ((frames, bias, "C"), (other, bias[order], "O"))
        )
        np.testing.assert_allclose(here.bias[order], there.bias, rtol=1e-9)


@pytest.mark.parametrize("how", ["keep", "auto"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "one for all"])
def test_new_elements_explain_what_the_known_ones_leave(kind, how):
    """Their part of a fit of all elements, beside the biases of the file, explained nothing."""
    shift, bias = shift_of(kind, 200.0), shift_of(kind, 5.0, seed=2)
    shift[:2] = 0
    found = move_bias(
        frames := gathered(kind, shift, 0.01), bias, np.ones_like(bias), ["C"], how
    )
    assert not found.is_moved
    np.testing.assert_array_equal(found.bias[:2], bias[:2])
    np.testing.assert_allclose(frames.residual(found.bias - bias) / 15, 0, atol=0.1)


def test_energies_that_the_input_gives_hold_and_the_others_are_fitted():
    """A preset was ignored: the bias of an element stayed as in the file."""
    shift = np.array([-30.0, 0.0, 7.0])
    frames = gathered(
        "energy", shift, 0.0, preset_out_bias={"energy": [None, -13.0, None]}
    )
    bias = with_given_energies(frames.config, np.array([-400.0, -10.0, -90.0]))
    for how, others in (("auto", shift), ("fit", shift), ("keep", 0 * shift)):
        found = move_bias(frames, bias, np.ones(3), how=how)
        np.testing.assert_allclose(
            found.bias, [bias[0] + others[0], -13.0, bias[2] + others[2]], atol=1e-9
        )


def test_excluded_elements_keep_their_bias():
    frames = gathered(
        "energy", np.array([50.0, 60.0, 0.0]), 0.01, atom_exclude_types=[2]
    )
    found = move_bias(frames, np.zeros(3), np.ones(3))
    np.testing.assert_allclose(found.bias, [50, 60, 0], atol=0.2)


@pytest.mark.parametrize(("std", "is_moved"), [(1.0, True), (1e4, False)])
def test_a_frame_alone_is_judged_by_the_spread_in_the_data_of_the_file(std, is_moved):
    frames = gathered("energy", np.full(3, 40.0), 0.01, frames=1)
    assert move_bias(frames, np.zeros(3), np.full(3, std)).is_moved == is_moved


@pytest.mark.parametrize("distinguish", [True, False])
@pytest.mark.parametrize(
    "type_map", [["C", "O", "H"], ["O", "C", "H"], ["H", "O", "C"]]
)
def test_a_new_element_changes_nothing_of_a_property_at_any_place(
    type_map, distinguish
):
    """Predictions were 99.9 in place of 10.97, and the unit of the loss was that of the new
    data.
    """
    fitting = {**GAP, "distinguish_types": distinguish}
    old, new = (
        build_model(
            model_config_from_dict(
                {"type_map": elements, "descriptor": MIXED, "fitting_net": fitting}
            ),
            1,
        )
        for elements in (["O", "H"], type_map)
    )
    old.out_std.fill_(3.0)
    old.out_bias.copy_(torch.tensor([[[1.0], [2.0 if distinguish else 1.0]]]))
    new.out_std.fill_(100.0)
    new.out_bias.fill_(50.0)
    state = carried_over(old, new)
    assert torch.equal(state["out_std"], torch.full_like(state["out_std"], 3.0))
    expected = {
        "O": 1.0,
        "H": 2.0 if distinguish else 1.0,
        "C": 50.0 if distinguish else 1.0,
    }
    assert state["out_bias"].flatten().tolist() == [expected[name] for name in type_map]


SHIFTS = np.array([-430.0, -15.0])  # eV, of O and H in another method


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model that was trained, and data of its method and of another one."""
    folder = tmp_path_factory.mktemp("moves")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_system("same", frames=10, seed=1)
        write_system("other", frames=10, seed=2)
        system = Path("other")
        types = np.loadtxt(system / "type.raw", dtype=int)
        energy = np.load(system / "set.000/energy.npy")
        np.save(system / "set.000/energy.npy", energy + SHIFTS[types].sum())
        Path("input.json").write_text(json.dumps(tiny_input(["same"], num_steps=10)))
        assert main(["train", "input.json"]) == 0
        # after 10 steps its energies are off by 0.14 eV/atom
        assert (
            main(["change-bias", "model.ckpt-10.pt", "-s", "same", "-o", "old.pt"]) == 0
        )
    return folder


@pytest.mark.parametrize(
    ("data", "choice", "words"),
    [
        ("same", "keep", "no other reference"),
        ("other", "fit", "another reference"),
    ],
)
def test_what_init_writes_follows_from_the_errors_of_the_model(
    base, tmp_path, monkeypatch, capsys, data, choice, words
):
    """The input had ``keep`` whatever the labels were: forces went from 252 to 4,369
    meV/angstrom.
    """
    monkeypatch.chdir(base)
    target = tmp_path / "input.yaml"
    assert (
        main(["init", data, "--finetune", "old.pt", "--steps", "2", "-o", str(target)])
        == 0
    )
    assert words in (printed := capsys.readouterr().out)
    assert words in target.read_text()
    assert load_config(str(target)).task(None).model.finetune_bias == choice
    replay = ["--replay", "same", "-o", str(tmp_path / "replay.yaml")]
    assert main(["init", data, "--finetune", "old.pt", "--steps", "2", *replay]) == 0
    models = load_config(str(tmp_path / "replay.yaml")).tasks
    assert {name: task.model.finetune_bias for name, task in models.items()} == {
        "new": choice,
        "old": "keep",
    }
    if data == "other":  # 12 atoms
        assert (
            f"energies differ by {SHIFTS[np.loadtxt('other/type.raw', dtype=int)].mean():.3g}"
            in printed
        )


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            "same",
            {},
            ": no other reference, on 10 training frames: the output bias stays as in old.pt",
        ),
        (
            "other",
            {},
            ": another reference, on 10 training frames: the output bias was moved",
        ),
        (
            "other",
            {"model__finetune_bias": "keep"},
            'model.finetune_bias = "fit" moves it',
        ),
        (
            "other",
            {"start": "--init-model"},
            "--finetune in place of --init-model moves it",
        ),
        ("same", {"start": "--init-model"}, ""),
    ],
)
def test_a_start_reports_whether_the_labels_are_of_another_method(
    here, base, capsys, data, options, message
):
    for name in (data, "old.pt"):
        Path(name).symlink_to(base / name)
    way = options.pop("start", "--finetune")
    Path("input.json").write_text(
        json.dumps(tiny_input([data], num_steps=1, **options))
    )
    assert main(["train", "input.json", way, "old.pt"]) == 0
    err = capsys.readouterr().err
    assert message in err if message else "reference" not in err
    before, after = (
        load(file)["model"]["out_bias"] for file in ("old.pt", "model.ckpt-1.pt")
    )
    assert torch.equal(before, after) == ("was moved" not in message)


@pytest.mark.parametrize("way", ["--finetune", "--init-model"])
def test_a_preset_holds_in_fine_tuning_and_is_named_elsewhere(here, base, capsys, way):
    """Its bias was that of the file, while a warning stated that the preset holds."""
    for name in ("same", "old.pt"):
        Path(name).symlink_to(base / name)
    values = tiny_input(
        ["same"], num_steps=1, model__preset_out_bias={"energy": [-90.0, None]}
    )
    values["model"]["descriptor"]["set_davg_zero"] = True
    Path("input.json").write_text(json.dumps(values))
    assert main(["train", "input.json", way, "old.pt"]) == 0
    after = load("model.ckpt-1.pt")["model"]["out_bias"].flatten()
    err = capsys.readouterr().err
    assert (after[0] == -90.0) == (way == "--finetune")
    assert (
        "energies that the input gives for O have no effect with --init-model" in err
    ) == (after[0] != -90.0)
    assert way == "--finetune" or "another reference" not in err


def test_energies_of_weight_0_are_in_no_bias(here, base, capsys):
    """A placeholder of 0 eV moved the bias by 2 eV per atom, of a new model and of one that is
    fine-tuned.
    """
    shutil.copytree(base / "same", "same")
    energy = np.load("same/set.000/energy.npy")
    weight = np.arange(10) >= 4
    np.save("same/set.000/energy.npy", np.where(weight, energy, 0.0))
    np.save("same/set.000/energy_weight.npy", weight.astype(float))
    Path("old.pt").symlink_to(base / "old.pt")
    values = tiny_input(
        ["same"],
        num_steps=1,
        model__finetune_bias="fit",
        training__change_bias_after_training=True,
    )
    values["training"]["training_data"]["frame_weights"] = True
    Path("input.json").write_text(json.dumps(values))
    assert main(["train", "input.json", "--finetune", "old.pt"]) == 0
    assert re.search(
        r"differ by \S+ eV/atom \(spread 0.0\d+\).*, on 6 training frames",
        capsys.readouterr().err,
    )
    assert main(["train", "input.json"]) == 0
    bias = load("model.ckpt-1.pt")["model"]["out_bias"].flatten()
    composition = np.bincount(np.loadtxt("same/type.raw", dtype=int))
    assert abs(composition @ bias.numpy() - energy[4:].mean()) < 0.5
    fitted = load("model.ckpt-1.pt")["refitted"]["live"]["out_bias"].flatten()
    assert abs(composition @ fitted.numpy() - energy[4:].mean()) < 2.0
