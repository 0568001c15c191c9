"""`dp-ema change-bias`: the bias it finds, what it leaves alone, and one message for each
mistake.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_same, write_system
from infer_models import write_run

from deepmd_ema import checkpoint, cli
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model

ZERO = 1e-10  # eV/atom


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_system(folder / "water", frames=5, natoms=12, seed=1)
    write_system(folder / "oxygen", frames=4, natoms=8, seed=2, num_types=1)
    write_system(folder / "small", frames=3, natoms=8, seed=3, mixed=True, virtual=2)
    return folder


def residuals(path, data, **options):
    """Return label minus prediction of each frame, eV/atom."""
    return np.array(
        [energy / atoms for energy, atoms in errors_of(path, data, **options)]
    )


def errors_of(path, data, **options):
    frames = measure(path, [data], device="cpu", **options).frames
    return [(f.label[ENERGY] - f.prediction[ENERGY], f.num_atoms) for f in frames]


def bias_of(path, **options):
    return load_model(path, **options).model.out_bias.view(-1).tolist()


def change(*words):
    return cli.main(["change-bias", *map(str, words), "--device", "cpu"])


@pytest.mark.parametrize("suffix", [".pt", ".dp", ".yaml"])
def test_the_mean_residual_per_atom_of_the_new_file_is_zero(
    run, data, tmp_path, suffix, capsys
):
    source = (
        run[0]
        if suffix == ".pt"
        else freeze(load_model(run[0]), tmp_path / f"m{suffix}").path
    )
    before, content = residuals(source, data), source.read_bytes()
    out = tmp_path / f"new{suffix}"
    assert change(source, "-s", data, "-o", out) == 0
    after = residuals(out, data)
    assert abs(before.mean()) > 0.1
    assert abs(after.mean()) < ZERO
    spread = np.std(
        [energy for energy, _ in errors_of(out, data)]
    )  # of whole energies, as statistics have it
    np.testing.assert_allclose(load_model(out).model.out_std, spread, rtol=1e-9)
    assert source.read_bytes() == content
    weights = [load_model(file).model.state_dict() for file in (source, out)]
    assert_same(
        *(
            {n: t for n, t in one.items() if n not in ("out_bias", "out_std")}
            for one in weights
        )
    )
    text = capsys.readouterr().out
    assert f"moved by a fit of label minus prediction, 12 frames of {data}" in text
    assert f"mean {1000 * before.mean():.6g} before, 0 after" in text
    rms = [1000 * np.sqrt(np.mean(r**2)) for r in (before, after)]
    assert f"RMSE {rms[0]:.6g} before, {rms[1]:.6g} after" in text
    rows = [
        line.split() for line in text.splitlines() if line.startswith(("# O", "# H"))
    ]
    np.testing.assert_allclose(
        [float(r[2]) for r in rows], bias_of(source), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        [float(r[3]) for r in rows], bias_of(out), rtol=0, atol=1e-6
    )
    assert text.rstrip().endswith(f"wrote {out}")


def test_an_average_of_a_checkpoint_is_changed_with_its_own_weights(
    run, data, tmp_path
):
    out, beside = tmp_path / "one.pt", tmp_path / "two.pt"
    assert (
        change(run[0], "-s", data, "-o", out, "--use-ema")
        == change(run[1], "-s", data, "-o", beside)
        == 0
    )
    assert_same(checkpoint.load(out)["model"], checkpoint.load(beside)["model"])
    assert abs(residuals(out, data).mean()) < ZERO
    info = load_model(out).info
    assert (info.kind, info.weights, info.step, info.min_nbor_dist) == (
        "weights",
        "ema",
        7,
        0.9,
    )
    assert info.describe() == load_model(run[1]).info.describe()


def test_the_file_says_what_was_changed_and_so_does_what_is_frozen_of_it(
    run, data, tmp_path, capsys
):
    out = tmp_path / "new.pt"
    assert (
        change(
            run[0],
            "-s",
            data / "water",
            data / "oxygen",
            "-n",
            2,
            "-m",
            "set",
            "-o",
            out,
        )
        == 0
    )
    frozen = freeze(load_model(out), tmp_path / "new.dp").path
    record = {
        "mode": "set",
        "frames": 4,
        "source": f"{data / 'water'}, {data / 'oxygen'}",
    }
    assert checkpoint.load(out)["bias"] == record
    assert load_model(frozen).info.bias == record
    capsys.readouterr()
    for path in (out, frozen):
        assert cli.main(["show", str(path)]) == 0
        assert (
            f"  bias           set to a fit of the labels, 4 frames of {data / 'water'}, "
            in capsys.readouterr().out
        )
    assert change(frozen, "-b", "-1", "-2", "-o", tmp_path / "again.dp") == 0
    assert load_model(tmp_path / "again.dp").info.bias == {
        "mode": "given",
        "source": "values given",
    }
    assert cli.main(["show", str(run[0])]) == 0
    assert "  bias  " not in capsys.readouterr().out.split("wrote")[-1]


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["."], "model.ckpt-7_updated.pt"),
        (["model.ckpt.pt", "--use-ema"], "model_ema.ckpt-7_updated.pt"),
        (["m.dp"], "m_updated.dp"),
        (["m.yaml"], "m_updated.yaml"),
    ],
)
def test_by_default_the_file_is_beside_the_model(run, tmp_path, words, written):
    folder = shutil.copytree(run[0].parent, tmp_path / "run", symlinks=True)
    if words[0].startswith("m."):
        freeze(load_model(run[0]), folder / words[0])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert change(folder / words[0], "-b", -1, -2, *words[1:]) == 0
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after.keys() - before.keys() == {written}
    assert {n: after[n] for n in before} == before
    assert bias_of(folder / written) == [-1, -2]


def test_no_file_replaces_itself(run, tmp_path, capsys):
    frozen = freeze(load_model(run[0]), tmp_path / "m.dp").path
    training, averaged = (Path(shutil.copy(path, tmp_path)) for path in run)
    assert change(averaged, "-b", "-1e2", "-2.5E-1", "-o", tmp_path / "weights.pt") == 0
    assert bias_of(tmp_path / "weights.pt") == [-100, -0.25]
    weights, link = tmp_path / "weights.pt", tmp_path / "link.pt"
    link.symlink_to(training.name)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for source, out, said in (
        (frozen, frozen, "which the command reads"),
        (weights, weights, "which the command reads"),
        (averaged, averaged, "a file of kind average"),
        (training, training, "a file of kind training"),
        (link, training, "a file of kind training"),
        (averaged, link, "a file of kind training"),
    ):
        assert change(source, "-b", -1, -2, "-o", out) == 2
        assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_elements_that_the_data_do_not_hold_or_report_apart_are_named(
    run, data, tmp_path, capsys
):
    assert change(run[0], "-s", data / "oxygen", "-o", tmp_path / "new.pt") == 0
    assert "+0.000000  not in the data" in capsys.readouterr().out
    assert change(run[0], "-s", data / "water", "-o", tmp_path / "new.pt") == 0
    assert (
        "the energies of O, H cannot be determined separately from these compositions; equal "
        "changes are used" in capsys.readouterr().out
    )
    assert (
        change(run[0], "-s", data / "water", "-m", "set", "-o", tmp_path / "new.pt")
        == 0
    )
    assert (
        "the energies of O, H cannot be determined separately from these compositions; equal "
        "values are used" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["-b", "1"],
            r"-b: 1 value, expected one for each of the 2 elements of the model, in this order: O "
            r"H.",
        ),
        (["-b", "1", "nan"], "-b: H nan: expected finite energies in eV."),
        (
            ["-b", "1", "2", "-m", "set"],
            "-b: the bias is what you give; -m and -n are for a fit to data.",
        ),
        (["-n", "-3"], "'-3': expected a number of frames, 0 for all."),
        (["-s", "nowhere"], "nowhere: no such file or folder"),
        (["-f", "nowhere"], "nowhere: cannot be read"),
        (
            ["-b", "1", "2", "-o", "new.dp"],
            "-o new.dp: expected a name that ends in .pt, as ",
        ),
        (
            ["-b", "1", "2", "-o", "no/new.pt"],
            "-o no/new.pt: the folder no is not there.",
        ),
        (
            ["-b", "1", "2", "--profile", "slow"],
            "no average is called 'slow'. Give --average one of: ema",
        ),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(
    run, tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    before = sorted(p.name for p in run[0].parent.iterdir())
    assert change(run[0], *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
    assert sorted(p.name for p in run[0].parent.iterdir()) == before


def test_what_is_wrong_with_a_model_or_its_data_is_named(run, data, tmp_path, capsys):
    frozen = freeze(load_model(run[0]), tmp_path / "m.dp").path
    assert change(frozen, "-b", 1, 2, "-o", tmp_path / "m.pt") == 2
    assert (
        "expected a name that ends in .dp or .yaml or .yml" in capsys.readouterr().err
    )
    shutil.copy(frozen, tmp_path / "m.hlo")
    assert change(tmp_path / "m.hlo", "-b", 1, 2) == 2
    assert "change-bias writes .pt, .dp and .yaml" in capsys.readouterr().err
    assert change(frozen, "--use-ema", "-b", 1, 2) == 2
    assert "holds live weights (frozen), no average" in capsys.readouterr().err
    assert change(tmp_path / "absent.pt", "-b", 1, 2) == 2
    assert "absent.pt: no such file" in capsys.readouterr().err
    bad = Path(shutil.copytree(data / "water", tmp_path / "bad"))
    energies = np.load(bad / "set.000" / "energy.npy")
    energies[3] = np.nan
    np.save(bad / "set.000" / "energy.npy", energies)
    assert change(run[0], "-s", bad, "-o", tmp_path / "new.pt") == 2
    assert "energy.npy" in capsys.readouterr().err
    payload = checkpoint.load(run[1])
    next(value for name, value in payload["model"].items() if "fitting" in name).fill_(
        float("nan")
    )
    checkpoint.save(tmp_path / "nan.pt", payload)
    assert change(tmp_path / "nan.pt", "-s", data, "-o", tmp_path / "new.pt") == 2
    assert (
        "frame 0 (from 0): the model gives no finite energy" in capsys.readouterr().err
    )
    write_system(tmp_path / "forces", frames=2, energy=False)
    assert change(run[0], "-s", tmp_path / "forces", "-o", tmp_path / "new.pt") == 2
    assert "forces has an energy to fit the bias to" in capsys.readouterr().err
    assert not (tmp_path / "new.pt").exists()
