"""Second derivatives as labels: read from every format, trained on, shown, tested."""

import json

import numpy as np
import pytest
import torch
from helpers import (
    assert_same,
    open_data,
    tiny_input,
    toy_frame,
    toy_hessian,
    toy_labels,
    write_system,
)

from deepmd_ema.cli import main
from deepmd_ema.data.check.scan import scan_system
from deepmd_ema.errors import DataError
from deepmd_ema.infer.evaluate import measure

LABELS = ("energy", "force", "virial", "hessian")
WEIGHTS = {"loss__start_pref_h": 5, "loss__limit_pref_h": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A system with Hessians of 5 atoms, a mixed one of 4 and two virtual ones, one of 6 atoms
    without Hessians.
    """
    root = tmp_path_factory.mktemp("hessian")
    write_system(root / "cell", frames=4, natoms=5, seed=1, hessian=True)
    write_system(
        root / "mixed", frames=3, natoms=4, seed=2, mixed=True, virtual=2, hessian=True
    )
    write_system(root / "without", frames=3, natoms=6, seed=3, pbc=False)
    return root


def hessian_of(frame):
    """Return the Hessian of the toy potential for a frame that was read."""
    return toy_hessian(frame.coord, frame.atom_type, frame.box).ravel()


def assert_hessians(source):
    for k in range(source.num_frames):
        frame = source.frame(k)
        np.testing.assert_allclose(
            frame.labels["hessian"], hessian_of(frame), rtol=0, atol=1e-7
        )
    assert not scan_system(source, 2, 4.0).faults


@pytest.mark.parametrize("name", ["cell", "mixed"])
def test_hessians_of_npy_folders_are_those_of_the_real_atoms(data, name):
    [source] = open_data([str(data / name)], ["O", "H"], LABELS)
    assert_hessians(source)
    chunk = next(source.chunks(["hessian"]))
    natoms = 5 if name == "cell" else 6
    assert chunk.arrays["hessian"].shape == (source.num_frames, 3 * natoms, 3 * natoms)


def write_extxyz(path, wrong=0):
    """Write frames of 3 to 5 atoms, elements in turn."""
    rng, lines = np.random.default_rng(5), []
    for natoms in (3, 5, 3):
        coord, types, _ = toy_frame(rng, natoms, pbc=False)
        energy, force, _, _ = toy_labels(coord, types)
        numbers = " ".join(
            map(repr, toy_hessian(coord, types).ravel().tolist()[wrong:])
        )
        lines += [
            str(natoms),
            f"Properties=species:S:1:pos:R:3:forces:R:3 energy={float(energy)!r} "
            f'dft_hessian="{numbers}"',
        ]
        rows = zip(np.array(["O", "H"])[types], np.hstack([coord, force]).tolist())
        lines += [" ".join([kind, *map(repr, row)]) for kind, row in rows]
    path.write_text("\n".join(lines) + "\n")


def test_hessians_of_extended_xyz_and_of_what_is_made_of_it(tmp_path, capsys):
    write_extxyz(tmp_path / "a.xyz")
    assert_hessians(open_data([str(tmp_path / "a.xyz")], ["O", "H"], LABELS)[0])
    assert main(["convert", str(tmp_path / "a.xyz"), str(tmp_path / "npy")]) == 0
    assert "hessian from dft_hessian" in capsys.readouterr().out
    systems = open_data([str(tmp_path / "npy")], ["O", "H"], LABELS)
    assert sorted(system.frame(0).num_atoms for system in systems) == [3, 5]
    for system in systems:
        assert (np.diff(system.frame(0).atom_type) >= 0).all(), (
            "sorted by element, and its Hessian with it"
        )
        assert_hessians(system)


def test_a_hessian_of_another_number_of_atoms_is_refused(data, tmp_path):
    write_extxyz(tmp_path / "a.xyz", wrong=1)
    with pytest.raises(
        DataError, match=r"dft_hessian: has 80 numbers, expected 81 for 3 atoms"
    ):
        open_data([str(tmp_path / "a.xyz")], ["O", "H"], LABELS)
    path = write_system(tmp_path / "w", frames=2, natoms=4)
    np.save(path / "set.000" / "hessian.npy", np.zeros((2, 12)))
    with pytest.raises(
        DataError,
        match=r"hessian.npy: shape \(2, 12\), expected \(2, 144\) for 4 atoms",
    ):
        open_data([str(path)], ["O", "H"], LABELS)


def train(folder, monkeypatch, config, *options):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    (folder / "input.json").write_text(json.dumps(config))
    assert main(["train", "input.json", "--device", "cpu", *options]) == 0


def test_training_lowers_the_error_of_hessians_and_restarts_bitwise(
    data, tmp_path, monkeypatch, capsys
):
    systems = [data / "cell", data / "mixed", data / "without"]
    rates = {"type": "exp", "start_lr": 5e-3, "stop_lr": 1e-3, "decay_steps": 10}
    options = {
        "training__enable_ema": True,
        "loss__type": "ener_hess",
        "loss__start_pref_f": 1,
        **WEIGHTS,
    }
    config = tiny_input(
        systems, [data / "cell"], num_steps=30, learning_rate=rates, **options
    )
    train(tmp_path / "whole", monkeypatch, config)
    header, *_ = (tmp_path / "whole" / "lcurve.out").read_text().splitlines()
    columns = header.lstrip("# ").split()
    assert columns[columns.index("rmse_h_val") + 1] == "rmse_h_trn"
    rows = np.loadtxt(tmp_path / "whole" / "lcurve.out")
    assert (
        (rows[:, columns.index("rmse_h_val")] > 0.1)
        & (rows[:, columns.index("rmse_h_val")] < 2)
    ).all()
    train(
        tmp_path / "parts",
        monkeypatch,
        config,
        "--restart",
        "../whole/model.ckpt-10.pt",
    )
    for name in ("model.ckpt-30.pt", "model_ema.ckpt-30.pt"):
        whole, parts = (
            torch.load(tmp_path / f / name, weights_only=True)["model"]
            for f in ("whole", "parts")
        )
        assert_same(whole, parts)

    report = measure(tmp_path / "whole" / "model.ckpt.pt", systems)
    assert (
        f"Hessian MAE        : {report.total.summary()['mae_h']:e} eV/Å^2"
        in report.text()
    )
    errors = {
        name.rpartition("/")[2]: one.summary()["rmse_h"]
        for name, one in report.by_system.items()
    }
    assert np.isnan(errors["without"])
    start = measure(tmp_path / "whole" / "model.ckpt-10.pt", [data / "cell"])
    assert errors["cell"] < 0.98 * start.total.summary()["rmse_h"]
    report.write_details(tmp_path / "detail")
    label, predicted = np.loadtxt(tmp_path / "detail.h.out").T
    assert len(label) == 4 * 15**2 + 3 * 12**2
    assert report.total.summary()["mae_h"] == pytest.approx(
        np.abs(label - predicted).mean()
    )
