"""Weights of frames: read from every format, and in every form of a batch what single frames summed
up give.
"""

import json
import re

import numpy as np
import pytest
import torch
from flat_batches import COMPARED, flat_batch, predicted, random_frame
from helpers import open_data, tiny_input, trains_in, write_system
from loss_cases import LOSSES
from training_runs import load

from deepmd_ema import cli
from deepmd_ema.config.labels import WEIGHT, WEIGHTS
from deepmd_ema.config.schema.optim import EnerLossConfig as Config
from deepmd_ema.data.convert import convert_data
from deepmd_ema.distributed.world import World
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.training.loss import EnergyLoss, LossOverBatches
from deepmd_ema.training.run import run_training

SAME_MATH = 1e-12
OF_TERM = {
    "e": "energy_weight",
    "f": "force_weight",
    "pf": "force_weight",
    "v": "virial_weight",
}
LABEL_OF = {
    "e": "energy",
    "f": "force",
    "pf": "force",
    "v": "virial",
    "ae": "atom_energy",
    "h": "hessian",
}


def weighted_frames():
    """Return frames of four sizes with some of the weights, and predictions for them."""
    rng = np.random.default_rng(3)
    sizes, kept = (
        (2, 7, 4, 3),
        (WEIGHTS, (WEIGHT,), (), ("energy_weight", "virial_weight")),
    )
    labelled = [
        random_frame(rng, n) | {name: rng.uniform(0, 3) for name in own}
        for n, own in zip(sizes, kept)
    ]
    del labelled[1]["energy"], labelled[2]["force"]
    labelled[3]["weight"] = 0.0
    return labelled, [
        random_frame(rng, n, types=f["types"]) for n, f in zip(sizes, labelled)
    ]


def evaluated(loss, labelled, guess, names=(*COMPARED, *WEIGHTS)):
    batch = flat_batch(labelled, names=names)
    prediction = {k: v.requires_grad_() for k, v in predicted(guess, batch).items()}
    return batch, prediction, loss(prediction, batch, 7e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_the_weighted_sum_of_single_frames_over_the_number_that_has_the_label(
    name,
):
    labelled, guess = weighted_frames()
    config, expected = Config(**LOSSES[name]), 0.0
    loss = EnergyLoss(config, 1e-3, World())
    batch, prediction, (total, shown) = evaluated(loss, labelled, guess)
    gradients = {
        "energy": np.zeros(len(labelled)),
        "force": [np.zeros((len(f["types"]), 3)) for f in labelled],
    }
    for term in loss.terms:
        zeros = {
            f"{at}_pref_{other}": 0.0
            for other in loss.terms
            if other != term
            for at in ("start", "limit")
        }
        own = EnergyLoss(Config(**{**vars(config), **zeros}), 1e-3, World())
        having = [k for k, f in enumerate(labelled) if LABEL_OF[term] in f]
        per_atom = LABEL_OF[term] in ("force", "atom_energy")
        rows = [len(labelled[k]["types"]) if per_atom else 1 for k in having]
        for k, number in zip(having, rows):
            weight = (
                labelled[k].get("weight", 1.0)
                * labelled[k].get(OF_TERM.get(term), 1.0)
                * number
                / sum(rows)
            )
            alone, values, (of_frame, _) = evaluated(
                own, [labelled[k]], [guess[k]], COMPARED
            )
            of_frame.backward()
            expected += weight * of_frame.item()
            if values["energy"].grad is not None:
                gradients["energy"][k] += weight * values["energy"].grad.item()
            if values["force"].grad is not None:
                gradients["force"][k] += (
                    weight * alone.in_file_order(values["force"].grad).numpy()
                )
    assert total.item() == pytest.approx(expected, rel=SAME_MATH)
    total.backward()
    np.testing.assert_allclose(
        prediction["energy"].grad, gradients["energy"], rtol=SAME_MATH
    )
    forces = batch.in_file_order(prediction["force"].grad)
    np.testing.assert_allclose(
        forces, np.concatenate(gradients["force"]), rtol=SAME_MATH, atol=1e-14
    )
    plain = evaluated(loss, labelled, guess, COMPARED)[2][1]
    for key in shown.keys() - {"rmse"}:
        assert shown[key].item() == pytest.approx(plain[key].item(), rel=SAME_MATH), (
            "displayed errors have no weights"
        )
    assert shown["rmse"].item() == pytest.approx(np.sqrt(expected), rel=SAME_MATH)


@pytest.mark.parametrize("name", LOSSES)
def test_batches_that_are_added_up_or_filled_up_have_the_loss_of_one(name):
    labelled, guess = weighted_frames()
    loss = EnergyLoss(Config(**LOSSES[name]), 1e-3, World())
    *_, (total, shown) = evaluated(loss, labelled, guess)
    parts = [
        evaluated(loss, labelled[k:m], guess[k:m]) for k, m in ((0, 2), (2, 3), (3, 4))
    ]
    whole = LossOverBatches(loss, [part for part, *_ in parts], 7e-4)
    shares = [whole.add(values, part) for part, values, _ in parts]
    assert sum(shares).item() == pytest.approx(total.item(), rel=SAME_MATH)
    error = "rmse_f" if "rmse_f" in shown else "mae_f"
    assert whole.displayed()[error] == pytest.approx(shown[error].item(), rel=SAME_MATH)


def spoil(path, number=3):
    """Give a system weights: the forces of some frames are wrong, and weigh nothing."""
    rng, part = np.random.default_rng(8), path / "set.000"
    force, weights = (
        np.load(part / "force.npy"),
        rng.uniform(0.5, 2, len(np.load(part / "coord.npy"))),
    )
    bad = rng.permutation(len(force))[:number]
    force_weight = np.ones(len(force))
    force_weight[bad] = 0
    np.save(part / "weight.npy", weights)
    np.save(part / "force_weight.npy", force_weight)
    return force, bad


FORMS = {
    "fixed": (2, 1),
    "auto": ("auto:20", 1),
    "mixed": ("mixed:3", 1),
    "accumulate": ("mixed:2", 2),
}
OPTIONS = {
    "training__training_data__frame_weights": True,
    "model__descriptor__interpolate": "never",
}


@pytest.mark.parametrize("form", FORMS)
def test_forces_of_weight_zero_change_no_bit_of_a_run(tmp_path, monkeypatch, form):
    systems = [
        write_system(tmp_path / name, 5, n, seed=n, mixed=name == "b")
        for name, n in (("a", 6), ("b", 9))
    ]
    models, (size, several) = [], FORMS[form]
    for add in (0.0, 5.0, None):
        for path in systems:
            force, bad = spoil(path)
            if add is None:
                for name in ("weight", "force_weight"):
                    (path / "set.000" / f"{name}.npy").unlink()
            force[bad] += add or 0.0
            np.save(path / "set.000" / "force.npy", force)
        folder = tmp_path / f"run{len(models)}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        config = tiny_input(
            systems, num_steps=4, **OPTIONS, training__accumulate=several
        )
        config["training"]["training_data"]["batch_size"] = size
        models.append(
            run_training(config, device="cpu")
            and load(folder / "model.ckpt-4.pt")["model"]
        )
    first, spoiled, without = models
    assert all(torch.equal(first[name], spoiled[name]) for name in first)
    assert not all(torch.equal(spoiled[name], without[name]) for name in first)


MACE = {
    "config_weight": 0.5,
    "config_energy_weight": 2.0,
    "config_forces_weight": 0.25,
    "config_stress_weight": 3.0,
}
READ = dict(zip(WEIGHTS, MACE.values()))


def write_xyz(path, weights):
    """Write two frames, of which the second has the weights."""
    lines = []
    for k, own in enumerate(({}, weights)):
        about = "".join(f" {name}={value}" for name, value in own.items())
        lines += [
            "2",
            f'energy={k - 3} Properties=species:S:1:pos:R:3:forces:R:3 pbc="F F F"{about}',
        ]
        lines += ["O 0 0 0 0.1 0 0", f"H 0 0 {0.96 + 0.05 * k} -0.1 0 0"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_run_with_weights_of_atoms_has_a_column_of_weighted_forces(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    data = [
        [write_system(tmp_path / name, frames=6, natoms=8, seed=k, atom_pref=True)]
        for k, name in enumerate("tv")
    ]
    options = {
        "loss__start_pref_f": 0,
        "loss__limit_pref_f": 0,
        "loss__start_pref_pf": 1000,
        "loss__limit_pref_pf": 1,
    }
    validating = {"full_validation": True, "validation_freq": 2, "full_val_start": 0}
    folder = trains_in(
        tmp_path, monkeypatch, data, {**options, "validating": validating}
    )("run", 4)
    head, *rows = [
        line.split()
        for line in (folder / "val.log").read_text().splitlines()
        if line.strip()
    ]
    assert head[-2:] == ["Q_MAE(meV/Å)", "Q_RMSE(meV/Å)"]
    measured = measure(folder / "model.ckpt.pt", data[1], device="cpu")
    last = [row for row in rows if row[0] == "4"][-1]
    assert float(last[-1]) == pytest.approx(
        1000 * measured.total.metric("Q:RMSE"), rel=1e-3
    )
    assert (
        "RMSE of batches, E and V in meV/atom, F and Q in meV/Å; full:" in caplog.text
    )
    assert re.search(r"  train E [\d.]+ Q [\d.]+ V ", caplog.text)


def test_names_of_mace_and_gpumd_are_read_and_kept_by_convert(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", MACE)
    convert_data([str(source)], str(tmp_path / "npy"))
    convert_data([str(source)], str(tmp_path / "mixed"), mixed=True)
    convert_data([str(tmp_path / "npy")], str(tmp_path / "b.xyz"))
    for name in ("a.xyz", "npy", "mixed", "b.xyz"):
        frames = [
            s.frame(k)
            for s in open_data([str(tmp_path / name)], ["O", "H"], WEIGHTS)
            for k in range(s.num_frames)
        ]
        found = [{w: float(v) for w, v in frame.labels.items()} for frame in frames]
        assert sorted(found, key=len) == [{}, READ], name
    [gpumd] = open_data(
        [str(write_xyz(tmp_path / "c.xyz", {"weight": 4}))], ["O", "H"], WEIGHTS
    )
    assert float(gpumd.frame(1).labels["weight"]) == 4


def check(tmp_path, monkeypatch, capsys, systems, **options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text(json.dumps(tiny_input(systems, **options)))
    code = cli.main(["check", "input.json"])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_weights_that_are_not_used_are_named_once(tmp_path, monkeypatch, capsys):
    path = write_system(tmp_path / "w", frames=4)
    np.save(path / "set.000" / "weight.npy", np.ones(4))
    xyz = write_xyz(
        tmp_path / "a.xyz", {**MACE, "weight": 2}
    )  # two names are no mistake where neither is read
    code, said = check(tmp_path, monkeypatch, capsys, [path, xyz])
    assert code == 0
    line = (
        f"frame_weights is false: the weights of frames in 2 of 2 systems (first: {path}) are not "
        "used"
    )
    assert said.count(line) == 1
    code, said = check(tmp_path, monkeypatch, capsys, [path, xyz], **OPTIONS)
    assert code == 2
    assert (
        "weight may be config_weight (1 frame) or weight (1 frame). Say which after the name of "
        "the file" in said
    )
    code, said = check(
        tmp_path, monkeypatch, capsys, [path, f"{xyz}#weight=weight"], **OPTIONS
    )
    assert code == 0
    assert "not used" not in said
    assert "weight: 5 of 6 frames" in said


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            [1, -1, 1, 1],
            "weight.npy: frame 1 (of 4, from 0): -1. Expected finite numbers from 0;",
        ),
        ([1, 1], "weight.npy: shape (2,), expected (4,)"),
        (
            None,
            "frame_weights is true, and no training frame has a weight: all count alike.",
        ),
    ],
)
def test_wrong_weights_are_reported(tmp_path, monkeypatch, capsys, weights, message):
    path = write_system(tmp_path / "w", frames=4)
    if weights is not None:
        np.save(path / "set.000" / "weight.npy", np.array(weights, float))
    code, said = check(tmp_path, monkeypatch, capsys, [path], **OPTIONS)
    assert message in said
    assert code == (0 if weights is None else 2)
