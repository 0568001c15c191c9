"""The source distribution, and the wheel that is built from it, are whole."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).resolve().parent.parent


def call(folder, *words):
    found = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    return found.stdout


def package_files():
    """Files of the package in the repository."""
    files = (ROOT / "deepmd_ema").rglob("*")
    return {str(f.relative_to(ROOT)) for f in files if f.is_file() and f.suffix != ".pyc"}


def test_a_wheel_of_the_source_distribution_has_every_file_and_runs(tmp_path):
    call(ROOT, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path))
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    call(source, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert package_files() <= names
    assert {name.split("/")[0].split("-")[0] for name in names} <= {"deepmd_ema", "dp_ema"}
    first = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    code = f"{first}from deepmd_ema.cli.main import main; sys.exit(main())"
    assert "neighbor-stat" in call(tmp_path, "-c", code, str(tmp_path / "installed"), "--help")
    code = f"{first}from deepmd_ema.presets import read_preset; print(read_preset('models'))"
    assert "se_e2_a" in call(tmp_path, "-c", code, str(tmp_path / "installed"))
