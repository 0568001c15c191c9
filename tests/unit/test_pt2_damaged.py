"""Compiled files that are damaged or made to do harm, and what is reported of trust in them."""

import json
import zipfile

import pytest
from toy_models import toy_model, write_dp

from deepmd_ema import cli
from deepmd_ema.errors import CheckpointError
from deepmd_ema.interop.dp import read_dp
from deepmd_ema.interop.pt2 import load_compiled
from deepmd_ema.interop.tree_files import PACKAGED_TREE, packaged_text, read_tree

FACTS = "model/extra/metadata.json"


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """The names and the content of the members of a package, but for its code."""
    config, model = toy_model("se_e2_a")
    path = tmp_path_factory.mktemp("model") / "a.dp"
    write_dp(path, model, config)
    return {
        FACTS: json.dumps({"dp_ema_device": "cpu"}),
        PACKAGED_TREE: packaged_text(read_tree(path)),
    }


def written(path, members):
    with zipfile.ZipFile(path, "w") as package:
        for name, content in members:
            package.writestr(name, content)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", [FACTS, PACKAGED_TREE])
def test_two_members_of_one_name_are_refused(tmp_path, members, name):
    """One program would read the first, another the last."""
    path = written(tmp_path / "a.pt2", [*members.items(), (name, "{}")])
    with pytest.raises(
        CheckpointError,
        match=f"a.pt2: damaged, it holds '{name}' twice. Freeze the model again",
    ):
        read_dp(path)


@pytest.mark.parametrize(
    "name",
    ["/tmp/a", "../a", "model/data/aotinductor/model/../../../../a", "model\\..\\a"],
)
def test_members_outside_of_the_package_are_refused(tmp_path, members, name):
    """torch unpacks them where their names say."""
    path = written(tmp_path / "a.pt2", [*members.items(), (name, "x")])
    for load in (read_dp, load_compiled):
        with pytest.raises(
            CheckpointError,
            match=r"would be written outside of the folder .*Do not use this file",
        ):
            load(path)


def test_sizes_that_the_file_cannot_hold_are_refused(tmp_path, members):
    path = written(tmp_path / "a.pt2", members.items())
    content = bytearray(path.read_bytes())
    last = content.rfind(b"PK\x01\x02")
    content[last + 20 : last + 28] = b"\xf0\xff\xff\xff" * 2
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match="its members say that they are larger than the file can hold",
    ):
        read_dp(path)


@pytest.mark.parametrize("command", ["test", "model-devi"])
def test_commands_say_that_a_pt2_is_code(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert (
        ".pt2 (machine code, which runs when it is loaded: only from whom you trust)"
        in words
    )
