"""Files that lack parts, hold other types or whose bytes were changed on the disk: one message each, no other end."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_input
from infer_models import write_run
from kept_runs import write_kept_run

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.show import describe
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.interop.tree_files import read_tree, write_tree
from deepmd_ema.training.restart import check_resumable
from deepmd_ema.training.weights import load_restart, load_weights

pytestmark = pytest.mark.timeout(300)


JUNK = (None, "text", -1, 1e300, [], {}, [1, "a"], {"a": 1}, True, 2**70)


CONFIG = config_from_dict(tiny_input(["data"], ["valid"]))


ALIASES = "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoint and the snapshots of a run of four steps."""
    return write_kept_run(tmp_path_factory.mktemp("trained"), None, steps=4, every=2)


def places(tree, above=()):
    """Yield the place of every part of nested dictionaries and lists; of many that are alike the first two only."""
    inside = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    for key, value in inside[:2] if isinstance(tree, list) or _by_tensor(tree) else inside:
        yield (*above, key)
        yield from places(value, (*above, key))


def _by_tensor(tree):
    """Whether a dictionary has the names of tensors."""
    return isinstance(tree, dict) and any(name.endswith(".weight") for name in tree)


def changed(tree, place, value=None, drop=False):
    """Return a copy in which one part is another value, or missing."""
    new = owner = copy.copy(tree)
    for key in place[:-1]:
        owner[key] = copy.copy(owner[key])
        owner = owner[key]
    if drop:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    return new


def begin(path):
    load_weights(str(path)).adopt_from_checkpoint(CONFIG)


def continue_run(path):
    start = load_restart(str(path))
    config = start.adopt_from_checkpoint(CONFIG)
    check_resumable(start, config, allow_change=True)
    start.run_id(config)


def reported(use, path):
    """Return the message when a file is used; its name if it can be."""
    try:
        use(path)
    except UserError as error:
        return str(error)
    return path.name


def read_it(path, *uses):
    """Read a file as commands do; a message that names it is a good end."""
    for said in [reported(use, path) for use in uses]:
        assert path.name in said
        assert len(said) < 2000


@pytest.mark.parametrize("file", ["model.ckpt-4.pt", "snapshots/model_p05.ckpt-4.pt"])
def test_whatever_part_of_a_file_is_missing_or_of_another_type_it_is_read_or_reported(trained, tmp_path, file):
    payload, path, draw = checkpoint.load(trained / file), tmp_path / "m.pt", random.Random(1)
    for place in places(payload):
        if place[0] != "config" and len(place) > 1:  # a digest covers it
            continue
        if place[0] == "config" and draw.random() > (0.02 if len(place) > 3 else 0.5):
            continue
        junk = draw.choice(JUNK if place[0] == "config" else [*JUNK, torch.zeros(3), torch.zeros(2).int()])
        checkpoint.save(path, changed(payload, place, junk, drop=draw.random() < 0.4))
        read_it(path, load_model, describe, begin, continue_run)


@pytest.mark.parametrize("part", ["optimizer", "validation_pending", "model", "step"])
def test_a_checkpoint_that_lacks_a_part_is_reported_with_its_name(trained, tmp_path, part):
    payload = checkpoint.load(trained / "model.ckpt-4.pt")
    for drop, said in ((True, "missing"), (False, "(missing|str 'text', expected)")):
        checkpoint.save(tmp_path / "m.pt", changed(payload, (part,), "text", drop=drop))
        said = rf"m.pt: not a file of kind training as dp-ema writes it: {part}(\.\w+)? is {said}"
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(tmp_path / "m.pt")
    checkpoint.save(tmp_path / "m.pt", changed(payload, ("model", "descriptor.mean"), torch.zeros(2).int()))
    with pytest.raises(CheckpointError, match=r"as dp-ema writes it: model.descriptor.mean is .*expected a tensor"):
        checkpoint.load(tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a\x00b", "not the path of a checkpoint, which a run writes there .it is no text."),
        (b"x" * 10_000, "not the path of a checkpoint"),
        (b"", "names nothing, which is missing"),
    ],
    ids=["zero byte", "long", "empty"],
)
def test_a_pointer_that_is_no_path_is_reported_with_what_is_there(tmp_path, monkeypatch, content, reason):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"checkpoint: {reason}.*Available in .: model.ckpt-7.pt"):
        checkpoint.load(".")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    return read_tree(freeze(load_model(write_run(folder)[0], use_average=True), folder / "m.dp").path)


def test_whatever_part_of_a_frozen_model_is_missing_or_of_another_type_it_is_read_or_reported(tree, tmp_path):
    path, draw = tmp_path / "m.dp", random.Random(1)
    for place in places(tree):
        of_config = place[0] == "model_def_script" and len(place) > 3
        of_facts = place[0] == "dp_ema" and len(place) > 1  # a digest covers them
        if of_facts or draw.random() > (0.02 if of_config else 0.15):
            continue
        junk = draw.choice(JUNK) if "@variables" not in place else draw.choice([torch.zeros(3).numpy(), None])
        write_tree(path, changed(tree, place, junk, drop=draw.random() < 0.4))
        read_it(path, load_model, describe)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 50_000, "nested too deeply to be a model file"),
        ("\n".join(" " * k + "a:" for k in range(20_000)), "nested too deeply to be a model file"),
        (f"a: &a [1, 1, 1]\n{ALIASES}", "its anchors stand for more values than a model file of this length has"),
        ("a: &a [*a, *a]", "its anchors stand for more values"),
        ("model: !!python/object:os.system {}", "damaged, or not a YAML model file"),
    ],
    ids=["brackets", "indentation", "anchors", "itself", "code"],
)  # fmt: skip
def test_a_yaml_model_that_would_break_its_reader_is_reported(tmp_path, text, reason):
    """50,000 levels were a segmentation fault of the reader in C."""
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=f"m.yaml: {reason}"):
        load_model(path)


def test_an_array_that_says_to_be_larger_than_its_file_is_not_read(tree, tmp_path):
    import h5py

    path = tmp_path / "m.dp"
    write_tree(path, tree)
    with h5py.File(path, "r+") as file:
        del file["variable_0001"]
        file.create_dataset("variable_0001", shape=(1 << 33,), dtype="f8")
    with pytest.raises(CheckpointError, match=r"/variable_0001 says that it is larger than the file can hold"):
        load_model(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def directory_of(data):
    """Return the begin and the end of the directory of an archive."""
    end = data.rindex(b"PK\x05\x06")
    return int.from_bytes(data[end + 16 : end + 20], "little"), len(data)


def flipped(data, bit):
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_no_bit_of_the_directory_of_an_archive_makes_other_weights(run, tmp_path):
    original = run[1].read_bytes()
    path = tmp_path / "m.pt"
    path.write_bytes(original)
    expected = content_digest(checkpoint.load(path))
    begin, end = directory_of(original)
    for bit in random.Random(1).sample(range(8 * begin, 8 * end), 200):
        path.write_bytes(flipped(original, bit))
        try:
            found = checkpoint.load(path)
        except CheckpointError:
            continue
        assert content_digest(found) == expected, bit


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
        {**one, "b": [1, 2.0, "x", None, 1]},
        {**one, "b": [1, 2.0, ["x", None, True]]},
        {**one, "c": {"d": np.array(2.0, ">f8")}},
        {**one, "c": {"e": np.array(2.0)}},
    ]
    assert len({content_digest(tree) for tree in (one, *others)}) == 1 + len(others)


@pytest.fixture(params=[".dp", ".yaml"])
def frozen(request, run, tmp_path):
    return freeze(load_model(run[0], use_average=True), tmp_path / f"m{request.param}").path


def test_a_frozen_model_whose_facts_were_changed_is_refused(frozen):
    assert b"mean_age" in frozen.read_bytes()
    frozen.write_bytes(frozen.read_bytes().replace(b"mean_age", b"mean_agf", 1))
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


def test_a_yaml_that_was_cut_at_the_end_of_any_line_is_refused(run, tmp_path):
    path = freeze(load_model(run[0], use_average=True), tmp_path / "m.yaml").path
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0].startswith("digest: ")
    for kept in (1, 5, 19, *range(len(lines) - 8, len(lines))):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(CheckpointError, match="damaged"):
            read_tree(path)


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
    with pytest.raises(CheckpointError, match=r"holds unnamed weights \(frozen\), no average"):
        load_model(frozen, use_average=True)
