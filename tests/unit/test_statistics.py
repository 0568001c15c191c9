"""Statistics of data before training."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_options import MODELS_OF_TYPES, changed_sections, replaced
from helpers import write_system
from toy_models import toy_atoms

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.config.fields import plain
from deepmd_ema.config.labels import ENERGY, LABELS
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.findings import ERROR
from deepmd_ema.model.build import build_model
from deepmd_ema.model.stat_file import SETTINGS, read_stat_file, write_stat_file
from deepmd_ema.model.statistics import Statistics, collect_statistics

GOLDEN = Path(__file__).parents[1] / "golden"  # made_by: see golden/README.md
SYSTEMS, CASES = json.loads((GOLDEN / "statistics.json").read_text()).values()
SAME_MATH = 1e-10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: write_system(tmp_path_factory.mktemp("stat") / name, **about)
        for name, about in SYSTEMS.items()
    }


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "statistics.npz") as stored:
        return dict(stored)


def frames_of(folder):
    types = np.loadtxt(folder / "type.raw", dtype=int)
    for part in sorted(folder.glob("set.*")):
        stored = {file.stem: np.load(file) for file in part.glob("*.npy")}
        for k, coord in enumerate(stored["coord"]):
            yield Frame(
                coord.reshape(-1, 3),
                types,
                stored["box"][k].reshape(3, 3) if "box" in stored else None,
                {ENERGY: stored["energy"][k]},
                stored["fparam"][k] if "fparam" in stored else None,
                stored["aparam"][k].reshape(len(types), -1)
                if "aparam" in stored
                else None,
            )


def case(name, folders, frames_per_batch=3):
    """Return the config of a case and its statistics."""
    config, systems = (
        model_config_from_dict(CASES[name]["model"]),
        CASES[name]["systems"],
    )
    model = build_model(config)
    batches = []
    for system in systems:
        frames = list(frames_of(folders[system]))
        starts = range(0, len(frames), frames_per_batch)
        batches += [
            collate(frames[k : k + frames_per_batch], model.layout) for k in starts
        ]
    return config, collect_statistics(model, config, batches)


def collected(config, frames, **options):
    """Return the statistics of frames in one batch."""
    model = build_model(config)
    return collect_statistics(
        model, config, [collate(list(frames), model.layout, **options)]
    )


def environment(config, found):
    """Return mean and spread (T, 4) of the columns of the environment matrix that statistics give a
    model.
    """
    model = build_model(config)
    model.apply_statistics(found)
    return model.descriptor.mean[:, 0].numpy(), model.descriptor.stddev[:, 0].numpy()


def read(path, config):
    return read_stat_file(path, config, build_model(config).descriptor)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=SAME_MATH, atol=SAME_MATH)


def sums_of(found):
    """Return the sums by name, without their folder."""
    return {name.partition("/")[2]: sums for name, sums in found.measured.items()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_statistics_are_those_of_deepmd_kit(name, folders, golden):
    config, found = case(name, folders)
    for t in range(len(config.type_map)):
        close(sums_of(found)[f"r_{t}"], golden[f"{name}/r_{t}"])
        close(sums_of(found)[f"a_{t}"], golden[f"{name}/a_{t}"])
    close(found.fit.bias, golden[f"{name}/bias_atom_energy"].ravel())
    close(found.fit.std, golden[f"{name}/std_atom_energy"].ravel())
    for kind in ("fparam", "aparam"):
        if f"{name}/{kind}" in golden:
            close(found.conditions[kind], golden[f"{name}/{kind}"])
    assert found.observed == ("H", "O")


def test_means_spreads_and_biases_reach_the_buffers(folders):
    config, found = case("parameters", folders)
    model = build_model(config)
    model.apply_statistics(found)
    mean, spread = model.descriptor.mean, model.descriptor.stddev
    for t in range(2):
        count, total, squares = sums_of(found)[f"r_{t}"]
        close(mean[t, :, 0].numpy(), total / count)
        close(spread[t, :, 0].numpy(), np.sqrt(squares / count - (total / count) ** 2))
        count, total, squares = sums_of(found)[f"a_{t}"]
        close(spread[t, :, 1:].numpy(), np.sqrt(squares / count - (total / count) ** 2))
    assert mean[..., 1:].abs().max() == 0
    close(model.out_bias.numpy().ravel(), found.fit.bias)
    count, total, squares = found.conditions["fparam"].T
    close(model.fitting.fparam_avg.numpy(), total / count)
    close(
        model.fitting.fparam_inv_std.numpy(),
        1 / np.sqrt(squares / count - (total / count) ** 2),
    )


def test_energies_of_isolated_atoms_given_in_the_config_are_the_bias(folders):
    section = CASES["preset"]["model"] | {
        "fitting_net": {"neuron": [4], "atom_ener": [-3.2, None]}
    }
    config = model_config_from_dict(
        {key: value for key, value in section.items() if key != "preset_out_bias"}
    )
    frames = list(frames_of(folders["a"]))
    found = collected(config, frames)
    assert found.fit.bias[0] == -3.2
    left = np.mean([f.labels[ENERGY] + 3.2 * (f.atom_type == 0).sum() for f in frames])
    close(found.fit.bias[1], left / (frames[0].atom_type == 1).sum())


def test_elements_that_the_compositions_do_not_report_apart_are_named(folders):
    _, apart = case("plain", folders)
    _, together = case("parameters", folders)  # one composition only
    assert apart.fit.undetermined == ()
    assert together.fit.undetermined == ("O", "H")
    assert (
        "the energies of O, H cannot be determined separately" in together.lines()[-1]
    )
    assert f"{1000 * apart.fit.rmse_per_atom:.4g} meV/atom" in apart.lines()[1]
    assert f"O {apart.fit.bias[0]:.6g} eV" in apart.lines()[0]


@pytest.mark.parametrize(
    "file",
    [
        "stat",
        "stat.h5",
    ],
)
@pytest.mark.parametrize("name", ["plain", "parameters"])
def test_a_stat_file_gives_back_what_was_written(name, file, folders, tmp_path):
    config, found = case(name, folders)
    assert read(tmp_path / file, config) == "there is no such file"
    write_stat_file(tmp_path / file, config, found)
    write_stat_file(tmp_path / file, config, found)  # over an older one
    back = read(tmp_path / file, config)
    one, other = build_model(config), build_model(config)
    one.apply_statistics(found)
    other.apply_statistics(back)
    assert all(
        torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True)
    )
    assert back.observed == found.observed


def test_a_stat_file_has_the_layout_of_deepmd_kit(folders, golden, tmp_path):
    config, found = case("plain", folders)
    write_stat_file(tmp_path / "stat", config, found)
    root = tmp_path / "stat" / "O H"
    (environment,) = (path for path in root.iterdir() if path.is_dir())
    assert (
        environment.name == "60e96730d1720ee920fe21fdfbe81bbea79dc3aa"
    )  # of DeePMD-kit for these options
    for name in ("r_0", "r_1", "a_0", "a_1"):
        with (environment / name).open("rb") as stream:
            close(np.load(stream), golden[f"plain/{name}"])
    with (root / "bias_atom_energy").open("rb") as stream:
        close(np.load(stream), golden["plain/bias_atom_energy"])
    with (root / "observed_type").open("rb") as stream:
        assert np.load(stream).tolist() == [b"H", b"O"]


def test_a_stat_file_has_the_digest_of_its_data_after_what_0_3_0_reads(
    folders, tmp_path
):
    config, found = case("plain", folders)
    write_stat_file(tmp_path / "stat", config, replace(found, content="0123abcd"))
    with (tmp_path / "stat" / "O H" / SETTINGS).open("rb") as stream:
        options, content = np.load(stream)
    assert json.loads(options).keys() == {"model"}
    assert content == b"0123abcd"
    assert read(tmp_path / "stat", config).content == "0123abcd"


def test_a_stat_file_of_other_options_is_not_taken(folders, tmp_path):
    config, found = case("plain", folders)
    write_stat_file(tmp_path / "stat", config, found)
    longer = replace(config, descriptor=replace(config.descriptor, rcut=4.5))
    excluded = replace(
        config, descriptor=replace(config.descriptor, exclude_types=[[0, 1]])
    )
    with_fparam = replace(
        config, fitting_net=replace(config.fitting_net, numb_fparam=1)
    )
    assert (
        read(tmp_path / "stat", longer)
        == "it is of other options: model.descriptor.rcut = 4.0, now 4.5"
    )
    assert read(tmp_path / "stat", excluded).endswith(
        "model.descriptor.exclude_types = [], now [[0, 1]]"
    )
    assert read(tmp_path / "stat", with_fparam).endswith(
        "model.fitting_net.numb_fparam = 0, now 1"
    )
    wider = replace(config, fitting_net=replace(config.fitting_net, neuron=[7]))
    for same in (config, wider):
        assert isinstance(read(tmp_path / "stat", same), Statistics)


def test_a_stat_file_of_an_earlier_version_is_made_anew(folders, tmp_path):
    config, found = case("plain", folders)
    write_stat_file(tmp_path / "stat", config, found)
    with (tmp_path / "stat" / "O H" / SETTINGS).open("wb") as stream:
        np.save(stream, np.array([json.dumps({"rcut": 4.0}).encode()]))
    assert read(tmp_path / "stat", config).startswith(
        "it was written by an earlier version of dp-ema"
    )


@pytest.mark.parametrize("kind", ["property", "dos"])
def test_a_stat_file_of_deepmd_kit_with_another_number_of_values_is_not_taken(
    kind, tmp_path
):
    """It does not say of which options it is."""
    width = {"property": "task_dim", "dos": "numb_dos"}[kind]
    config = quantity(kind, **{width: 3})
    write_stat_file(tmp_path / "stat", config, collected(config, labelled(config)))
    (tmp_path / "stat" / "O H" / SETTINGS).unlink()
    assert isinstance(read(tmp_path / "stat", config), Statistics)
    found = read(tmp_path / "stat", quantity(kind, **{width: 2}))
    assert re.fullmatch(
        r"bias_atom_(gap|dos) has shape \[2, 3\], expected \[2, 2\]", found
    ), found


def quantity(kind, **fitting):
    """Return the config of a model of a property or a density of states."""
    fitting = {"type": kind, "neuron": [4], **fitting}
    if kind == "property":
        fitting["property_name"] = "gap"
    return model_config_from_dict(CASES["plain"]["model"] | {"fitting_net": fitting})


def labelled(config):
    """Return frames of two compositions with labels of frames, and as many parameters as a model
    has.
    """
    rng, fitting = np.random.default_rng(2), config.fitting_net
    label = fitting.labels[0]
    for natoms in (7, 9, 10, 11):
        coord, types = toy_atoms(natoms, natoms, len(config.type_map))
        yield Frame(
            coord,
            types,
            None,
            {label: rng.normal(2.0, 1.0, LABELS[label].shape)},
            _fparam(fitting, natoms),
            coord[:, [0] * fitting.numb_aparam] if fitting.numb_aparam else None,
        )


def _fparam(fitting, natoms):
    """Return the parameters of a frame; the smallest one has the default, as a system without a
    file of them.
    """
    if fitting.default_fparam and natoms == 7:
        return np.array(fitting.default_fparam)
    return (
        np.arange(1.0, 1 + fitting.numb_fparam) * natoms
        if fitting.numb_fparam
        else None
    )


WITH_ONE_VALUE = {  # or needs another option; the elements are in the path of the statistics
    "add_chg_spin_ebd",
    "atom_ener",
    "attn_mask",
    "block_attn_res",
    "bridging_method",
    "default_chg_spin",
    "edge_cartesian",
    "full_attn_res",
    "lmax",
    "m_schedule",
    "model_branch_alias",
    "node_cartesian",
    "numb_fparam",
    "preset_out_bias",
    "resnet_dt",
    "s2_activation",
    "sandwich_norm",
    "skip_stat",
    "so2_attn_res",
    "type_map",
    "use_aparam_as_mask",
    "use_srtab",
}


def is_same(one, other):
    return one.observed == other.observed and all(
        x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)
        for x, y in (
            (one.measured, other.measured),
            (one.conditions, other.conditions),
            (
                {"bias": one.fit.bias, "std": one.fit.std},
                {"bias": other.fit.bias, "std": other.fit.std},
            ),
        )
    )


@pytest.mark.parametrize("name", MODELS_OF_TYPES)
def test_a_stat_file_is_not_taken_where_an_option_changes_the_statistics(
    name, tmp_path
):
    """Options are those of the declaration: a new one is tried as well."""
    config = model_config_from_dict(MODELS_OF_TYPES[name])
    stored = collected(config, labelled(config))
    write_stat_file(tmp_path / "stat", config, stored)
    assert is_same(read(tmp_path / "stat", config), stored)
    untried, influential = [], []
    of_network = name.startswith("fitting")  # each network has a row of its own
    for place, values in changed_sections(plain(config), type(config)):
        if place[0] == "fitting_net" and not of_network:
            continue
        accepted = 0
        for value in values:
            with suppress(UserError):
                other = model_config_from_dict(replaced(plain(config), place, value))
                if plain(other) == plain(config) or any(
                    finding.severity == ERROR for finding in other.findings()
                ):
                    continue
                found = collected(other, labelled(other))
                accepted += 1
                if not is_same(found, stored):
                    influential.append(place[-1])
                    back = read(tmp_path / "stat", other)
                    assert isinstance(back, str) or is_same(back, found), (place, value)
            if accepted == 2:
                break
        if not accepted:
            untried.append(place[-1])
    assert {"atom_exclude_types", *["numb_aparam"] * of_network} < set(influential)
    assert set(untried) <= WITH_ONE_VALUE


def test_a_damaged_stat_file_is_named(folders, tmp_path):
    config, found = case("plain", folders)
    for name in ("stat", "stat.h5"):
        write_stat_file(tmp_path / name, config, found)
    (tmp_path / "stat" / "O H" / "bias_atom_energy").write_bytes(b"\x93NUMPY")
    (tmp_path / "stat.h5").write_bytes(b"not HDF5")
    for name in ("stat", "stat.h5"):
        with pytest.raises(
            DataError, match=rf"{name}: statistics that cannot be read .* Remove it"
        ):
            read(tmp_path / name, config)
