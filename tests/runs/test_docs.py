"""The pages for users stay true: links, commands, options and snippets are checked against the
program.
"""

import json
import os
import re
import runpy
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers import blocks
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.cli.unsupported import OPTIONS
from deepmd_ema.config import config_from_dict, ignored_options
from deepmd_ema.config.labels import LABELS, QUANTITIES
from deepmd_ema.config.manual import manual
from deepmd_ema.config.schema.training import TrainingConfig
from deepmd_ema.config.unsupported import REMOVED

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "doc").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
        ROOT / "configs" / "README.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]
)
PROGRAM = ROOT / "deepmd_ema"
SECTIONS = ("model", "learning_rate", "optimizer", "loss", "training", "validating")
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def headings(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


def commands(page):
    """Return the arguments of every ``dp-ema ...`` in the code of a page, in blocks, indented lines
    and backticks.
    """
    text = page.read_text()
    code = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S) + re.findall(
        r"^ {4}.*$", text, flags=re.M
    )
    code += re.findall(r"`([^`]+)`", without_code(text))
    found = re.findall(r"\bdp-ema((?: +[^\s#|&>;\\,]+)*)", "\n".join(code))
    return [words.split() for words in found if words.split()]


def options_of_the_manual():
    return {
        re.sub(r"\[[^]]*\]", "", line)
        for line in manual().splitlines()
        if re.match(r"[a-z]", line)
    }


@every_page
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        assert not anchor or anchor in headings(there), target


@every_page
def test_every_command_of_a_page_exists_with_its_options(page):
    parsers = next(
        action for action in cli.build_parser()._actions if action.dest == "command"
    ).choices
    for words in commands(page):
        words = words[words[0] in ("--pt", "--pt-expt") :]
        if words[0].startswith('"'):  # of a script that hands its words on
            continue
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--version"), words
            continue
        assert words[0] in cli.COMMANDS, words
        known = {
            name
            for action in parsers[words[0]]._actions
            for name in action.option_strings
        }
        known |= {
            name
            for name, why in OPTIONS.get(words[0], {}).items()
            if why.startswith("was removed")
        }
        given = {
            word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)
        }
        assert given <= known, words


@every_page
def test_every_option_that_a_page_names_is_in_the_manual(page):
    known = options_of_the_manual() | {
        f"{section}.{name}" for section, own in REMOVED.items() for name in own
    }
    known |= {f"training.{name}" for name in TrainingConfig.without_effect}
    named = re.findall(
        rf"`((?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+)[` =]", page.read_text()
    )
    assert [
        name
        for name in named
        if name not in known and not re.search(r"\.(pt|pth|dp|dcp|md)$", name)
    ] == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "doc" / "manual").glob("*.md")), ids=lambda page: page.stem
)
def test_the_manual_has_the_options_as_they_are_declared(page):
    with_options = runpy.run_path(str(ROOT / "doc" / "site" / "manual_pages.py"))[
        "with_options"
    ]
    assert page.read_text() == with_options(page.read_text()), (
        "run python doc/site/manual_pages.py"
    )


def test_the_contents_of_a_folder_name_every_page():
    pages = [page for page in (ROOT / "doc").rglob("*.md") if page.name != "README.md"]
    folders = [page.parent for page in (ROOT / "doc").glob("*/README.md")]
    assert [
        page
        for page in pages
        if f"({page.name})" not in (page.parent / "README.md").read_text()
    ] == []
    assert [
        page
        for page in folders
        if f"({page.name}/README.md)" not in (ROOT / "doc/README.md").read_text()
    ] == []
    text = (ROOT / "benchmarks" / "README.md").read_text()
    results = (ROOT / "benchmarks" / "results").iterdir()
    assert [
        page
        for page in results
        if page.suffix == ".md" and f"(results/{page.name})" not in text
    ] == []


@every_page
def test_every_input_on_a_page_is_good_and_wastes_no_option(page):
    for text in blocks(page, "json"):
        config = config_from_dict(json.loads(text))
        assert ignored_options(config) == []
        assert config.notes == ()


@pytest.mark.parametrize(
    "package",
    sorted(p.stem for p in PROGRAM.iterdir() if not p.name.startswith(("_", "py."))),
)
def test_the_architecture_names_every_package(package):
    assert f"`{package}`" in (ROOT / "doc" / "architecture.md").read_text()


def test_the_layers_of_the_architecture_are_those_that_are_checked():
    settings = (ROOT / "pyproject.toml").read_text()
    checked = re.findall(
        r'^  "(.*)",$',
        settings[settings.index("layers = [") :].partition("]")[0],
        flags=re.M,
    )
    assert blocks(ROOT / "doc" / "architecture.md", "text")[0].splitlines() == checked


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A folder as training leaves it, with the frames of the water example and a frozen file."""
    folder = tmp_path / "run"
    write_run(folder)
    os.symlink("model_ema.ckpt-7.pt", folder / "model_ema.ckpt.pt")
    os.symlink(ROOT / "examples" / "water" / "data", folder / "data")
    os.symlink(
        ROOT / "tests" / "golden" / "quantities" / "dipole_se_atten.dp",
        folder / "dipole.dp",
    )
    monkeypatch.chdir(folder)
    assert cli.main(["freeze", "--use-ema", "-o", "water.dp", "-v", "ERROR"]) == 0
    return folder


@pytest.mark.parametrize("quantity", QUANTITIES.values(), ids=QUANTITIES)
def test_the_page_of_a_run_has_every_error_of_energies_with_its_unit_and_the_letters_of_others(
    quantity,
):
    text = (ROOT / "doc" / "running.md").read_text()
    rows = re.findall(r"^\| *(\w?) *\| `(\w+)` \|.*\| (\S+) \|$", text, flags=re.M)
    others = re.search("^Models of .other quantities.*?\n\n", text, flags=re.M | re.S)[
        0
    ]
    if quantity in (
        error for label in LABELS.values() if label.symbol for error in label.errors
    ):
        assert (quantity.metric, quantity.name, quantity.unit) in rows
    else:
        assert not quantity.metric or re.search(rf"\b{quantity.metric}\b", others)


def run_blocks(text, name):
    """Execute the Python and the commands of a page in order; JSON is `input.json`.

    Return the names of Python.
    """
    names = {}
    for language, code in re.findall(
        r"^```(python|sh|json)\n(.*?)^```", text, flags=re.M | re.S
    ):
        if language == "python":
            names = {}
            exec(compile(code, name, "exec"), names)
        elif language == "json":
            Path("input.json").write_text(code)
        else:
            for line in code.splitlines():
                command, *words = shlex.split(line)
                assert (command, cli.main(words)) == ("dp-ema", 0), line
    return names


SMALLER = {  # what the tutorial shows -> what is executed, in seconds instead of minutes
    "range(20)": "range(4)",
    "dynamics.run(25)": "dynamics.run(2)",
    "--steps 1000": "--steps 4",
    "range(50, 501, 50)": "range(2, 5, 2)",
    "dynamics.run(50)": "dynamics.run(2)",
    "copper.pt2": "copper.dp",  # a .pt2 is compiled for minutes; tests/unit/test_pt2.py writes some
}


@pytest.mark.slow
def test_every_step_of_the_tutorial_runs_and_its_potential_conserves_energy(
    here, capsys
):
    pytest.importorskip("ase")
    text = (ROOT / "doc" / "tutorial.md").read_text()
    for long, short in SMALLER.items():
        assert long in text
        text = text.replace(long, short)
    run_blocks(text, "doc/tutorial.md")
    assert {"report.html", "parity.png", "copper.dp"} <= set(os.listdir())
    total = [
        float(found)
        for found in re.findall(r"total energy (\S+) meV/atom", capsys.readouterr().out)
    ]
    assert len(total) == 2
    assert max(map(abs, total)) < 1.0


SMALLER_USES = {
    "dynamics.run(50)": "dynamics.run(1)",
    '"numb_steps": 500': '"numb_steps": 20',
    "--steps 1000": "--steps 2",
}
USES = dict(
    part.split("\n", 1)
    for part in (ROOT / "doc" / "examples_of_use.md").read_text().split("\n## ")[1:]
)


def run_use(title):
    text = USES[title]
    for long, short in SMALLER_USES.items():
        text = text.replace(long, short)
    assert all(
        code.count("\n") <= 20
        for code in re.findall(r"^```\w+\n(.*?)^```", text, flags=re.M | re.S)
    )
    return run_blocks(text, title)


def test_labels_of_selected_atoms_are_those_of_the_example(here, capsys):
    run_use("Dipoles of some elements")
    errors = np.loadtxt("val.log", ndmin=2)
    assert errors[-1, 4] < 0.1  # e*angstrom, RMSE of W after 20 steps; 0.6 at the first


def test_pressure_of_the_example_is_minus_the_derivative_of_the_energy(trained, capsys):
    pytest.importorskip("ase")
    from ase.units import GPa

    atoms = run_use("Constant pressure with ASE")["atoms"]
    printed = float(re.findall(r"pressure (\S+) GPa", capsys.readouterr().out)[-1])
    kinetic = 2 / 3 * atoms.get_kinetic_energy() / atoms.get_volume()
    energies, volumes = [], []
    for scale in (0.999, 1.001):
        strained = atoms.copy()
        strained.calc = atoms.calc
        strained.set_cell(atoms.cell * scale, scale_atoms=True)
        energies.append(strained.get_potential_energy())
        volumes.append(strained.get_volume())
    pressure = kinetic - (energies[1] - energies[0]) / (volumes[1] - volumes[0])
    assert printed == pytest.approx(pressure / GPa, abs=0.01)


def test_the_example_of_frozen_atoms_trains_on_weighted_forces_alone(here, capsys):
    pytest.importorskip("ase")
    run_use("A surface with frozen atoms")
    loss = json.loads(Path("out.json").read_text())["loss"]
    assert loss["start_pref_pf"] == loss["limit_pref_pf"] > 0
    assert loss["start_pref_f"] == loss["limit_pref_f"] == 0
    assert "Q_RMSE" in Path("val.log").read_text()


@pytest.mark.parametrize("name", ["README.md", "doc/averaging.md", "doc/potential.md"])
def test_every_python_snippet_of_a_page_runs(name, trained, capsys):
    if "ase" in (ROOT / name).read_text():
        pytest.importorskip("ase")
    snippets = blocks(ROOT / name, "python")
    assert snippets
    for text in snippets:
        if "torch_sim" in text:
            if find_spec("torch_sim") is None:  # there is none for Python 3.10
                continue
            if not hasattr(import_module("torch_sim"), "Integrator"):
                text = text.replace("ts.Integrator.nve", "ts.nve")
        exec(compile(text, name, "exec"), {})
    assert capsys.readouterr().out
