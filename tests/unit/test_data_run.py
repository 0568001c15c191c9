"""The data of a run as its config names them."""

import re
from pathlib import Path

import numpy as np
import pytest
from data_files import text, to_hdf5, with_close_atoms
from helpers import tiny_input, write_system
from two_tasks import input_of_two_tasks, write_data

from deepmd_ema.config import config_from_dict
from deepmd_ema.data.run import check_task, content_of, difference, open_run
from deepmd_ema.errors import DataError


def checked(config):
    """Return the only task, its data and what the checks find."""
    data = open_run(config)
    [task] = config.tasks.values()
    return task, data, check_task(config, "", data[""])


def write_npy(path, energy):
    write_system(path, frames=4, natoms=6, mixed=path.name == "mixed", seed=1)
    file = next(path.rglob("energy.npy"))
    np.save(file, np.load(file) + energy)


def write_hdf5(path, energy):
    write_npy(path.parent / "plain", energy)
    with pytest.importorskip("h5py").File(path, "w") as file:
        to_hdf5(path.parent / "plain", file.create_group("w"))


def write_data_base(path, energy):
    pytest.importorskip("lmdb")
    from data_files import toy_records, write_lmdb

    write_lmdb(
        path,
        [
            {**record, "energies": record["energies"] + energy}
            for record in toy_records(4)
        ],
    )


def write_frames(path, energy):
    path.write_text("".join(text(energy=k + energy) for k in range(4)))


@pytest.mark.parametrize(
    ("name", "write", "files"),
    [
        ("plain", write_npy, "set.000/energy.npy"),
        ("a.h5", write_hdf5, "a.h5"),
        ("a.lmdb", write_data_base, "data.mdb"),
        ("a.extxyz", write_frames, "a.extxyz"),
    ],
)
def test_copies_of_data_are_equal_and_a_changed_label_is_found(
    tmp_path, monkeypatch, name, write, files
):
    found = []
    for rank, energy in enumerate((0.0, 0.0, 0.5)):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        write(Path(name), energy)
        found.append(content_of(open_run(config_from_dict(tiny_input([name])))))
    assert difference(found[1], found[0]) == ""
    assert re.fullmatch(
        rf"{name}\S*: \S*{files}: other content", difference(found[2], found[0])
    )
    assert difference({}, found[0]).endswith("frames: none here, 4 on rank 0")


def test_frames_with_atoms_closer_than_min_pair_dist_are_left_out_of_training(
    tmp_path, water_like
):
    close = with_close_atoms(tmp_path / "close", [1, 4], 0.2)
    assert (
        len(checked(config_from_dict(tiny_input([water_like, close])))[2].problems) == 2
    )
    options = {
        "training__training_data__min_pair_dist": 0.21,
        "training__training_data__batch_size": [2, 3],
    }
    config = config_from_dict(tiny_input([water_like, close], **options))
    _, data, report = checked(config)
    assert [source.num_frames for source in data[""].train] == [16, 4]
    assert [data[""].train[1].frame(k).source for k in range(4)] == [
        (str(close), k) for k in (0, 2, 3, 5)
    ]
    assert report.problems == []
    text = (
        f"{close}: leaves out 2 of 6 frames: two atoms are closer than min_pair_dist = 0.21 "
        "angstrom"
    )
    assert text in report.notes
    accepted = tiny_input([close], training__training_data__min_pair_dist=0.19)
    _, data, report = checked(config_from_dict(accepted))
    assert (data[""].train[0].num_frames, report.problems) == (6, [])


def test_systems_without_a_frame_that_is_left_are_reported_where_options_count_them(
    tmp_path, water_like, caplog
):
    close = with_close_atoms(tmp_path / "close", slice(None), 0.2)
    options = {"training__training_data__min_pair_dist": 0.3}
    _, data, _ = checked(config_from_dict(tiny_input([water_like, close], **options)))
    assert [source.name for source in data[""].train] == [str(water_like)]
    lost = (
        f"training.training_data.min_pair_dist: all frames of {close} have atoms closer than 0.3 "
        "angstrom"
    )
    assert caplog.messages == [f"{lost}: the systems are left out."]
    with pytest.raises(DataError, match=re.escape(f"{lost}. Use a smaller distance.")):
        open_run(config_from_dict(tiny_input([close], **options)))
    options["training__training_data__sys_probs"] = [0.5, 0.5]
    with pytest.raises(
        DataError,
        match=re.escape(
            f"{lost}, and batch_size, sys_probs or auto_prob counts systems."
        ),
    ):
        open_run(config_from_dict(tiny_input([water_like, close], **options)))


def test_a_system_that_is_listed_twice_is_named_as_such(here):
    for k, name in enumerate("ab"):
        write_system(f"all/{name}", frames=3, natoms=6, seed=k)
    with pytest.importorskip("h5py").File("c.h5", "w") as file:
        for name in "ab":
            to_hdf5(Path("all", name), file.create_group(name))
    *_, report = checked(
        config_from_dict(tiny_input(["all/a", "./all", "c.h5#/a", "c.h5#/b"]))
    )
    assert report.warnings[0] == (
        "listed more than once: all/a (2 times). Their frames count as often; list each system "
        "once."
    )
    *_, report = checked(config_from_dict(tiny_input(["all/a", "all/a"])))
    assert not any("copies of another" in text for text in report.warnings)
    *_, report = checked(config_from_dict(tiny_input(["all/a"], ["all/../all/a"])))
    assert report.warnings[0].startswith(
        "listed in training_data and in validation_data: all/a. Validation errors"
    )
    *_, report = checked(config_from_dict(tiny_input(["all/a"], ["all/b"])))
    assert not any(text.startswith("listed") for text in report.warnings)


def test_warnings_of_a_task_begin_with_its_name_and_errors_with_the_file(tmp_path):
    folder = write_data(tmp_path)
    file = folder / "water1" / "set.000" / "force.npy"
    force = np.load(file)
    force[1] += 1.0
    force[3, 0] = np.nan
    np.save(file, force)
    config = config_from_dict(input_of_two_tasks(folder))
    data = open_run(config)
    report = check_task(config, "water", data["water"])
    [problem] = report.problems
    assert problem.startswith(f"{file}: frame 3 ")
    [warning] = [text for text in report.warnings if "do not add up to zero" in text]
    assert warning.startswith("task water: ")


EARLY_STOP = {"patience": 2}


@pytest.mark.parametrize(
    ("metric", "stop", "errors", "warned"),
    [
        ("E:MAE", EARLY_STOP, ["early_stop"], ["validation_metric"]),
        ("E:MAE", None, [], ["validation_metric"]),
        ("F:RMSE", EARLY_STOP, [], []),
        ("E:MAE", {**EARLY_STOP, "metric": "F:MAE"}, [], ["validation_metric"]),
        ("V:MAE", EARLY_STOP, [], []),
    ],
)
def test_a_metric_that_chooses_weights_has_labels_in_the_validation_data(
    tmp_path, metric, stop, errors, warned
):
    train = write_system(tmp_path / "t", frames=4, natoms=6)
    valid = write_system(tmp_path / "v", frames=4, natoms=6, energy=False)
    validating = {"full_validation": True, "validation_metric": metric}
    if stop is not None:
        validating["early_stop"] = stop
    loss = {"loss__start_pref_v": 0.1, "loss__limit_pref_v": 0.1}
    for is_full in (True, False):
        validating["full_validation"] = is_full
        config = config_from_dict(
            tiny_input([train], [valid], validating=validating, **loss)
        )
        *_, report = checked(config)
        for texts, wanted in ((report.problems, errors), (report.warnings, warned)):
            named = re.findall(r"validating\.(\w+): no validation frame", str(texts))
            assert named == (wanted if is_full else [])
    # validation data of the training files, which have energies
    split = tiny_input(
        [train], validating=validating, training__validation_fraction=0.4
    )
    assert not checked(config_from_dict(split))[2].problems


@pytest.mark.parametrize(
    ("open_frames", "metric"), [(True, "S"), (True, "V"), (False, "S")]
)
def test_a_metric_of_stress_has_validation_frames_with_a_cell(
    tmp_path, open_frames, metric
):
    train = write_system(tmp_path / "t", frames=4, natoms=6)
    valid = write_system(tmp_path / "v", frames=4, natoms=6)
    np.save(valid / "set.000" / "weight.npy", np.zeros(4))  # counts in training only
    if open_frames:
        (valid / "nopbc").touch()
    validating = {
        "full_validation": True,
        "validation_metric": f"{metric}:MAE",
        "early_stop": EARLY_STOP,
    }
    values = tiny_input(
        [train],
        [valid],
        validating=validating,
        training__training_data__frame_weights=True,
    )
    *_, report = checked(config_from_dict(values))
    named = [text for text in report.problems if "validating.early_stop" in text]
    expected = []
    if open_frames and metric == "S":
        expected = [
            "validating.early_stop: no validation frame has virial and a cell, so that S:MAE does "
            "not count. Choose E:MAE or F:MAE or V:MAE."
        ]
    assert named == expected


@pytest.mark.parametrize("alone", [True, False])
def test_early_stop_of_tasks_is_an_error_where_no_other_task_is_validated(
    tmp_path, alone
):
    folder = write_data(tmp_path)
    for file in (folder / "water2").rglob("energy.npy"):
        file.unlink()
    values = input_of_two_tasks(folder)
    values["validating"] |= {"validation_metric": "E:MAE", "early_stop": EARLY_STOP}
    if alone:
        del values["training"]["data_dict"]["salt"]["validation_data"]
    config = config_from_dict(values)
    data = open_run(config)
    report = check_task(config, "water", data["water"])
    start = "task water: validating.early_stop: no validation frame has energy, so that E:MAE"
    texts = report.problems if alone else report.warnings
    [text] = [text for text in texts if "early_stop" in text]
    assert text == f"{start} does not count. Choose F:MAE or V:MAE or S:MAE."
    assert not [text for text in report.problems if "early_stop" in text and not alone]


@pytest.mark.parametrize("pref_atomic", [0.0, 1.0])
def test_elements_without_tensors_are_named_if_the_loss_learns_the_tensors(
    tmp_path, pref_atomic
):
    system = write_system(
        tmp_path / "s", frames=4, natoms=6, energy=False, force=False, virial=False
    )
    dipoles = np.random.default_rng(1).normal(size=(4, 6, 3))
    dipoles[:, np.loadtxt(system / "type.raw", dtype=int) == 1] = 0.0
    np.save(system / "set.000" / "atomic_dipole.npy", dipoles.reshape(4, -1))
    np.save(system / "set.000" / "dipole.npy", dipoles.sum(axis=1))
    options = {
        "model__fitting_net": {"type": "dipole"},
        "loss": {"type": "tensor", "pref": 1.0, "pref_atomic": pref_atomic},
    }
    *_, report = checked(config_from_dict(tiny_input([system], **options)))
    named = [text for text in report.warnings if "is 0 for all atoms of H." in text]
    assert len(named) == (pref_atomic > 0)
