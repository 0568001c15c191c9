"""Descriptors of other distributions: found by entry points, used like those of dp-ema, refused by name if broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers import tiny_input
from packages import install

from deepmd_ema import cli

FAKE = {"type": "fake", "rcut": 4.0, "width": 6}
RECORD = "from deepmd_ema.config.registry import Family\nfrom fake_descriptor.section import FakeConfig\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on ``sys.path`` for distributions."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "site"


def check(capsys, descriptor, code):
    """Return the output of the check of an input with this descriptor; it ends with ``code``."""
    Path("input.json").write_text(json.dumps(tiny_input(["train"], model__descriptor=descriptor)))
    found = cli.main(["check", "--config-only", "input.json"])
    out, err = capsys.readouterr()
    assert found == code, err
    return out + err


# what is in the package, and what is reported of it
BROKEN = {
    "raises": ("raise OSError('no library')", "cannot be imported (OSError: no library). Repair or uninstall"),
    "no_record": ("FAMILY = 3", "broken:FAMILY is of type int, expected deepmd_ema.config.registry.Family."),
    "other_type": (f"{RECORD}FAMILY = Family(FakeConfig, '')", "has a section of type 'fake', expected 'broken'."),
    "alias": (
        f"{RECORD}class Section(FakeConfig):\n    type, aliases = 'broken', ('dpa1',)\nFAMILY = Family(Section, '')",
        "has the alias 'dpa1', which another type has.",
    ),
    "annotation": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from deepmd_ema.config.registry import Family\n"
        "@dataclass\nclass Section:\n    width: Number = 3\nFAMILY = Family(Section, '')",
        "has a section with an annotation that cannot be read (NameError: name 'Number' is not defined).",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_matters_only_where_its_descriptor_is_requested(site, capsys, monkeypatch, source, message):
    install(site, "broken-descriptor", {"broken": "broken:FAMILY"}, broken=source)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    said = check(capsys, {"type": "broken"}, 2)
    assert 'model.descriptor.type = "broken": the package broken-descriptor 1.0 adds this type, but ' in said
    assert message in said
    check(capsys, {"type": "se_e2_a"}, 0)
    assert cli.main(["doc", "model.descriptor"]) == 0
    out, err = capsys.readouterr()
    assert "model.descriptor[broken]" not in out
    assert 'descriptor "broken" is not listed: the package broken-descriptor 1.0 adds this type, but ' in err
    assert cli.main(["doc", "training.numb_steps"]) == 0
    assert "broken" not in capsys.readouterr().err


def test_two_packages_that_add_one_type_are_both_named(site, capsys):
    install(site, "one-descriptor", {"fake": "fake_descriptor:FAMILY"})
    install(site, "other-descriptor", {"fake": "fake_descriptor:FAMILY"}, version="0.3")
    said = check(capsys, FAKE, 2)
    assert "the packages one-descriptor 1.0 and other-descriptor 0.3 both add this type. Uninstall one of them." in said
