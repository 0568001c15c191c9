"""Files that lack parts, hold other types or whose bytes were changed on the disk: one message
each, no other end.
"""

import copy
import functools
import operator
import random

import numpy as np
import pytest
import torch
from infer_models import write_run

from deepmd_ema import checkpoint
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.commands.show import describe
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.tree_files import read_tree, write_tree

pytestmark = pytest.mark.timeout(300)


JUNK = (None, "text", -1, 1e300, [], {}, [1, "a"], {"a": 1}, True, 2**70)


ALIASES = "".join(
    f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi")
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tree(run, tmp_path_factory):
    return read_tree(
        freeze(
            load_model(run[0], use_average=True),
            tmp_path_factory.mktemp("frozen") / "m.dp",
        ).path
    )


def places(tree, above=()):
    """Yield the place of every part of nested dictionaries and lists; of many that are alike the
    first two only.
    """
    inside = list(
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inside[:2] if isinstance(tree, list) else inside:
        yield (*above, key)
        yield from places(value, (*above, key))


@pytest.mark.parametrize("part", ["optimizer", "validation_pending", "model", "step"])
def test_a_checkpoint_that_lacks_a_part_is_reported_with_its_name(run, tmp_path, part):
    payload, path = checkpoint.load(run[0]), tmp_path / "m.pt"
    without = {name: value for name, value in payload.items() if name != part}
    no_number = {
        **payload,
        "model": {**payload["model"], "descriptor.mean": torch.zeros(2).int()},
    }
    for content, said in (
        (without, rf"{part}(\.\w+)? is missing"),
        (
            {**without, part: "text"},
            rf"{part}(\.\w+)? is (missing|str 'text', expected)",
        ),
        (no_number, "model.descriptor.mean is .*expected a tensor"),
    ):
        checkpoint.save(path, content)
        with pytest.raises(
            CheckpointError,
            match=rf"m.pt: not a file of kind training as dp-ema writes it: {said}",
        ):
            checkpoint.load(path)


def reported(use, path):
    """Return the message when a file is used; its name if it can be."""
    try:
        use(path)
    except UserError as error:
        return str(error)
    return path.name


def test_whatever_part_of_a_frozen_model_is_missing_or_of_another_type_it_is_read_or_reported(
    tree, tmp_path
):
    path, draw = tmp_path / "m.dp", random.Random(1)
    for place in places(tree):
        of_config = place[0] == "model_def_script" and len(place) > 3
        of_facts = place[0] == "dp_ema" and len(place) > 1  # a digest covers them
        if of_facts or draw.random() > (0.02 if of_config else 0.15):
            continue
        *above, last = place
        spoiled = copy.deepcopy(tree)
        owner = functools.reduce(operator.getitem, above, spoiled)
        owner[last] = (
            draw.choice(JUNK)
            if "@variables" not in place
            else draw.choice([torch.zeros(3).numpy(), None])
        )
        if draw.random() < 0.4:
            del owner[last]
        write_tree(path, spoiled)
        for use in (load_model, describe):
            said = reported(use, path)
            assert path.name in said
            assert len(said) < 2000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 50_000, "nested too deeply to be a model file"),
        (
            f"a: &a [1, 1, 1]\n{ALIASES}",
            "its anchors stand for more values than a model file of this length has",
        ),
        ("a: &a [*a, *a]", "its anchors stand for more values"),
        ("model: !!python/object:os.system {}", "damaged, or not a YAML model file"),
    ],
    ids=["brackets", "anchors", "itself", "code"],
)
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
    with pytest.raises(
        CheckpointError,
        match=r"/variable_0001 says that it is larger than the file can hold",
    ):
        load_model(path)


def test_no_bit_of_the_directory_of_an_archive_makes_other_weights(run, tmp_path):
    original, path = run[1].read_bytes(), tmp_path / "m.pt"
    expected = content_digest(checkpoint.load(run[1]))
    end = original.rindex(b"PK\x05\x06")
    begin = int.from_bytes(original[end + 16 : end + 20], "little")
    for bit in random.Random(1).sample(range(8 * begin, 8 * len(original)), 200):
        spoiled = bytearray(original)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        try:
            found = checkpoint.load(path)
        except CheckpointError:
            continue
        assert content_digest(found) == expected, bit


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: payload["model"]["out_bias"].mul_(1 + 1e-15),
        lambda payload: payload["config"]["model"]["type_map"].reverse(),
        lambda payload: payload.update(step=payload["step"] + 1),
    ],
    ids=["model", "config", "step"],
)
def test_content_that_was_changed_under_right_checksums_is_refused(
    run, tmp_path, change
):
    payload = torch.load(run[0], weights_only=True)
    change(payload)
    torch.save(payload, tmp_path / "m.pt")
    with pytest.raises(
        CheckpointError, match="damaged, its content is not what was written"
    ):
        checkpoint.load(tmp_path / "m.pt")


def test_a_digest_reports_content_apart_and_nothing_else():
    one = {
        "a": torch.arange(3.0),
        "b": [1, 2.0, "x", None, True],
        "c": {"d": np.float64(2)},
    }
    same = {
        "a": torch.arange(6.0).view(3, 2)[:, 0] / 2,
        "b": (1, 2.0, "x", None, True),
        "c": {"d": np.array(2.0)},
    }
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
    return freeze(
        load_model(run[0], use_average=True), tmp_path / f"m{request.param}"
    ).path


def test_a_frozen_model_whose_facts_or_numbers_were_changed_is_refused(run, frozen):
    import h5py

    assert b"mean_age" in frozen.read_bytes()
    frozen.write_bytes(frozen.read_bytes().replace(b"mean_age", b"mean_agf", 1))
    with pytest.raises(
        CheckpointError,
        match=r"damaged, its content is not what was written.*Freeze the model again",
    ):
        load_model(frozen)
    path = freeze(load_model(run[0]), frozen.with_name("numbers.dp")).path
    with h5py.File(path, "r+") as file:
        name = next(name for name in file if file[name].size > 4)
        file[name][...] = file[name][()] * (1 + 2**-52)
    with pytest.raises(
        CheckpointError, match="damaged, its content is not what was written"
    ):
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
    """A `.dp` of an average that had been converted and back was shown as live weights of an
    unknown step.
    """
    tree = read_tree(frozen)
    del tree["dp_ema"]
    tree["software"] = "deepmd-kit"
    write_tree(frozen, tree)
    info = load_model(frozen).info
    assert (
        info.describe()
        == "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps on "
        "average"
    )
    assert list(info.config) == ["model"]
    del tree["model_def_script"]["dp_ema"]
    write_tree(frozen, tree)
    words = "weights of an unknown step; the file does not say whether they are live or averaged"
    assert load_model(frozen).info.describe() == words
    with pytest.raises(
        CheckpointError, match=r"holds unnamed weights \(frozen\), no average"
    ):
        load_model(frozen, use_average=True)
