"""LAMMPS: the lines that `freeze` prints, and a run of them with the file."""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import write_run
from torch.torch_version import TorchVersion
from toy_models import SECTIONS, toy_model, write_dp

from deepmd_ema import cli
from deepmd_ema.commands import freeze as export
from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop import pt2
from deepmd_ema.interop.deepmd_kit import copy_with_task_dim

ROOT = Path(__file__).resolve().parents[2]
LAMMPS = os.environ.get(
    "DP_LAMMPS"
)  # an environment with DeePMD-kit 3.2.0, its LAMMPS and dp-ema: doc/lammps.md
BAR = 1.6021765e6  # of an eV/angstrom^3, as LAMMPS has it
SMALL = {
    "model__descriptor__neuron": [2],
    "model__descriptor__axis_neuron": 1,
    "model__fitting_net__neuron": [2],
}


def in_lammps(test):
    """Mark a test that runs LAMMPS."""
    for mark in (
        pytest.mark.skipif(
            LAMMPS is None,
            reason="DP_LAMMPS is not set: an environment with DeePMD-kit's LAMMPS",
        ),
        pytest.mark.slow,
        pytest.mark.timeout(900),
    ):
        test = mark(test)
    return test


def lines_of(descriptor, path="m.pt2", **changes):
    config, model = toy_model(descriptor, **changes)
    return export.format_lammps_lines(
        Path(path), LoadedModel(model, config, Provenance(Path("x.pt"), "weights"))
    )


def test_the_elements_are_in_the_order_of_the_type_map():
    lines = lines_of("se_e2_a", "run/water.pth", type_map=["Na", "O", "H"]).splitlines()
    assert lines[0] == "in LAMMPS (tried: LAMMPS of DeePMD-kit 3.2.0 with torch 2.11):"
    assert [line.split() for line in lines[1:]] == [
        ["units", "metal"],
        ["pair_style", "deepmd", "run/water.pth"],
        ["pair_coeff", "*", "*", "Na", "O", "H"],
    ]


@pytest.mark.parametrize("descriptor", [*sorted(SECTIONS), "hybrid_of_messages"])
def test_compiled_models_that_pass_messages_need_a_map_of_atoms_and_run_on_one_rank(
    descriptor,
):
    passes = descriptor in ("dpa2", "dpa3", "dpa4", "hybrid_of_messages")
    compiled, other = lines_of(descriptor), lines_of(descriptor, "m.pth")
    assert ("atom_modify  map yes  # before the box is defined" in compiled) == passes
    assert (
        "in LAMMPS on one rank; for several: dp-ema freeze -o m.pth (tried: "
        in compiled
    ) == passes
    assert "atom_modify" not in other
    assert "one rank" not in other


def test_dipoles_are_computed_beside_a_pair_style_that_reaches_as_far():
    found = lines_of(
        "se_e2_a",
        "run/w.pth",
        fitting_changes={"type": "dipole"},
        type_map=["Na", "O", "H"],
    )
    assert [line.split() for line in found.splitlines()[1:]] == [
        ["units", "metal"],
        [
            "pair_style",
            "zero",
            "4",
            *["#", "or", "another", "one", "that", "reaches", "as", "far"],
        ],
        ["pair_coeff", "*", "*"],
        [
            "compute",
            "ID",
            "all",
            "deeptensor/atom",
            "run/w.pth",
            *["#", "atom", "types:", "Na", "O", "H"],
        ],
    ]
    assert not lines_of("dpa3", "w.pth", fitting_changes={"type": "dipole"})
    assert not lines_of("se_e2_a", "w.pth", fitting_changes={"type": "polar"})


def test_a_file_of_dipoles_has_the_method_that_lammps_calls(tmp_path):
    method = (
        "  def get_type_map(self: __torch__.DipoleModel) -> List[str]:\n    return []\n"
    )
    with zipfile.ZipFile(tmp_path / "old", "w") as file:
        file.writestr("m/code/dipole_model.py", method)
        file.writestr("m/data/0", b"\0\1")
    copy_with_task_dim(tmp_path / "old", tmp_path / "new")
    copy_with_task_dim(tmp_path / "new", tmp_path / "again")  # nothing to add
    for name in ("new", "again"):
        with zipfile.ZipFile(tmp_path / name) as file:
            added = "  def get_task_dim(self: __torch__.DipoleModel) -> int:\n    return 3\n"
            assert file.read("m/code/dipole_model.py").decode() == added + method
            assert file.read("m/data/0") == b"\0\1"


@in_lammps
def test_the_printed_lines_compute_our_dipoles_in_lammps(tmp_path, capsys):
    config, model = toy_model(fitting_changes={"type": "dipole", "sel_type": [0]})
    write_dp(tmp_path / "m.dp", model, config)
    words = [
        "freeze",
        "-c",
        str(tmp_path / "m.dp"),
        "-o",
        str(tmp_path / "m.pth"),
        "--dp",
        f"{LAMMPS}/bin/dp",
    ]
    assert cli.main(words) == 0
    coord, types, box = toy_frame(np.random.default_rng(0), 12)
    known = (
        Potential(tmp_path / "m.dp", device="cpu")
        .evaluate(coord, types, box)
        .atom_dipole[0]
    )
    units, pair_style, after = (
        capsys.readouterr().out.partition("in LAMMPS")[2].partition("pair_style")
    )
    (tmp_path / "frame").write_text(data_file(coord, types, box, len(config.type_map)))
    columns = " ".join(f"c_ID[{k}]" for k in (1, 2, 3))
    (tmp_path / "in").write_text(
        f"{units.partition(chr(10))[2]}\natom_modify map yes\nread_data frame\nmass * 1.0\n"
        f"{pair_style}{after}\n"
        f"thermo_style custom step pe press lx\ndump d all custom 1 dipoles id {columns}\n"
        "dump_modify d sort id format float %.17g\nrun 0\n"
    )
    run_lammps(tmp_path, 1)
    found = np.loadtxt(tmp_path / "dipoles", skiprows=9)[:, 1:]
    np.testing.assert_allclose(found, known, rtol=0, atol=1e-10 * np.abs(known).max())


@pytest.mark.parametrize("version", ["2.8.0+cpu", "2.9.1+cu128"])
def test_a_torch_that_cannot_compile_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch, capsys, version
):
    """The compiler failed after a minute, with a line of its own."""
    run, path = write_run(tmp_path / "run"), tmp_path / "m.pt2"
    monkeypatch.setattr(export, "_with_tables", None)
    monkeypatch.setattr(pt2, "_exported", None)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert cli.main(["freeze", "-c", str(run[0]), "-o", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"dp-ema: -o {path}: torch {version} cannot compile models to .pt2 files. Use torch 2.10 "
        "or newer; or write a .pth file for LAMMPS, or a .dp file.\n"
    )
    assert not path.exists()


@in_lammps
@pytest.mark.filterwarnings("ignore")  # torch's own, of compiling
def test_the_printed_lines_run_in_lammps_with_our_numbers_on_one_rank_and_two(
    tmp_path, capsys
):
    run = write_run(tmp_path / "run", **SMALL)
    assert (
        cli.main(
            [
                "freeze",
                "-c",
                str(run[0]),
                "-o",
                str(tmp_path / "m.pt2"),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    assert_same_numbers(
        tmp_path,
        capsys.readouterr().out,
        run[0],
        *toy_frame(np.random.default_rng(0), 12),
    )


@in_lammps
def test_one_environment_goes_from_training_to_lammps(tmp_path):
    """Its torch trains and writes the files that its LAMMPS reads; the energy is that of the
    checkpoint read here.
    """
    shutil.copytree(ROOT / "examples" / "water", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "input.json").read_text())
    config["training"].update(numb_steps=20, disp_freq=20)
    (tmp_path / "input.json").write_text(json.dumps(config))

    def printed(*words):
        places = {"PATH": f"{LAMMPS}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        command = [f"{LAMMPS}/bin/python", "-m", "deepmd_ema", *words]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **places},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    printed("train", "input.json")
    system = tmp_path / "data" / "validation"
    coord, box = (
        np.load(system / "set.000" / f"{name}.npy")[0].reshape(-1, 3)
        for name in ("coord", "box")
    )
    frame = coord, np.loadtxt(system / "type.raw", dtype=int), box
    for name in ("water.pth", "water.pt2"):
        lines = printed("freeze", "--use-ema", "-o", name)
        assert_same_numbers(tmp_path, lines, tmp_path / "model_ema.ckpt.pt", *frame)


def assert_same_numbers(folder, printed, model, coord, types, box):
    """Compare LAMMPS, with the lines that ``freeze`` printed, on one rank and two, with a model
    evaluated here.
    """
    known = Potential(model, device="cpu").evaluate(coord, types, box)
    before, pair_style, after = printed.partition("in LAMMPS")[2].partition(
        "pair_style"
    )
    (folder / "frame").write_text(data_file(coord, types, box, 2))
    (folder / "in").write_text(
        f"{before.partition(chr(10))[2]}\nread_data frame\nmass * 1.0\n{pair_style}{after}\n"
        "compute p all pressure NULL virial\nthermo_style custom step pe c_p[1] c_p[5]\n"
        "thermo_modify format float %.17g\ndump d all custom 1 forces id fx fy fz\n"
        "dump_modify d sort id format float %.17g\nrun 0\n"
    )
    volume, virial = np.linalg.det(box), np.reshape(known.virial, (3, 3))
    for ranks in (1, 2):
        energy, p_xx, p_xz = run_lammps(folder, ranks)
        np.testing.assert_allclose(energy, float(np.ravel(known.energy)[0]), rtol=1e-10)
        np.testing.assert_allclose(
            [p_xx, p_xz], virial[0, [0, 2]] / volume * BAR, rtol=1e-8
        )
        force = np.loadtxt(folder / "forces", skiprows=9)[:, 1:]
        np.testing.assert_allclose(
            force, known.force[0], rtol=0, atol=1e-10 * np.abs(known.force).max()
        )


def data_file(coord, numbers, box, num_types):
    """Return a frame as a data file of LAMMPS, whose cell vectors are in the lower triangle of
    ``box``.
    """
    sides = [f"0 {box[k, k]:.17g} {'xyz'[k]}lo {'xyz'[k]}hi" for k in range(3)]
    tilts = f"{box[1, 0]:.17g} {box[2, 0]:.17g} {box[2, 1]:.17g} xy xz yz"
    atoms = [
        f"{k + 1} {n + 1} " + " ".join(f"{x:.17g}" for x in site)
        for k, (n, site) in enumerate(zip(numbers, coord))
    ]
    head = [
        "toy",
        "",
        f"{len(coord)} atoms",
        f"{num_types} atom types",
        "",
        *sides,
        tilts,
        "",
        "Atoms # atomic",
        "",
    ]
    return "\n".join([*head, *atoms, ""])


def run_lammps(folder, ranks):
    """Return energy and two pressures of the first line of a run."""
    launcher = [f"{LAMMPS}/bin/mpirun", "-np", str(ranks)] if ranks > 1 else []
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*launcher, f"{LAMMPS}/bin/lmp", "-in", "in", "-log", "none"]
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    row = (
        next(
            k for k, line in enumerate(lines) if line.split()[:2] == ["Step", "PotEng"]
        )
        + 1
    )
    return [float(word) for word in lines[row].split()[1:]]
