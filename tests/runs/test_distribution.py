"""The source distribution and the wheel that is built from it: every file, and commands in an empty
environment.
"""

import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from helpers import write_system

import deepmd_ema

pytest.importorskip("hatchling")
# not looked for as a module: that takes setuptools' distutils away, which torch's compiler needs in
# this process
if not list(distributions(name="pip")):
    pytest.skip("pip is not installed", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def call(folder, *words, **environment):
    found = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def package_files():
    """Files of the package in the repository."""
    files = (ROOT / "deepmd_ema").rglob("*")
    return {
        str(f.relative_to(ROOT)) for f in files if f.is_file() and f.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build", "-d", folder, "-t")
    call(ROOT, *build, "sdist")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    call(folder / sdist.name.removesuffix(".tar.gz"), *build, "wheel")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the commands of an environment with the wheel, whose dependencies are those of this
    interpreter.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = Path(
        call(
            folder, python, "-c", "import site; print(site.getsitepackages()[0])"
        ).strip()
    )
    # the .pth files in these folders are not read, so that an editable installation of the
    # repository is not found
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    pip = (sys.executable, "-m", "pip", "--python", python)
    call(folder, *pip, "install", "-q", "--no-deps", "--no-index", wheel)
    return folder / "bin"


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert package_files() <= names
    files = (
        "py.typed",
        "config/presets/models.yaml",
        "commands/page.html",
        "report/plots.mplstyle",
    )  # read at run time
    assert {f"deepmd_ema/{name}" for name in files} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} <= {
        "deepmd_ema",
        "dp_ema",
    }


def test_the_installed_wheel_goes_from_data_to_a_frozen_model(installed, tmp_path):
    def run(command, *words):
        return call(
            tmp_path, installed / command, *words, PYTHONPATH="", OMP_NUM_THREADS="1"
        )

    where = "import deepmd_ema, sys; print(deepmd_ema.__file__); assert sys.argv[1] not in sys.path"
    assert Path(run("python", "-c", where, ROOT).strip()).is_relative_to(
        installed.parent
    )
    assert run("dp-ema", "--version") == f"dp-ema {deepmd_ema.__version__}\n"
    write_system(tmp_path / "data", elements=("Cu", "Au"))
    run("dp-ema", "init", "data", "--size", "S", "--steps", "4")
    assert "Cu Au" in run("dp-ema", "check", "input.yaml")
    run("dp-ema", "train", "input.yaml", "--device", "cpu")
    run("dp-ema", "freeze", "--use-ema", "-o", "frozen.dp")
    assert "Cu Au" in run("dp-ema", "show", "frozen.dp")
