"""Bytes that were changed on the disk: no file of weights is ever read as other weights than were written."""

import json
import random
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from infer_models import write_run

from deepmd_ema import checkpoint
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.interop.tree_files import read_tree, write_tree

OLD = Path(__file__).parent / "golden" / "checkpoints" / "0.1.0"
FOLDER_BIT, ATTRIBUTES = 0x10, 38  # of MS-DOS; place of the external attributes in an entry of the directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def directory_of(data):
    """Return the begin and the end of the directory of an archive."""
    end = data.rindex(b"PK\x05\x06")
    return int.from_bytes(data[end + 16 : end + 20], "little"), len(data)


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


# ---- checkpoints


@pytest.mark.parametrize("digest", ["with a digest", "without"])
def test_an_entry_that_a_flipped_bit_makes_a_folder_is_refused(run, tmp_path, digest):
    """Its checksum was right, torch read nothing, and weights of 0.3 were 7.9e-275."""
    path = Path(shutil.copy(run[0] if digest == "with a digest" else OLD / "model.ckpt-4.pt", tmp_path / "m.pt"))
    data = path.read_bytes()
    entry = directory_of(data)[0]
    while b"/data/" not in data[entry : entry + 80]:
        entry = data.index(b"PK\x01\x02", entry + 4)
    place = entry + ATTRIBUTES
    path.write_bytes(data[:place] + bytes([data[place] | FOLDER_BIT]) + data[place + 1 :])
    with pytest.raises(CheckpointError, match=r"m.pt: damaged, the entry .*/data/.* is not as it was written"):
        checkpoint.load(path)


@pytest.mark.parametrize("file", ["new", "of 0.1.0"])
def test_no_bit_of_the_directory_of_an_archive_makes_other_weights(run, tmp_path, file):
    original = (run[1] if file == "new" else OLD / "model_ema.ckpt-4.pt").read_bytes()
    path = tmp_path / "m.pt"
    path.write_bytes(original)
    expected = content_digest(checkpoint.load(path))
    begin, end = directory_of(original)
    for bit in random.Random(1).sample(range(8 * begin, 8 * end), 300):
        path.write_bytes(flipped(original, bit))
        try:
            found = checkpoint.load(path)
        except CheckpointError:
            continue
        assert content_digest(found) == expected, bit


def test_a_compressed_archive_is_refused(run, tmp_path):
    with zipfile.ZipFile(run[0]) as old, zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match=r"damaged, the entry .* is not as it was written"):
        checkpoint.load(tmp_path / "m.pt")


@pytest.mark.parametrize("name", ["model", "config", "step"])
def test_content_that_was_changed_under_right_checksums_is_refused(run, tmp_path, name):
    payload = torch.load(run[0], weights_only=True)
    assert payload["digest"]
    if name == "model":
        payload["model"]["out_bias"] *= 1 + 1e-15
    elif name == "config":
        payload["config"]["model"]["type_map"].reverse()
    else:
        payload["step"] += 1
    torch.save(payload, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="damaged, its content is not what was written"):
        checkpoint.load(tmp_path / "m.pt")


def test_a_digest_reports_content_apart_and_nothing_else():
    one = {"a": torch.arange(3.0), "b": [1, 2.0, "x", None, True], "c": {"d": np.float64(2)}}
    same = {"a": torch.arange(6.0).view(3, 2)[:, 0] / 2, "b": (1, 2.0, "x", None, True), "c": {"d": np.array(2.0)}}
    assert content_digest(one) == content_digest(same)
    others = [
        {**one, "a": torch.arange(3.0).double()},
        {**one, "a": torch.arange(3.0)[None]},
        {**one, "a": torch.tensor([-0.0, 1, 2])},
        {**one, "b": [1, 2, "x", None, True]},
        {**one, "b": [1, 2.0, "x", None, 1]},
        {**one, "b": [1, 2.0, ["x", None, True]]},
        {**one, "c": {"d": np.array(2.0, ">f8")}},
        {**one, "c": {"e": np.array(2.0)}},
        {**one, "e": {}},
    ]
    assert len({content_digest(tree) for tree in (one, *others)}) == 1 + len(others)


# ---- frozen models


@pytest.fixture(params=[".dp", ".yaml"])
def frozen(request, run, tmp_path):
    return freeze(load_model(run[0], use_average=True), tmp_path / f"m{request.param}").path


def change_text(path, old, new):
    """Put other words of the same length into a file."""
    assert len(old) == len(new)
    data = path.read_bytes()
    assert data.count(old)
    path.write_bytes(data.replace(old, new, 1))


def test_a_frozen_model_whose_facts_were_changed_is_refused(frozen):
    change_text(frozen, b"mean_age", b"mean_agf")
    with pytest.raises(CheckpointError, match=r"damaged, its content is not what was written.*Freeze the model again"):
        load_model(frozen)


def test_numbers_of_a_frozen_model_that_were_changed_are_refused(run, tmp_path):
    import h5py

    path = freeze(load_model(run[0]), tmp_path / "m.dp").path
    with h5py.File(path, "r+") as file:
        name = next(name for name in file if file[name].size > 4)
        file[name][...] = file[name][()] * (1 + 2**-52)
    with pytest.raises(CheckpointError, match="damaged, its content is not what was written"):
        load_model(path)


@pytest.mark.parametrize("written", ["now", "with the digest last"])
def test_a_yaml_that_was_cut_at_the_end_of_any_line_is_refused(run, tmp_path, written):
    path = freeze(load_model(run[0], use_average=True), tmp_path / "m.yaml").path
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0].startswith("digest: ")
    if written != "now":
        lines = [*lines[1:], lines[0]]
        path.write_text("".join(lines))
        read_tree(path)
    for kept in (*range(1, 20), *range(len(lines) - 40, len(lines))):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(CheckpointError, match="damaged"):
            read_tree(path)


def test_a_frozen_model_of_before_and_one_that_deepmd_kit_has_written_again_are_read(frozen):
    tree = read_tree(frozen)
    assert load_model(OLD / "average.dp").info.weights == "ema"
    # DeePMD-kit keeps what it does not know, and adds the time
    write_tree(frozen, tree)
    if frozen.suffix == ".dp":
        import h5py

        with h5py.File(frozen, "r+") as file:
            file.attrs["json"] = json.dumps({"time": "2026-01-01", **json.loads(file.attrs["json"])})
    else:
        frozen.write_text("time: 2026-01-01\n" + frozen.read_text())
    assert load_model(frozen).info.weights == "ema"


def test_what_average_a_file_holds_survives_what_deepmd_kit_keeps_of_it(frozen):
    """A `.dp` of an average that had been converted and back was shown as live weights of an unknown step."""
    tree = read_tree(frozen)
    del tree["dp_ema"]
    tree["software"] = "deepmd-kit"
    write_tree(frozen, tree)
    info = load_model(frozen).info
    assert info.describe() == "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps on average"
    assert list(info.config) == ["model"]
    del tree["model_def_script"]["dp_ema"]
    write_tree(frozen, tree)
    words = "weights of an unknown step; the file does not say whether they are live or averaged"
    assert load_model(frozen).info.describe() == words
    again = freeze(load_model(frozen), frozen.with_name("again.dp")).path
    assert load_model(again).info.describe() == words
    with pytest.raises(CheckpointError, match=r"holds unnamed weights \(frozen\), no average"):
        load_model(frozen, use_average=True)
