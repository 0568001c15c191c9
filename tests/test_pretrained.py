"""Published models: the list, and files that have their names."""

import hashlib
import json
import shutil

import pytest
from helpers import tiny_input
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interchange import pretrained
from deepmd_ema.interchange.pretrained import PUBLISHED, PublishedModel, check_digest


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "DOWNLOADS", tmp_path / "downloads")
    return tmp_path


def test_every_model_has_an_address_and_a_digest(home, capsys):
    assert cli.main(["pretrained"]) == 0
    out = capsys.readouterr().out
    for model in PUBLISHED:
        assert f"{model.name} ({model.descriptor})\n  file    {model.file}\n  from    {model.url}\n" in out
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.url.startswith("https://huggingface.co/deepmodelingcommunity/")
    assert "here" not in out
    assert list(home.iterdir()) == []


def test_a_file_with_the_name_of_a_model_and_other_content_is_refused_before_a_run(home, capsys):
    (home / "DPA-3.1-3M.pt").write_bytes(b"half a download")
    (home / "input.json").write_text(json.dumps(tiny_input([home / "data"])))
    digest = hashlib.sha256(b"half a download").hexdigest()
    for words in (["pretrained"], ["train", "input.json", "--finetune", "DPA-3.1-3M.pt"]):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert f"DPA-3.1-3M.pt: has the name of the published model DPA-3.1-3M and another sha256: {digest}, exp" in err
        assert "a file of your own needs another name" in err


def test_a_file_of_the_right_content_is_said_to_be_the_model(home, monkeypatch, capsys):
    shutil.copy(write_run(home / "run")[0], home / "known.pt")
    content = (home / "known.pt").read_bytes()
    model = PublishedModel("known", "dpa3", "known.pt", "https://x.org/known.pt", hashlib.sha256(content).hexdigest())
    assert check_digest(home / "known.pt", [model]) == "known"
    assert check_digest(home / "unknown.pt", [model]) == ""
    (home / "known.pt").write_bytes(content + b"0")
    with pytest.raises(CheckpointError, match=r"Download it again from https://x\.org/known\.pt"):
        check_digest(home / "known.pt", [model])
