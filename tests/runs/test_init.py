"""``dp-ema init``: an input is proposed for data of every kind, and trains; time and mistakes are
reported.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import toy_frame, write_system

from deepmd_ema.cli.main import main
from deepmd_ema.commands import propose as proposal
from deepmd_ema.commands.propose import Wishes, propose
from deepmd_ema.config import config_from_dict, config_warnings, load_config, to_dict
from deepmd_ema.config.presets import KINDS, MODELS, SIZES, read_preset
from deepmd_ema.data.run import open_run
from deepmd_ema.training.estimate import Cost

COST = Cost(
    steps=1000,
    steps_of_first_epoch=10,
    rows=20,
    validations=10,
    checkpoints=10,
    start_s=10.0,
    end_s=0.0,
    step_of_first_epoch_s=0.5,
    step_s=0.5,
    row_s=0.0,
    first_validation_s=1.0,
    validation_s=1.0,
    checkpoint_s=0.0,
    memory_bytes=1,
    gpu_memory_bytes=0,
    steps_measured=9,
)


pytestmark = pytest.mark.usefixtures("here")


def write_extxyz(path, frames, labels=True):
    """Write (symbols, positions, cell or None) with made-up energies and forces."""
    rng, lines = np.random.default_rng(3), []
    for symbols, coord, cell in frames:
        box = (
            f'Lattice="{" ".join(map(str, np.ravel(cell)))}" pbc="T T T" '
            if cell is not None
            else 'pbc="F F F" '
        )
        energy, columns = (
            (f"energy={rng.normal()} ", ":forces:R:3") if labels else ("", "")
        )
        lines += [
            str(len(symbols)),
            f"{box}{energy}Properties=species:S:1:pos:R:3{columns}",
        ]
        forces = rng.normal(size=coord.shape) if labels else np.zeros((len(coord), 0))
        lines += [
            " ".join([s, *map(str, [*x, *f])])
            for s, x, f in zip(symbols, coord, forces)
        ]
    Path(path).write_text("\n".join(lines) + "\n")


def water(rng, cell):
    """Eight molecules far from each other."""
    centers = np.array(list(product((0, 3.5), repeat=3)))
    one = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    coord = (centers[:, None] + one).reshape(-1, 3) + rng.normal(
        scale=0.02, size=(24, 3)
    )
    return ["O", "H", "H"] * 8, coord, cell


def copper(rng, num_cells=2):
    """A crystal with a face-centered cubic lattice."""
    basis = 3.6 * np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    cells = 3.6 * np.array(list(product(range(num_cells), repeat=3)))
    coord = (cells[:, None] + basis).reshape(-1, 3)
    coord = coord + rng.normal(scale=0.05, size=coord.shape)
    return ["Cu"] * len(coord), coord, 3.6 * num_cells * np.eye(3)


def frames_of(kind, number=20):
    """Frames of a kind, in random positions."""
    rng = np.random.default_rng(1)
    make = {
        "liquid": lambda: water(rng, 7.0 * np.eye(3)),
        "molecules": lambda: water(rng, None),
        "solid": lambda: copper(rng),
    }
    return [make[kind]() for _ in range(number)]


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_data_is_found_and_its_input_trains(kind):
    write_extxyz("data.extxyz", frames_of(kind))
    assert main(["init", "data.extxyz", "--size", "S", "--steps", "3"]) == 0
    text = Path("input.yaml").read_text()
    assert f"Data: {kind} (" in text
    values = to_dict(load_config("input.yaml"))
    descriptor = values["model"]["descriptor"]
    of_kind = read_preset("models")[descriptor["type"]]["kinds"][kind]
    assert values["learning_rate"]["start_lr"] == of_kind["start_lr"]
    assert descriptor["n_radial"] == (6 if kind == "molecules" else 16)
    assert (
        values["loss"]["start_pref_e"] == read_preset("muon")[kind]["prefactors"]["e"]
    )
    assert values["model"]["type_map"] == (["Cu"] if kind == "solid" else ["H", "O"])
    assert main(["train", "input.yaml"]) == 0
    assert {"model.ckpt-3.pt", "model_ema.ckpt-3.pt", "val_ema.log"} <= {
        f.name for f in Path().iterdir()
    }


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("model", "kind", "longest"),
    [
        ("dpa4c", "solid", 2000),
        ("dpa4c", "molecules", 20000),
        ("se_e2_a", "molecules", 2000),
    ],
)
def test_the_rate_of_matrices_falls_with_the_length_and_that_of_vectors_does_not(
    model, kind, longest
):
    """At the rate of 4,000 steps forces of Mo went to 1,450 meV/angstrom within 10,000; molecules
    had errors that were larger by a tenth at a lower rate.
    """
    write_extxyz("data.extxyz", frames_of(kind))
    of_kind = read_preset("models")[model]["kinds"][kind]
    full = of_kind["start_lr"]
    rates = []
    for steps in (500, longest, 4 * longest, 16 * longest):
        words = ["init", "data.extxyz", "--model", model, "--steps", str(steps)]
        assert main([*words, "-o", f"{steps}.yaml"]) == 0
        values = to_dict(load_config(f"{steps}.yaml"))
        section = values["learning_rate"]
        rates.append(section["start_lr"])
        assert section["stop_lr"] == pytest.approx(section["start_lr"] / 100)
        of_vectors = section["start_lr"] / values["optimizer"]["lr_adjust"]
        assert of_vectors == pytest.approx(full / of_kind["lr_adjust"], rel=1e-5)
    assert rates == pytest.approx([full, full, full / 2, full / 4], rel=0.05)


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("model", "kind", "steps", "decay"),
    [
        ("dpa4c", "molecules", 49_999, 0),
        ("dpa4c", "molecules", 50_000, 0.003),
        ("dpa4c", "solid", 50_000, 0),
        ("se_e2_a", "molecules", 50_000, 0),
    ],
)
def test_weights_decay_in_long_runs_of_molecules(model, kind, steps, decay):
    """Without, forces at twice the temperature rose again in the last fifth of 100,000 steps."""
    write_extxyz("data.extxyz", frames_of(kind))
    words = ["init", "data.extxyz", "--model", model, "--size", "S"]
    assert main([*words, "--steps", str(steps)]) == 0
    assert to_dict(load_config("input.yaml"))["optimizer"]["weight_decay"] == decay
    if decay:
        # weights of a file that is fine-tuned stay
        assert main([*words, "--steps", "2", "-o", "short.yaml"]) == 0
        assert main(["train", "short.yaml"]) == 0
        tune = ["init", "data.extxyz", "--finetune", "model.ckpt.pt", "-o", "tune.yaml"]
        assert main([*tune, "--steps", str(steps)]) == 0
        assert to_dict(load_config("tune.yaml"))["optimizer"]["weight_decay"] == 0


def test_a_short_run_validates_rarely_and_a_long_one_ten_times():
    """Ten validations of 16 frames took longer than 50 steps of 2 frames."""
    write_extxyz("data.extxyz", frames_of("liquid", 160))
    for steps, validations in ((50, 4), (300, 5), (5000, 10)):
        assert (
            main(["init", "data.extxyz", "--steps", str(steps), "-o", f"{steps}.yaml"])
            == 0
        )
        values = to_dict(load_config(f"{steps}.yaml"))
        assert values["validating"]["validation_freq"] == steps // validations
        assert values["training"]["save_freq"] == steps // 10


def test_an_input_of_any_length_has_no_warning(tmp_path):
    """The average of a run of 15 steps was over 10 of them, for which ``check`` warns, and that of
    5 steps over one, which is none.
    """
    data = str(write_system(tmp_path / "data", frames=8))
    for steps in (1, 5, 9, 10, 15, 49, 50, 399, 1000):
        values = propose(Wishes([data], steps=steps)).values
        assert values["training"]["ema_decay"] >= 0.5, steps
        run = config_from_dict(values)
        assert not config_warnings(run, steps, {"steps": 1.0}), steps


@pytest.mark.parametrize("name", read_preset(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_every_model_and_size_can_be_trained(name, size, tmp_path):
    data = str(write_system(tmp_path / "data", frames=8))
    for kind in KINDS:
        found = propose(
            Wishes([data], [data], model=name, size=size, kind=kind, steps=2)
        )
        file = Path(f"{kind}.yaml")
        file.write_text(found.text(file))
        open_run(load_config(file))
    assert main(["train", "solid.yaml"]) == 0


def test_steps_fill_the_time_and_too_little_time_or_a_file_that_is_there_is_reported(
    monkeypatch, tmp_path, capsys
):
    data = str(write_system(tmp_path / "data", frames=8))
    monkeypatch.setattr(proposal, "measure_steps", lambda config, device: COST)
    found = propose(Wishes([data], [data], hours=1.0))
    assert (
        found.values["training"]["numb_steps"] == 7100
    )  # (3600 - 10 - 10 * 1) / 0.5, in two digits
    assert "0.5 s per step" in found.why["training.numb_steps"]
    assert found.values["validating"]["validation_freq"] == 710

    slow = replace(COST, step_of_first_epoch_s=2.0, step_s=2.0)
    monkeypatch.setattr(proposal, "measure_steps", lambda config, device: slow)
    assert main(["init", data, "--validation", data, "--hours", "0.01"]) == 2
    assert (
        "a run needs 3 min 40 s (--hours 0.07) for 100 steps" in capsys.readouterr().err
    )
    assert not Path("input.yaml").exists()
    Path("input.yaml").write_text("mine")
    assert main(["init", data]) == 2
    assert (
        "input.yaml: is there already. Name another file with -o"
        in capsys.readouterr().err
    )
    assert Path("input.yaml").read_text() == "mine"
    assert main(["init", data, "-o", "input.txt"]) == 2
    assert "expected a file that ends in .yaml, .yml, .json" in capsys.readouterr().err


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize("vacuum", [0, 40])
def test_a_slab_is_a_solid_and_a_molecule_alone_in_a_small_cell_is_a_molecule(vacuum):
    rng = np.random.default_rng(1)
    symbols, coord, cell = copper(rng)
    cell[2, 2] += vacuum  # 40: more than 60 cubic angstrom for each atom
    write_extxyz(
        "slab.extxyz",
        [
            (symbols, coord + rng.normal(scale=0.02, size=coord.shape), cell)
            for _ in range(12)
        ],
    )
    water = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    small = [
        (["O", "H", "H"], water + rng.normal(scale=0.02, size=(3, 3)), 5 * np.eye(3))
        for _ in range(12)
    ]
    write_extxyz("molecule.extxyz", small)
    slab, molecule = (
        propose(Wishes([f"{name}.extxyz"])).head[1] for name in ("slab", "molecule")
    )
    assert slab.startswith("Data: solid (bonds continue from cell to cell, in 11 of 11")
    assert molecule.startswith("Data: molecules (")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("unlabelled", "no label of the loss is present"),
        ("missing", "data.extxyz: no such file or folder"),
        (
            "foreign",
            "OUTCAR: cannot be read by ASE as vasp-out (Incomplete OUTCAR). It may be cut off, or "
            "of a version that the reader does not know. dpdata may read it: ",
        ),
    ],
)
def test_data_that_nothing_can_be_learned_from_end_in_one_message(
    content, message, capsys
):
    rng = np.random.default_rng(0)
    data = "OUTCAR" if content == "foreign" else "data.extxyz"
    coord, _types, box = toy_frame(rng, 6)
    if content == "unlabelled":
        write_extxyz(
            "data.extxyz", [(["O"] * 6, coord, box.reshape(3, 3))] * 12, labels=False
        )
    elif content == "foreign":
        Path("OUTCAR").write_text(" vasp.6.4.2\n")
    assert main(["init", data]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not Path("input.yaml").exists()


def write_traj(path, *seeds):
    """Write a crystal for each seed in a format of ASE."""
    from ase.io import read, write

    write_extxyz("frames.xyz", [copper(np.random.default_rng(seed)) for seed in seeds])
    write(path, read("frames.xyz", ":"))


def test_files_of_other_programs_are_converted_first_and_the_input_trains(capsys):
    write_traj("md.traj", *range(1, 5))
    write_traj("more.traj", *range(5, 9))
    write_traj("test.traj", 9, 10)
    write_extxyz("old.xyz", [copper(np.random.default_rng(11))])
    assert (
        main(
            [
                "init",
                "md.traj",
                "old.xyz",
                "more.traj",
                "--validation",
                "test.traj",
                "--steps",
                "2",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "converted md.traj, more.traj to md_data, as `dp-ema convert` does\n  read md.traj: 4 "
        "frames" in said
    )
    assert "converted test.traj to test_validation, as" in said
    training = yaml.safe_load(Path("input.yaml").read_text())["training"]
    assert training["training_data"]["systems"] == ["md_data", "old.xyz"]
    assert training["validation_data"]["systems"] == ["test_validation"]
    data = open_run(load_config("input.yaml"))[""]
    assert [system.num_frames for system in (*data.train, *data.valid)] == [8, 1, 2]


def test_test_data_are_converted_and_evaluated_after_the_last_step(capsys):
    write_traj("md.traj", *range(1, 5))
    write_traj("held_out.traj", 9, 10)
    assert (
        main(
            [
                "init",
                "md.traj",
                "--test",
                "held_out.traj",
                "--validation",
                "md.traj",
                "--steps",
                "2",
            ]
        )
        == 0
    )
    assert "converted held_out.traj to held_out_test, as" in capsys.readouterr().out
    assert "  # evaluated once, after the last step\n" in Path("input.yaml").read_text()
    validating = yaml.safe_load(Path("input.yaml").read_text())["validating"]
    assert validating["test_data"] == {"systems": ["held_out_test"]}
    assert [
        system.num_frames for system in open_run(load_config("input.yaml"))[""].test
    ] == [2]


def test_mistakes_in_test_data_are_those_of_the_command(capsys):
    write_extxyz("data.xyz", [copper(np.random.default_rng(seed)) for seed in range(4)])
    symbols, coord, cell = copper(np.random.default_rng(9))
    write_extxyz("held_out.xyz", [(["Ni", *symbols[1:]], coord, cell)])
    assert main(["init", "data.xyz", "--test", "held_out.xyz"]) == 2
    assert "held_out.xyz" in capsys.readouterr().err
    assert not Path("input.yaml").exists()


def write_tensors(folder, elements, counts, selected, label="atomic_dipole", frames=4):
    """Write a system with rows of a tensor of the atoms of some elements."""
    types = np.repeat(np.arange(len(elements)), counts)
    rng, part = np.random.default_rng(0), Path(folder, "set.000")
    part.mkdir(parents=True)
    np.savetxt(Path(folder, "type.raw"), types, fmt="%d")
    Path(folder, "type_map.raw").write_text("\n".join(elements))
    places = np.array(list(product(range(6), repeat=3)))[: len(types)]
    coord = 2 * places + rng.normal(scale=0.1, size=(frames, len(types), 3))
    np.save(part / "coord.npy", coord.reshape(frames, -1))
    np.save(part / "box.npy", np.tile(12 * np.eye(3).ravel(), (frames, 1)))
    atoms = np.isin(types, [elements.index(name) for name in selected])
    width = 3 if "dipole" in label else 9
    rows = rng.normal(size=(frames, len(types), width))
    np.save(part / f"{label}.npy", rows[:, atoms].reshape(frames, -1))
    return rows, atoms


@pytest.mark.parametrize("label", ["atomic_dipole", "atom_polarizability"])
@pytest.mark.parametrize("elements", [["O", "H", "Na"], ["Na", "H", "O"]])
@pytest.mark.parametrize("selected", [["O"], ["H", "Na"], ["H", "Na", "O"]])
def test_elements_with_tensors_are_found_by_their_rows_in_all_systems(
    label, elements, selected
):
    # the numbers of rows of one of them alone would be those of O or of Na
    second = {"O": 3, "H": 4, "Na": 1}
    data = {"a": {"O": 2, "H": 4, "Na": 2}, "b": second}
    rows = {
        name: write_tensors(name, elements, [of[e] for e in elements], selected, label)
        for name, of in data.items()
    }
    quantity = "dipole" if "dipole" in label else "polarizability"
    assert main(["init", "a", "b", "--property", quantity]) == 0
    config = load_config("input.yaml")
    model = config.task(None).model
    chosen = model.fitting_net.sel_type
    assert sorted(model.type_map[k] for k in chosen or range(3)) == selected
    assert (chosen is None) == (len(selected) == 3)
    of_run = open_run(config)[""].train
    for source in of_run:
        stored, atoms = rows[source.name]
        label_read = source.frame(1).labels[f"atom_{quantity}"].reshape(stored[1].shape)
        np.testing.assert_array_equal(
            label_read, np.where(atoms[:, None], stored[1], 0)
        )
    assert main(["convert", "a", "b", "all.xyz"]) == 0


def test_elements_with_tensors_that_are_not_clear_must_be_named(capsys):
    write_tensors("a", ["Na", "Cl"], [4, 4], ["Cl"])
    for words in (["init", "a", "--property", "dipole"], ["convert", "a", "out"]):
        assert main(words) == 2
        assert capsys.readouterr().err == (
            "dp-ema: a/set.000/atomic_dipole.npy: has rows of 4 of 8 atoms, which may be those of "
            "one of: Cl, Na. Name the elements, such as --sel-type Cl.\n"
        )
    assert main(["init", "a", "--property", "dipole", "--sel-type", "Cl"]) == 0
    assert load_config("input.yaml").task(None).model.fitting_net.sel_type == [1]
    assert main(["convert", "a", "out", "--sel-type", "Cl"]) == 0
    assert (
        "tensors are those of Cl (--sel-type), and 0 of other atoms"
        in capsys.readouterr().out
    )
    stored = np.load("a/set.000/atomic_dipole.npy").reshape(4, 4, 3)
    written = np.load("out/Cl4Na4/set.000/atom_dipole.npy").reshape(4, 8, 3)
    np.testing.assert_array_equal(
        written, np.concatenate([np.zeros((4, 4, 3)), stored], axis=1)
    )
    # the zeros of the others were learned without a word
    for options in ([], ["--sel-type", "Cl"]):
        Path("input.yaml").unlink()
        assert main(["init", "out", "--property", "dipole", *options]) == 0
        words = (
            "warning: atom_dipole: is 0 for all atoms of Na. If these have none, set "
        )
        assert (
            f"{words}model.fitting_net.sel_type = [1]." in capsys.readouterr().out
        ) == (not options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--property", "dipole", "--sel-type", "K"], "init --sel-type K: "),
        (
            ["--sel-type", "Cl"],
            "init --sel-type: is an option for --property dipole and polarizability. Leave it out.",
        ),
    ],
)
def test_elements_with_tensors_that_do_not_fit_are_refused(words, message, capsys):
    write_tensors("a", ["Na", "Cl"], [4, 4], ["Cl"])
    assert main(["init", "a", *words]) == 2
    assert message in capsys.readouterr().err
