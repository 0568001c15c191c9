"""Published models: the list, and files that have their names."""

import hashlib
import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers import tiny_input, write_system
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.calculator import DP
from deepmd_ema.interop import pretrained
from deepmd_ema.interop.pretrained import PUBLISHED, PublishedModel, download
from deepmd_ema.training.weights import load_weights


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "DOWNLOADS", tmp_path / "downloads")
    return tmp_path


def test_every_model_has_addresses_and_a_digest(home, capsys):
    assert cli.main(["pretrained"]) == 0
    out = capsys.readouterr().out
    assert len(PUBLISHED) == 10
    for model in PUBLISHED:
        assert (
            f"{model.name} ({model.descriptor})\n  file    {model.file}\n  from    "
            f"{model.urls[0]}\n" in out
        )
        assert len(bytes.fromhex(model.sha256)) == 32
        assert {urlsplit(url).netloc for url in model.urls} == {
            "huggingface.co",
            "hf-mirror.com",
            "modelscope.cn",
        }
    assert sum(model.name.startswith("DPA4-") for model in PUBLISHED) == 5
    assert "here" not in out
    assert list(home.iterdir()) == []


def test_a_file_with_the_name_of_a_model_and_other_content_is_refused_before_a_run(
    home, capsys
):
    (home / "DPA-3.1-3M.pt").write_bytes(b"half a download")
    (home / "input.json").write_text(json.dumps(tiny_input([home / "data"])))
    digest = hashlib.sha256(b"half a download").hexdigest()
    for words in (
        ["pretrained"],
        ["train", "input.json", "--finetune", "DPA-3.1-3M.pt"],
    ):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert (
            "DPA-3.1-3M.pt: has the name of the published model DPA-3.1-3M and another sha256: "
            f"{digest}, exp" in err
        )
        assert "a file of your own needs another name" in err


# ---- downloads, from a server on this machine


class Answers(BaseHTTPRequestHandler):
    """Answers ``/right`` with the file of the server, and other paths in the ways in which
    downloads fail.
    """

    def do_GET(self):
        content, kind = self.server.content, self.path.strip("/")
        self.server.requested.append(kind)
        if kind == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if kind not in ("unsized", "endless", "slow"):
            self.send_header(
                "Content-Length", "abc" if kind == "misstated" else str(len(content))
            )
        self.end_headers()
        with suppress(ConnectionError):  # until the client has had enough
            while kind in ("endless", "slow"):
                self.wfile.write(content if kind == "endless" else b"x")
                time.sleep(0 if kind == "endless" else 0.05)
        sent = {"broken": content[:1000], "wrong": content[:-1] + b"x"}.get(
            kind, content
        )
        self.wfile.write(sent)
        self.close_connection = True

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def server(home, monkeypatch):
    """A server with the weights of a run, and a function that publishes a model at some of its
    paths.
    """
    content = write_run(home / "run")[0].read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.content, server.requested = content, []

        def publish(*paths):
            urls = tuple(
                f"http://127.0.0.1:{server.server_port}/{path}" for path in paths
            )
            model = PublishedModel(
                "Known-1M",
                "se_e2_a",
                "known.pt",
                urls,
                hashlib.sha256(content).hexdigest(),
            )
            monkeypatch.setattr(pretrained, "PUBLISHED", (model,))

        server.publish = publish
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "HTTP Error 404: Not Found"),
        ("broken", "a file with another sha256, 1,000 bytes"),
        ("wrong", "a file with another sha256"),
        ("endless", "more than 1,000,000 bytes"),
        ("slow", "slower than 10 kB/s"),
    ],
)
def test_a_download_that_fails_is_one_line_and_leaves_nothing(
    server, capsys, monkeypatch, kind, reason
):
    monkeypatch.setattr(pretrained, "MAX_BYTES", 1_000_000)
    monkeypatch.setattr(pretrained, "RATE_INTERVAL_S", 0.2)
    server.publish(kind)
    assert cli.main(["pretrained", "Known-1M"]) == 2
    err = capsys.readouterr().err
    assert (
        f"Known-1M: cannot be downloaded (127.0.0.1:{server.server_port}: {reason}"
        in err
    )
    assert "dp-ema: " in err.splitlines()[-1]
    assert list(pretrained.DOWNLOADS.iterdir()) == []


@pytest.mark.parametrize("last", ["right", "unsized", "misstated"])
def test_addresses_are_tried_in_turn_until_the_digest_is_right(server, last):
    server.publish("missing", "wrong", last, "never")
    assert download("Known-1M").read_bytes() == server.content
    assert server.requested == ["missing", "wrong", last]
    download("Known-1M")
    assert len(server.requested) == 3  # the file was there


@pytest.mark.parametrize(
    "words", [["download", "Known-1M", "--cache-dir"], ["Known-1M", "-o"]]
)
def test_a_model_is_downloaded_into_a_folder(server, capsys, words):
    server.publish("right")
    assert cli.main(["pretrained", *words, "here"]) == 0
    assert Path("here/known.pt").read_bytes() == server.content
    assert "here/known.pt: Known-1M, sha256 verified" in capsys.readouterr().out


def test_a_name_that_is_close_to_that_of_a_model_is_named(home, capsys):
    assert cli.main(["pretrained", "DPA-3.1-3"]) == 2
    assert (
        "DPA-3.1-3: no published model. Did you mean DPA-3.1-3M?"
        in capsys.readouterr().err
    )


def test_a_name_is_taken_for_its_file_by_all_that_read_a_model(server, home, capsys):
    """``dp-ema show DPA-3.1-3M`` and ``DP("DPA-3.1-3M")`` ended with "no such file"."""
    server.publish("right")
    assert cli.main(["show", "Known-1M"]) == 0
    assert "known.pt" in capsys.readouterr().out
    assert DP("Known-1M").implemented_properties
    assert load_weights("Known-1M").path.name == "known.pt"
    write_system(home / "data", frames=3)
    assert cli.main(["init", "data", "--finetune", "Known-1M", "--steps", "5"]) == 0
    assert server.requested == ["right"]


@pytest.mark.slow
def test_fine_tuning_downloads_a_model_by_its_name(server, home, capsys):
    server.publish("right")
    write_system(home / "data", frames=3)
    Path("input.json").write_text(json.dumps(tiny_input(["data"], num_steps=1)))
    words = ["--finetune", "Known-1M", "--use-pretrain-script"]
    assert cli.main(["train", "input.json", "--device", "cpu", *words]) == 0, (
        capsys.readouterr().err
    )
    assert server.requested == ["right"]
    assert (pretrained.DOWNLOADS / "known.pt").is_file()
