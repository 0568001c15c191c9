"""Compiled models (``.pt2``): the function that is compiled, and the file that comes of it."""

import io
import json
import re
import sys
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import write_run
from torch._inductor import config as inductor_options
from torch._inductor.exc import CppCompileError
from toy_models import TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

from deepmd_ema import cli
from deepmd_ema.commands import freeze as export
from deepmd_ema.config.labels import ATOM_ENERGY, ENERGY, FORCE, VIRIAL
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.geometry import KeptPairs, find_pairs
from deepmd_ema.infer.load import LoadedModel, Provenance, load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop import pt2
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.extended_model import ExtendedModel

TYPES = np.array([1, 0, 2, 1, 1, 0, 2, 0, 1])
SMALL = {
    "model__descriptor__neuron": [2],
    "model__descriptor__axis_neuron": 1,
    "model__descriptor__type_one_side": True,
    "model__fitting_net__neuron": [2],
}

# torch's own warnings; compiling takes a minute or more
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def with_images(coord, types, box, reach, seed):
    """Return the arguments of a program with ghost atoms: neighbors in any order, beyond the
    cutoff, with gaps.
    """
    pairs = find_pairs(coord, box, reach)
    rng, natoms = np.random.default_rng(seed), len(coord)
    rows = [np.flatnonzero(pairs.i == i) for i in range(natoms)]
    nlist = np.full((natoms, max(map(len, rows)) + 2), -1)
    for i, mine in enumerate(rows):
        nlist[i, rng.permutation(nlist.shape[1])[: len(mine)]] = (
            natoms + mine
        )  # every neighbor is an image of its own
    extended = np.concatenate([coord, coord[pairs.j] + pairs.shift @ box])
    mapping = np.concatenate([np.arange(natoms), pairs.j])
    return [
        torch.as_tensor(a)[None] for a in (extended, types[mapping], nlist, mapping)
    ]


@pytest.mark.parametrize("descriptor", [*sorted(DESCRIPTORS), *VARIANTS])
def test_energies_with_images_are_those_of_the_batch(descriptor):
    """A frame of its own neighbors and one with ghosts in any order are the same model, forces on
    images included.
    """
    _, model = toy_model(descriptor)
    coord, _ = toy_atoms(0, len(TYPES))
    batch = batch_of(model, (coord, TYPES, TRICLINIC))
    known = model(batch)
    args = with_images(coord, TYPES, TRICLINIC, model.layout.rcut + 0.5, 0)
    found = ExtendedModel(model)(*args)
    on_images = found["energy_derv_r"][0, :, 0]
    force = torch.zeros(len(TYPES), 3, dtype=torch.float64).index_add(
        0, args[3][0], on_images
    )
    pairs = [
        (found["energy_redu"][:, 0], known[ENERGY]),
        (found["energy"][0, :, 0], batch.in_file_order(known[ATOM_ENERGY])),
        (force, batch.in_file_order(known[FORCE])),
        (found["energy_derv_c_redu"][:, 0], known[VIRIAL]),
    ]
    for one, two in pairs:
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert on_images[len(TYPES) :].abs().max() > 1e-6


@pytest.fixture
def as_if_compiled(monkeypatch):
    """Return a function that loads a checkpoint as a compiled model whose code is that of
    Python.
    """

    def compiled_of(path):
        loaded = replace(load_model(path), is_compiled=True)
        function = pt2._with_conditions(loaded.model, loaded.config)
        monkeypatch.setattr(
            pt2, "load_compiled", lambda *_: (function, torch.device("cpu"))
        )
        return loaded

    return compiled_of


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__pair_exclude_types": [[0, 1]]},
        # more neighbors than are kept: pairs are excluded after the nearest were chosen
        {"model__pair_exclude_types": [[0, 1]], "model__descriptor__sel": [5, 6]},
        {"model__fitting_net__numb_fparam": 2, "model__fitting_net__numb_aparam": 1},
    ],
)
@pytest.mark.parametrize("skin", [0.0, 0.6])
def test_frames_that_follow_each_other_keep_their_images(
    tmp_path, as_if_compiled, changes, skin
):
    path = write_run(tmp_path, **changes)[0]
    plain, other = Potential(path, device="cpu"), Potential(as_if_compiled(path))
    rng = np.random.default_rng(0)
    coord, types, box = toy_frame(rng, 12)
    has_parameters = plain.num_conditions["fparam"] > 0
    given = (
        {"fparam": [0.3, 0.4], "aparam": rng.normal(size=(12, 1))}
        if has_parameters
        else {}
    )
    kept, lists = KeptPairs(skin) if skin else None, {}
    for step in range(12):
        cell = None if step in (5, 6) else 1.01 * box if step > 8 else box
        known = plain.evaluate(coord, types, cell, **given)
        found = other.evaluate(coord, types, cell, **given, kept=kept)
        for name, value in vars(known).items():
            np.testing.assert_allclose(
                getattr(found, name), value, rtol=1e-12, atol=1e-12
            )
        # with the object, so that no later one gets its number
        lists[id(other._images.pairs)] = other._images.pairs
        coord = coord + rng.uniform(-0.05, 0.05, coord.shape)
    assert (
        3 <= len(lists) <= 11 or not skin
    )  # kept for some steps, and found again as the cell changes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), **SMALL)


@pytest.fixture(scope="module")
def compiled(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "water.pt2"
    return export.freeze(load_model(run[0], use_average=True), path, device="cpu")


def arrays_of(potential, seed, natoms, periodic=True):
    coord, types, box = toy_frame(np.random.default_rng(seed), natoms)
    found = potential.evaluate(coord, types, box if periodic else None)
    return np.concatenate(
        [
            found.energy,
            found.force.ravel(),
            found.virial.ravel(),
            found.atom_energy.ravel(),
        ]
    )


def test_it_computes_what_the_checkpoint_computes_for_any_number_of_atoms(
    run, compiled
):
    assert max(compiled.difference.values()) < 1e-12
    one, two = Potential(run[1], device="cpu"), Potential(compiled.path)
    for natoms in (1, 2, 12, 30):
        for periodic in (True, False):
            known, found = (arrays_of(p, natoms, natoms, periodic) for p in (one, two))
            np.testing.assert_allclose(found, known, rtol=1e-12, atol=1e-12)


def test_it_says_which_weights_it_holds_and_gives_them_back(run, compiled, tmp_path):
    loaded = load_model(compiled.path)
    assert (
        loaded.info.describe() == load_model(run[0], use_average=True).info.describe()
    )
    again = export.freeze(loaded, tmp_path / "again.dp")
    assert max(again.difference.values()) == 0
    with zipfile.ZipFile(compiled.path) as package:
        facts = json.loads(package.read("model/extra/metadata.json"))
    assert facts["type_map"] == list(loaded.config.type_map)
    assert (facts["rcut"], facts["lower_input_kind"], facts["mixed_types"]) == (
        loaded.model.layout.rcut,
        "nlist",
        False,
    )


def test_a_terminal_shows_which_part_of_compiling_is_done_and_since_when(
    run, tmp_path, monkeypatch
):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def compiling(*_, package_path, **__):
        time.sleep(2.2)
        zipfile.ZipFile(package_path, "w").close()

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiling)
    monkeypatch.setattr(pt2, "_exported", lambda *_: None)
    loaded, shown = load_model(run[0]), []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        pt2.write_pt2(
            tmp_path / "m.pt2",
            loaded.model,
            loaded.config,
            {"model_def_script": {}},
            torch.device("cpu"),
        )
        shown.append(stream.getvalue())
    assert f"{tmp_path / 'm.pt2'}: compiling (2 of 3)  00:02" in shown[0]
    assert (
        not shown[0].rpartition("\r")[0].rpartition("\r")[2].strip()
    )  # the line is gone
    assert shown[1] == ""


def test_torch_alone_runs_it(run, compiled):
    coord, types, box = toy_frame(np.random.default_rng(3), 12)
    model = load_model(run[1]).model
    args = with_images(coord, np.asarray(types), box, model.layout.rcut, 1)
    two_frames = [torch.cat([a, a]) for a in args]
    found = torch._inductor.aoti_load_package(str(compiled.path))(*two_frames)
    known = ExtendedModel(model)(*two_frames)
    for name, value in known.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_a_file_that_was_cut_short_or_changed_is_an_error(compiled, tmp_path):
    content = compiled.path.read_bytes()
    short, changed = tmp_path / "short.pt2", tmp_path / "changed.pt2"
    short.write_bytes(content[: len(content) // 2])
    place = len(content) // 2  # inside of the machine code
    changed.write_bytes(
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    )
    for path in (short, changed):
        with pytest.raises(
            CheckpointError,
            match=f"{path.name}: .*[Ff]reeze the model again|{path.name}: damaged",
        ):
            Potential(path)


def test_without_a_compiler_the_message_says_what_to_install(run, tmp_path, capsys):
    with inductor_options.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert (
            cli.main(["freeze", "-c", str(run[0]), "-o", str(tmp_path / "m.pt2")]) == 2
        )
    assert "no C++ compiler was found (no-such-compiler)" in capsys.readouterr().err
    assert not (tmp_path / "m.pt2").exists()


def test_where_torch_cannot_compile_the_message_says_what_and_what_to_do(
    run, tmp_path, monkeypatch, capsys
):
    """There was a line of torch's and nothing else."""

    def requests(self, batch):
        return torch.arange(sum(batch.slots)) if batch.vector.sum() > 0 else None

    monkeypatch.setattr(ByTypeDescriptor, "slots_of", requests)
    assert cli.main(["freeze", "-c", str(run[0]), "-o", str(tmp_path / "m.pt2")]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"cannot compile this model \(se_e2_a, model/families/se_e2_a/module.py line \d+\). Write "
        r"a .dp",
        said,
    )
    assert "data-dependent" in said
    assert "Run again with --debug" in said
    assert not (tmp_path / "m.pt2").exists()


def test_code_of_an_old_torch_that_does_not_compile_is_made_again_without_vectors(
    run, tmp_path, monkeypatch, capsys, as_if_compiled
):
    """With torch 2.11 se_atten and dpa2 could not be compiled."""
    tried = []

    def compiling(*_, inductor_configs, package_path, **__):
        tried.append(inductor_configs.get("cpp.simdlen"))
        if tried[-1] is None:
            raise CppCompileError(
                ["g++"], "a.cpp:1:1: error: ‘tmp47’ was not declared in this scope"
            )
        zipfile.ZipFile(package_path, "w").close()

    as_if_compiled(run[0])
    monkeypatch.setattr(pt2, "_exported", lambda *_: None)
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiling)
    said = []
    for options, code in (({}, 2), ({"cpp.max_horizontal_fusion_size": 1}, 0)):
        monkeypatch.setattr(pt2, "CODE_OPTIONS", options)
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
            == code
        )
        said.append(capsys.readouterr())
    assert tried == [None, None, 1]
    assert "‘tmp47’ was not declared" in said[0].err
    assert (
        f"compiling it without vectors, of which torch {torch.__version__} makes wrong code"
        in said[1].err
    )
    assert (
        f"without vector instructions, of which torch {torch.__version__} makes wrong code: "
        in said[1].out
    )
    assert "an evaluation of se_atten took 1.2 times as long" in said[1].out


def test_a_file_with_tables_says_so_and_computes_what_the_networks_do_at_any_distance(
    tmp_path, capsys
):
    # of few networks, and without angles: a fifth of the time to compile
    descriptor = {
        "type": "se_e2_r",
        "sel": [46, 92],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [2],
    }
    descriptor["type_one_side"] = True
    run = write_run(
        tmp_path / "run", model__descriptor=descriptor, model__fitting_net__neuron=[2]
    )
    path = tmp_path / "tables.pt2"
    words = [
        "freeze",
        "-c",
        str(run[0]),
        "-o",
        str(path),
        "--device",
        "cpu",
        "--compress",
    ]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"embedding networks as \d+ tables of at most \d+ terms, derivatives within \S+ of the",
        said,
    )
    least = 0.9 * load_model(run[0]).info.min_nbor_dist
    assert f"pairs nearer than {least:.2f} angstrom by the networks" in said
    known, found = Potential(run[0], device="cpu"), Potential(path)
    for natoms in (2, 12, 30):
        coord, types, box = toy_frame(np.random.default_rng(natoms), natoms)
        for distance in (0.95, 0.5):
            coord[1] = coord[0] + [0.0, distance, 0.0]
            one, two = (
                potential.evaluate(coord, types, box) for potential in (known, found)
            )
            for name, value in vars(one).items():
                np.testing.assert_allclose(
                    getattr(two, name), value, rtol=0, atol=1e-8 * abs(value).max()
                )


def test_tables_are_refused_where_they_would_be_ignored(run, tmp_path, capsys):
    path = str(tmp_path / "m.dp")
    for option in ("--compress", "--no-compress"):
        assert cli.main(["freeze", "-c", str(run[0]), option, "-o", path]) == 2
        assert (
            f"{option}: {path} holds the networks themselves" in capsys.readouterr().err
        )
    with pytest.raises(
        UserError,
        match="--compress: tables are for CPUs, and this is compiled for cuda",
    ):
        export._with_tables(load_model(run[0]), torch.device("cuda"), True)
    config, model = toy_model("se_e3")
    loaded = LoadedModel(model.eval(), config, Provenance(tmp_path, "weights"))
    with pytest.raises(
        UserError,
        match="--compress: the descriptor se_e3 has no network of one distance alone",
    ):
        export._with_tables(loaded, torch.device("cpu"), True)
