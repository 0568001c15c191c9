"""Another distribution adds a descriptor without `sel` and `neuron`: it goes the whole way; broken
ones are named.
"""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_laws
import torch
from fake_descriptor.section import FakeConfig
from helpers import assert_same, tiny_input
from packages import install
from toy_models import SECTIONS

import deepmd_ema
from deepmd_ema import cli
from deepmd_ema.config import (
    config_from_dict,
    model_config_from_dict,
    run_arguments,
    to_dict,
)
from deepmd_ema.config.manual import json_schema, manual
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.errors import ConfigError

pytestmark = pytest.mark.timeout(600)  # whole runs; a busy machine takes minutes

FAKE = {"type": "fake", "rcut": 4.0, "width": 6}
RUN = {
    "model__descriptor": FAKE,
    "training__enable_ema": True,
    "training__ema_decay": 0.5,
    "training__save_freq": 1,
    "training__disp_freq": 1,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 1,
    "validating__full_val_start": 0,
}


@pytest.fixture(autouse=True)
def fake(tmp_path_factory, monkeypatch):
    """The distribution of the descriptor is installed for one test, and has a small section for the
    laws.
    """
    site = tmp_path_factory.mktemp("site")
    install(site, "fake-descriptor", {"fake": "fake_descriptor:FAMILY"})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setitem(
        SECTIONS, "fake", {"type": "fake", **DESCRIPTORS["fake"].example}
    )
    return site


@pytest.fixture
def folder(tmp_path, monkeypatch, water_like, water_like_valid):
    """A folder with an input of three steps."""
    config = tiny_input([water_like], [water_like_valid], num_steps=3, **RUN)
    (tmp_path / "input.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *words, code=0):
    """Run a command and return what it printed and logged."""
    found = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert found == code, err
    return out + err


def test_the_whole_way_from_check_to_test(folder, capsys, water_like_valid):
    assert re.search(
        r"fake, rcut 4 angstrom, most \d+, width 6", run(capsys, "check", "input.json")
    )
    run(capsys, "train", "input.json", "--device", "cpu")
    saved = torch.load("model.ckpt-3.pt", weights_only=True)
    assert saved["config"]["model"]["descriptor"]["most"] > 10  # counted in the data
    assert saved["model"]["descriptor.share"] < 0.2  # measured in the data
    for log in ("val.log", "val_ema.log"):
        assert [
            line.split()[0]
            for line in Path(log).read_text().splitlines()
            if line[0] != "#"
        ] == ["1", "2", "3"]
    assert "fake, rcut 4 angstrom" in run(capsys, "show", "model.ckpt-3.pt")
    assert "Force" in run(
        capsys, "test", "-m", "model.ckpt-3.pt", "-s", water_like_valid, "--use-ema"
    )
    run(capsys, "freeze", "-c", "model.ckpt-3.pt", "-o", "model.dp")
    assert "fake, rcut 4 angstrom" in run(capsys, "show", "model.dp")
    whole = {
        name: torch.load(name, weights_only=True)
        for name in ("model.ckpt-3.pt", "model_ema.ckpt-3.pt")
    }
    run(
        capsys, "train", "input.json", "--restart", "model.ckpt-1.pt", "--device", "cpu"
    )
    for name, payload in whole.items():
        assert_same(torch.load(name, weights_only=True), payload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widht": 4}, r"model\.descriptor\.widht: unknown key\. Did you mean width\?"),
        (
            {"width": 1},
            r"model\.descriptor\.width = 1: expected at least 2, one for each element",
        ),
        (
            {"type": "fakee"},
            r'model\.descriptor\.type = "fakee": unknown\. Did you mean fake\? Known: se_e2_a, '
            r".*fake",
        ),
    ],
)
def test_mistakes_in_its_section_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(tiny_input(["train"], model__descriptor={**FAKE, **changes}))


def test_the_manual_the_schema_and_dargs_know_its_options():

    assert "model.descriptor[fake].width" in manual("model.descriptor")
    model = json_schema()["anyOf"][0]["properties"]["model"]["allOf"][0]["then"]
    assert {"fake", "make_believe"} <= set(
        model["properties"]["descriptor"]["properties"]["type"]["enum"]
    )
    values = tiny_input(
        ["train"], model__descriptor={"type": "make_believe", "width": 3}
    )
    whole = run_arguments()
    normal = whole.normalize_value(values)
    assert normal["model"]["descriptor"]["rcut"] == 4.0
    whole.check_value(normal, strict=True)
    model = config_from_dict(values).model
    assert isinstance(model.descriptor, FakeConfig)
    assert model_config_from_dict(to_dict(model)) == model


# ---- the laws of every descriptor


def laws():
    """Yield every law with the cases that are not about options of one descriptor."""
    for name, law in vars(test_laws).items():
        names = inspect.signature(law).parameters if name.startswith("test_") else ()
        if "descriptor" not in names or {"number", "quantity"} & {
            *names
        }:  # of the options of one, or of its vectors
            continue
        marks = [
            m.args
            for m in law.pytestmark
            if m.name == "parametrize" and m.args[0] != "descriptor"
        ]
        # one beside the descriptor, such as its options
        marks = [
            m
            if isinstance(m[0], str)
            else (m[0][1], dict.fromkeys(value for _, value in m[1]))
            for m in marks
        ]
        choices = [
            [(key, value) for value in values if value != {} or key == "changes"]
            for key, values in marks
        ]
        for case in itertools.product(*choices):
            arguments_of = dict(case)
            own_options = (
                arguments_of.get("changes")
                or test_laws.OPTIONS[arguments_of.get("option", "tanh")]
            )
            if not own_options:
                yield pytest.param(
                    law,
                    arguments_of,
                    id="-".join([name, *(str(v) for v in arguments_of.values())]),
                )


@pytest.mark.parametrize(("law", "case"), list(laws()))
def test_messages_of_neighbors_obey_the_laws_of_every_descriptor(law, case):
    law(descriptor="fake", **case)


# ---- packages


def test_a_model_loads_its_own_families_only():
    """Nothing imports another descriptor, sums of models, the Kalman filter or compiled files
    beside what is used.
    """
    code = """
import sys
from toy_models import toy_model
import deepmd_ema.commands.freeze, deepmd_ema.training.run
toy_model("se_e2_r")
print(*(name for name in sys.modules if name.startswith("deepmd_ema.")))
"""
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), str(Path(deepmd_ema.__file__).parents[1])]
    )
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    modules = [
        name
        for name in found.split()
        if re.search(r"families\.\w+\.(module|layers|tree)", name)
    ]
    # se_e2_r is se_e2_a without directions
    assert modules == [
        f"deepmd_ema.model.families.{name}.module"
        for name in ("se_e2_a", "se_e2_r", "ener")
    ]
    assert not {
        "deepmd_ema.interop.pt2",
        "deepmd_ema.model.extended_model",
        "deepmd_ema.infer.images",
        "deepmd_ema.optim.lkf",
        "deepmd_ema.training.kalman",
    } & {*found.split()}


# ---- packages that are broken

RECORD = (
    "from deepmd_ema.config.registry import Family\nfrom fake_descriptor.section import "
    "FakeConfig\n"
)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path`` for further distributions."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "site"


def check(capsys, descriptor, code):
    """Return the output of the check of an input with this descriptor; it ends with ``code``."""
    Path("input.json").write_text(
        json.dumps(tiny_input(["train"], model__descriptor=descriptor))
    )
    return run(capsys, "check", "--config-only", "input.json", code=code)


# what is in the package, and what is reported of it
BROKEN = {
    "raises": (
        "raise OSError('no library')",
        "cannot be imported (OSError: no library). Repair or uninstall",
    ),
    "no_record": (
        "FAMILY = 3",
        "broken:FAMILY is of type int, expected deepmd_ema.config.registry.Family.",
    ),
    "other_type": (
        f"{RECORD}FAMILY = Family(FakeConfig, '')",
        "has a section of type 'fake', expected 'broken'.",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_matters_only_where_its_descriptor_is_requested(
    site, capsys, monkeypatch, source, message
):
    install(site, "broken-descriptor", {"broken": "broken:FAMILY"}, broken=source)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    said = check(capsys, {"type": "broken"}, 2)
    assert (
        'model.descriptor.type = "broken": the package broken-descriptor 1.0 adds this type, but '
        in said
    )
    assert message in said
    check(capsys, {"type": "se_e2_a"}, 0)
    assert cli.main(["doc", "model.descriptor"]) == 0
    out, err = capsys.readouterr()
    assert "model.descriptor[broken]" not in out
    assert (
        'descriptor "broken" is not listed: the package broken-descriptor 1.0 adds this type, but '
        in err
    )
    assert cli.main(["doc", "training.numb_steps"]) == 0
    assert "broken" not in capsys.readouterr().err
