"""The backend `ema` of DeePMD-kit's command `dp`, beside the few parts of DeePMD-kit that it
touches.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from helpers import tiny_input
from infer_models import write_run

from deepmd_ema.cli import models, train
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.tree_files import write_tree

MODULE = "deepmd_ema.deepmd_backend"
BUILT_IN = ("pt", "pytorch", "pt-expt", "pytorch-exportable")


class Backend:
    """As `deepmd.backend.backend.Backend`: classes by their names."""

    plugins: ClassVar = {}

    @classmethod
    def register(cls, key):
        def decorator(kind):
            cls.plugins[key] = kind
            return kind

        return decorator


class Evaluator:
    """In the place of the evaluator of the backend pt."""

    def __init__(self, model_file, *args, **options):
        self.content, self.options = torch.load(model_file, weights_only=True), options


class PyTorchBackend(Backend):
    deep_eval = Evaluator


def parser():
    """A parser as that of `dp`, with options that dp-ema has and has not."""
    main = argparse.ArgumentParser()
    main.add_argument("--ema", action="store_const", dest="backend", const="ema")
    commands = main.add_subparsers(dest="command")
    log = argparse.ArgumentParser(add_help=False)
    log.add_argument("-v", "--log-level", default="INFO")
    log.add_argument("-l", "--log-path", default=None)
    of_train = commands.add_parser("train", parents=[log])
    of_train.add_argument(
        "-m", "--mpi-log", default="master", choices=("master", "collect", "workers")
    )
    of_train.add_argument("INPUT")
    for short, name in (
        ("-i", "--init-model"),
        ("-r", "--restart"),
        ("-f", "--init-frz-model"),
        ("-t", "--finetune"),
    ):
        of_train.add_argument(short, name, default=None)
    of_train.add_argument("-o", "--output", default="out.json")
    of_train.add_argument("--model-branch", default="")
    for name in ("--use-pretrain-script", "--skip-neighbor-stat", "--force-load"):
        of_train.add_argument(name, action="store_true")
    freeze = commands.add_parser("freeze", parents=[log])
    freeze.add_argument("-c", "--checkpoint-folder", "--checkpoint", default=".")
    freeze.add_argument("-o", "--output", default="frozen_model")
    freeze.add_argument("-n", "--node-names", default=None)
    freeze.add_argument("--head", "--model-branch", default=None)
    bias = commands.add_parser("change-bias", parents=[log])
    bias.add_argument("INPUT")
    bias.add_argument("-b", "--bias-value", default=None, type=float, nargs="+")
    bias.add_argument("-o", "--output", default=None)
    commands.add_parser("transfer", parents=[log])
    return main


@pytest.fixture
def load(monkeypatch):
    """Return a function that loads the module beside a DeePMD-kit, as `dp` does; it returns the
    backends by name.
    """
    parts = {
        "deepmd": {},
        "deepmd.backend": {},
        "deepmd.backend.backend": {"Backend": Backend},
        "deepmd.backend.pytorch": {"PyTorchBackend": PyTorchBackend},
        "deepmd.backend.pt_expt": {
            "PyTorchExportableBackend": type("Exportable", (PyTorchBackend,), {})
        },
        "deepmd.main": {"main_parser": parser},
        "deepmd.dpmodel": {},
        "deepmd.dpmodel.utils": {},
        "deepmd.dpmodel.utils.serialization": {
            "save_dp_model": lambda name, tree: write_tree(Path(name), tree)
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(Backend, "plugins", dict.fromkeys(BUILT_IN, PyTorchBackend))

    def load():
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        monkeypatch.setitem(sys.modules, MODULE, importlib.import_module(MODULE))
        return Backend.plugins

    return load


def dp(backends, *words):
    """Run a line of `dp` and return the exit code of dp-ema."""
    args = parser().parse_args(list(map(str, words)))
    args.log_level = {"DEBUG": 10, "INFO": 20, "3": 10}[args.log_level]
    with pytest.raises(SystemExit) as ended:
        backends["ema"]().entry_point_hook(args)
    return ended.value.code


@pytest.fixture
def received(monkeypatch):
    """Return the list of what commands of dp-ema get, in place of running them."""
    got = []
    for module, name in ((train, "train"), (models, "freeze"), (models, "change_bias")):
        monkeypatch.setattr(module, name, got.append)
    return got


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "train input.json",
            {
                "input": "input.json",
                "restart": None,
                "output": "out.json",
                "log_level": "INFO",
            },
        ),
        (
            "train input.json -r model.ckpt -v 3 -l train.log",
            {"restart": "model.ckpt", "log_level": "DEBUG", "log_path": "train.log"},
        ),
        (
            "train in.yaml --init-model a.pt --skip-neighbor-stat -o o.json",
            {"init_model": "a.pt", "skip_neighbor_stat": True, "output": "o.json"},
        ),
        (
            "train input.json -t a.pt --use-pretrain-script --model-branch H2O",
            {"finetune": "a.pt", "use_pretrain_script": True, "model_branch": "H2O"},
        ),
        ("train input.json -f frozen.pth", {"init_model": "frozen.pth"}),
        (
            "train input.json --finet a.pt",
            {"finetune": "a.pt"},
        ),  # `dp` takes a part of a name
        ("freeze", {"checkpoint": ".", "output": "frozen_model", "backend": "pytorch"}),
        (
            "freeze -c a.pt -o b.pth --head H2O",
            {"checkpoint": "a.pt", "output": "b.pth", "head": "H2O"},
        ),
        (
            "change-bias a.pt -b -92.5 -0.5 -o b.pt",
            {"input": "a.pt", "bias_value": [-92.5, -0.5], "output": "b.pt"},
        ),
    ],
)
def test_what_dp_has_parsed_reaches_the_command(
    words, expected, load, received, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert dp(load(), *words.split()) == 0
    (args,) = received
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            "train input.json --force-load",
            "train --force-load: weights are loaded whole",
        ),
        ("train input.json -m workers", "train --mpi-log: rank 0 speaks"),
        (
            "freeze -n o_energy",
            "freeze --node-names: node names and NVNMD are of TensorFlow",
        ),
        (
            "transfer",
            "transfer is a command of DeePMD-kit: it is of the backend TensorFlow",
        ),
    ],
)
def test_what_only_dp_has_is_refused_by_name(words, named, load, received, capsys):
    assert dp(load(), *words.split()) == 2
    assert named in capsys.readouterr().err
    assert not received


def test_dp_trains_and_freezes(load, water_like, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("input.json").write_text(
        json.dumps(tiny_input([str(water_like)], num_steps=2))
    )
    backends = load()
    assert dp(backends, "train", "input.json") == 0
    assert dp(backends, "freeze", "-o", "model.dp") == 0
    assert (
        load_model("model.dp").info.step == load_model("model.ckpt.pt").info.step == 2
    )
    assert dp(backends, "train", "missing.json") == 2


def test_a_file_belongs_to_the_backend_by_its_content(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    backend = load()["ema"]
    torch.save({"model": {"_extra_state": {}}}, "theirs.pt")
    Path("text.pt").write_text("no archive")
    Path("frozen.pth").write_text("")
    strongest = 2  # claim of DeePMD-kit's own backends
    assert backend.match_filename("model.ckpt.pt") > strongest
    assert (
        backend.match_filename(Path("new.pt")) > strongest
    )  # `dp convert-backend model.dp new.pt`
    assert [
        backend.match_filename(name)
        for name in ("theirs.pt", "text.pt", "frozen.pth", "new.dp")
    ] == [0] * 4


def test_its_files_are_those_of_other_backends_by_a_tree(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, model__descriptor__interpolate="never")
    backend = load()["ema"]
    tree = backend.serialize_hook("model.ckpt.pt")
    assert (
        "interpolate" not in tree["model_def_script"]["descriptor"]
    )  # from which DeePMD-kit builds a model
    backend.deserialize_hook("again.pt", tree)
    weights, again = (
        load_model(name).model.state_dict() for name in ("model.ckpt.pt", "again.pt")
    )
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    evaluator = backend().deep_eval("model.ckpt.pt", head="H2O")
    assert evaluator.options == {"head": "H2O"}
    monkeypatch.setattr(
        "deepmd_ema.commands.freeze._only_here",
        lambda *_: "DeePMD-kit has no such model",
    )
    with pytest.raises(
        CheckpointError, match=r"^model.ckpt.pt: DeePMD-kit has no such model"
    ):
        backend().deep_eval("model.ckpt.pt")
    assert "_extra_state" in evaluator.content.get("model", evaluator.content)


@pytest.mark.parametrize(
    ("value", "taken"), [(None, False), ("pt", False), ("ema", True), ("EMA", True)]
)
def test_the_variable_alone_also_takes_the_place_of_torch_backends(
    value, taken, load, received, monkeypatch
):
    monkeypatch.delenv("DP_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("DP_BACKEND", value)
    backends = load()
    assert [backends[name] is not PyTorchBackend for name in BUILT_IN] == [taken] * 4
    for name, suffix in (
        (("pt", "pytorch"), ("pytorch-exportable", "pytorch-exportable"))
        if taken
        else ()
    ):
        assert dp({"ema": backends[name]}, "freeze") == 0
        assert received[-1].backend == suffix
        assert (
            backends[name].deep_eval is Evaluator
        )  # `dp --pt test` reads what it read
