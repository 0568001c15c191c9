"""Wheels of what a machine without a package index lacks to measure dp-ema beside DeePMD-kit.

    python tests/gpu_archive.py FOLDER [--present FILE] [--limit MB]

FILE has the names of the packages that the machine has, one a line; ``pip list --format=freeze``
there prints them. torch is taken to be there. On the machine, in the root of the repository::

    python3 tests/gpu_archive.py FOLDER --install /tmp/site
    export PYTHONPATH=/tmp/site/packages:$PWD
    python3 tests/gpu_first_contact.py --output DIR --peer python3
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEEPMD_KIT = [
    "deepmd-kit==3.2.0",
    "mpich",
]  # its libraries need that of MPI, which its wheel does not name
TESTS = ["pytest", "pytest-timeout", "pytest-xdist"]
# of DPA-4 and its neighbors; they require torch, whose requirements cannot be resolved for another
# machine
WITH_TORCH = ["e3nn", "opt-einsum", "opt-einsum-fx", "vesin-torch"]
LEFT_OUT = {"torch"}
ALWAYS = {
    "typing-extensions"
}  # small, and the packages that are brought may need a newer one
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def main():
    """Write the wheels, and print their names, sizes, and the packages that were left out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the wheels")
    parser.add_argument(
        "--present", type=Path, help="names of the packages of the machine, one a line"
    )
    parser.add_argument("--python", default="3.12", help="version of the machine")
    parser.add_argument(
        "--limit", type=float, default=64.0, metavar="MB", help="size of all wheels"
    )
    parser.add_argument(
        "--install",
        type=Path,
        metavar="TO",
        help="install the wheels of the folder there instead",
    )
    args = parser.parse_args()
    if args.install:
        install(args.folder, args.install)
        return
    lines = args.present.read_text().split() if args.present else []
    present = {normalize(re.split("[=<>~@]", line)[0]) for line in lines} | LEFT_OUT
    wanted = [
        "--only-binary=:all:",
        "--python-version",
        args.python,
        "--implementation",
        "cp",
    ]
    for platform in PLATFORMS:
        wanted += ["--platform", platform]

    packages = resolve([*requirements(), *DEEPMD_KIT, *TESTS], wanted)
    missing = [
        f"{name}=={version}"
        for name, version in packages.items()
        if name not in present - ALWAYS
    ]
    missing += [name for name in WITH_TORCH if name not in present]
    args.folder.mkdir(parents=True, exist_ok=True)
    for old in args.folder.glob("*.whl"):
        old.unlink()
    pip("download", "--no-deps", *wanted, "--dest", str(args.folder), *missing)

    sizes = {file.name: file.stat().st_size / 1e6 for file in args.folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size:8.2f} MB  {name}")
    print(f"{sum(sizes.values()):8.2f} MB  {len(sizes)} wheels")
    print(
        f"Taken from the machine: {', '.join(sorted(packages.keys() & present - ALWAYS))}, torch."
    )
    if sum(sizes.values()) > args.limit:
        sys.exit(
            f"{args.folder}: {sum(sizes.values()):.1f} MB of wheels, at most {args.limit:.0f} MB "
            "can travel."
        )


def install(folder, place):
    """Install the wheels of ``folder`` into ``place``/packages, with the libraries that pip leaves
    out there.
    """
    wheels = sorted(folder.glob("*.whl"))
    packages = place / "packages"
    options = [
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--upgrade",
        "--target",
        str(packages),
    ]
    pip("install", *options, *map(str, wheels))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # the list of files of a package, in which DeePMD-kit finds MPI, has them one folder
                # above it
                _, is_library, path = name.partition(".data/data/lib/")
                if is_library and ".so" in path:
                    (place / path).parent.mkdir(parents=True, exist_ok=True)
                    (place / path).write_bytes(archive.read(name))


def requirements():
    """Return the requirements of dp-ema without torch."""
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = re.search(
        r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL
    )[1]
    names = re.findall(r'"(.+?)"', dependencies)
    return [
        name for name in names if normalize(re.split("[=<>~]", name)[0]) not in LEFT_OUT
    ]


def resolve(names, wanted):
    """Return the versions of ``names`` and of all that they require, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            "--dry-run",
            "--ignore-installed",
            "--target",
            folder,
            "--report",
            str(report),
        ]
        pip("install", *words, *wanted, "-c", str(ROOT / "constraints.txt"), *names)
        entries = json.loads(report.read_text())["install"]
        return {
            normalize(entry["metadata"]["name"]): entry["metadata"]["version"]
            for entry in entries
        }


def pip(*words):
    """Run pip, and end with its message if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"pip {words[0]} failed:\n{done.stderr.strip()}")


def normalize(name):
    """Return the name of a package as an index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
