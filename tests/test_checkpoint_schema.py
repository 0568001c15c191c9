"""Files that lack parts or hold other types: one message each, from every command that reads them, and no other end."""

import copy
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from bad_inputs import sit_down, write_systems
from helpers import tiny_input
from infer_models import write_run

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.content import KINDS
from deepmd_ema.cli import main
from deepmd_ema.config import config_from_dict
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.show import KINDS as SHOWN
from deepmd_ema.infer.show import describe
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.interop.tree_files import read_tree, write_tree
from deepmd_ema.training.restart import check_resumable
from deepmd_ema.training.weights import load_restart, load_weights

pytestmark = pytest.mark.timeout(300)

JUNK = (None, "text", -1, 1e300, [], {}, [1, "a"], {"a": 1}, True, 2**70)
CONFIG = config_from_dict(tiny_input(["data"], ["valid"]))
ALIASES = "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi"))
BANK = [{"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 2}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the files of a run of four steps, and its data."""
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        (home / "desk").mkdir()
        desk = sit_down(home / "desk", write_systems(home), patch, None)
        options = {
            "validating__full_validation": True,
            "validating__validation_freq": 2,
            "validating__full_val_start": 0,
        }
        desk.write(num_steps=4, training__save_freq=2, training__averaging=BANK, **options)
        assert main(["train", "input.json", "--device", "cpu"]) == 0
    return home / "desk"


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


COMMANDED = (load_model, describe, begin, continue_run)


def reported(use, path):
    """Return the message when a file is used; nothing if it can be."""
    try:
        use(path)
    except UserError as error:
        return str(error)
    return ""


def read_it(path, *uses):
    """Read a file as commands do; a message that names it is a good end."""
    for said in [reported(use, path) for use in uses]:
        assert not said or path.name in said, said
        assert len(said) < 2000, said


@pytest.mark.parametrize("file", ["model.ckpt-4.pt", "model_p05.ckpt-4.pt", "snapshots/model_p05.ckpt-4.pt"])
def test_whatever_part_of_a_file_is_missing_or_of_another_type_it_is_read_or_reported(trained, tmp_path, file):
    payload, path, draw = checkpoint.load(trained / file), tmp_path / "m.pt", random.Random(0)
    for place in places(payload):
        of_model = place[0] == "config" and len(place) > 3  # what an input may hold has tests of its own
        of_state = place[0] != "config" and len(place) > 1  # a digest covers it
        if of_state or (of_model and draw.random() > 0.03):
            continue
        junk = draw.choice(JUNK if place[0] == "config" else [*JUNK, torch.zeros(3), torch.zeros(2).int()])
        checkpoint.save(path, changed(payload, place, junk, drop=draw.random() < 0.4))
        read_it(path, *COMMANDED)


@pytest.mark.parametrize("part", ["optimizer", "streams", "display", "validation_pending", "model", "config", "step"])
@pytest.mark.parametrize("junk", ["missing", "text"])
def test_a_checkpoint_that_lacks_a_part_is_reported_with_its_name(trained, tmp_path, part, junk):
    payload = checkpoint.load(trained / "model.ckpt-4.pt")
    checkpoint.save(tmp_path / "m.pt", changed(payload, (part,), "text", drop=junk == "missing"))
    said = rf"{part}(\.\w+)? is " + ("missing" if junk == "missing" else "(missing|str 'text', expected)")
    with pytest.raises(CheckpointError, match=rf"m.pt: not a file of kind training as dp-ema writes it: {said}"):
        checkpoint.load(tmp_path / "m.pt")


COMMANDS = {
    "show": ["show", "m.pt"],
    "freeze": ["freeze", "-c", "m.pt", "-o", "m.dp"],
    "test": ["test", "-m", "m.pt", "-s", "data"],
    "change-bias": ["change-bias", "m.pt", "-b", "-1", "-2", "-o", "new.pt"],
    "restart": ["train", "--restart", "m.pt", "input.json", "--device", "cpu"],
    "init-model": ["train", "--init-model", "m.pt", "input.json", "--device", "cpu"],
    "posthoc": ["posthoc", ".", "-s", "valid"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_of_a_part_that_is_missing(trained, tmp_path, monkeypatch, capsys, command):
    shutil.copytree(trained, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    payload = checkpoint.load("model.ckpt-4.pt")
    name = "model.ckpt-4.pt" if command == "posthoc" else "m.pt"
    checkpoint.save(name, changed(payload, ("streams",), drop=True))
    assert main(COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert f"{name}: not a file of kind training as dp-ema writes it: streams is missing. Another program" in said
    assert "Traceback" not in said


def test_snapshots_that_lack_a_part_are_reported_by_posthoc(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    path = Path("snapshots/model_p05.ckpt-4.pt")
    checkpoint.save(path, changed(checkpoint.load(path), ("averaged",), "all"))
    assert main(["posthoc", ".", "-s", "valid"]) == 2
    said = capsys.readouterr().err
    assert f"{path}: not a file of kind snapshot as dp-ema writes it: averaged is str 'all', expected list" in said


@pytest.mark.parametrize("junk", ["text", torch.zeros(2).int()])
def test_weights_that_are_no_numbers_are_reported_with_the_name_of_the_tensor(trained, tmp_path, junk):
    payload = checkpoint.load(trained / "model.ckpt-4.pt")
    checkpoint.save(tmp_path / "m.pt", changed(payload, ("model", "descriptor.mean"), junk))
    with pytest.raises(CheckpointError, match=r"as dp-ema writes it: model.descriptor.mean is .*expected a tensor"):
        checkpoint.load(tmp_path / "m.pt")


def test_show_has_words_for_every_kind():
    assert SHOWN.keys() == {*KINDS, "frozen", "deepmd"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00junk", "not the path of a checkpoint"),
        (b"a\x00b", "not the path of a checkpoint, which a run writes there .it is no text."),
        (b"x" * 10_000, "not the path of a checkpoint"),
        (b"", "names nothing, which is missing"),
        (b"model.ckpt-9.pt", "names model.ckpt-9.pt, which is missing"),
    ],
    ids=["bytes", "zero byte", "long", "empty", "gone"],
)
def test_a_pointer_that_is_no_path_is_reported_with_what_is_there(tmp_path, monkeypatch, content, reason):
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").write_bytes(content)
    for way in (".", "checkpoint"):
        with pytest.raises(CheckpointError, match=rf"checkpoint: {reason}.*Available in .: model.ckpt-7.pt"):
            checkpoint.load(way)


# ---- frozen models


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    return read_tree(freeze(load_model(write_run(folder)[0], use_average=True), folder / "m.dp").path)


def test_whatever_part_of_a_frozen_model_is_missing_or_of_another_type_it_is_read_or_reported(tree, tmp_path):
    path, draw = tmp_path / "m.dp", random.Random(0)
    for place in places(tree):
        of_config = place[0] == "model_def_script" and len(place) > 3
        of_facts = place[0] == "dp_ema" and len(place) > 1  # a digest covers them
        if of_facts or draw.random() > (0.05 if of_config else 0.3):
            continue
        junk = draw.choice(JUNK) if "@variables" not in place else draw.choice([torch.zeros(3).numpy(), None])
        write_tree(path, changed(tree, place, junk, drop=draw.random() < 0.4))
        read_it(path, load_model, describe)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 50_000, "nested too deeply to be a model file"),
        ("- " * 50_000 + "1", "nested too deeply to be a model file"),
        ("? " * 50_000 + "1", "nested too deeply to be a model file"),
        ("\n".join(" " * k + "a:" for k in range(20_000)), "nested too deeply to be a model file"),
        (f"a: &a [1, 1, 1]\n{ALIASES}", "its anchors stand for more values than a model file of this length has"),
        ("a: &a [*a, *a]", "its anchors stand for more values"),
        ("model: !!python/object:os.system {}", "damaged, or not a YAML model file"),
        ("model: 5", "no model inside"),
    ],
    ids=["brackets", "dashes", "question marks", "indentation", "anchors", "itself", "code", "number"],
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


# ---- advice that leads on


def test_a_run_starts_from_the_weights_of_a_frozen_model(trained, tmp_path, monkeypatch, capsys):
    """`--init-model` of a checkpoint of DeePMD-kit advised a .dp file, which it then refused."""
    shutil.copytree(trained, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    for suffix in (".dp", ".yaml"):
        assert main(["freeze", "--average", "ema", "-o", f"m{suffix}"]) == 0
        begin = load_weights(f"m{suffix}").sources[""].loaded.model.state_dict()
        averaged = load_model("model_ema.ckpt-4.pt").model.state_dict()
        assert all(torch.equal(tensor, averaged[name]) for name, tensor in begin.items())
        assert main(["train", "--init-model", f"m{suffix}", "input.json", "--device", "cpu"]) == 0
        assert f"weights of m{suffix} (ema, step 4)" in capsys.readouterr().err
        new = checkpoint.load("model.ckpt-4.pt")
        assert torch.equal(new["model"]["descriptor.mean"], averaged["descriptor.mean"])
        assert main(["train", "--restart", f"m{suffix}", "input.json", "--device", "cpu"]) == 2
        said = capsys.readouterr().err
        assert "a frozen model holds weights only, not the state of a run" in said
        assert f"--init-model m{suffix}" in said


def test_a_frozen_model_of_another_size_is_no_start(trained, tmp_path, monkeypatch, capsys):
    shutil.copytree(trained, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    assert main(["freeze", "-o", "m.dp"]) == 0
    values = json.loads(Path("input.json").read_text())
    values["model"]["fitting_net"]["neuron"] = [9, 9]
    Path("input.json").write_text(json.dumps(values))
    assert main(["train", "--init-model", "m.dp", "input.json", "--device", "cpu"]) == 2
    assert "m.dp: its weights do not fit the model of this input" in capsys.readouterr().err
