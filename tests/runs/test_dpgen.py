"""The shell lines of DP-GEN 0.14, with ``dp-ema`` in the place of ``dp``, on an input as its
generator writes it.

The lines are those of `make_train` and `run_train_dp` of dpgen/generator/run.py.
"""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tiny_input, write_system

ROOT = Path(__file__).parents[2]
# in the place of an installed DeePMD-kit: copies what it is given to convert or compress
PROGRAM = f"""#!{sys.executable}
import shutil, sys
words = [word for word in sys.argv[1:] if word != "--pt"]
if words == ["--version"]:
    print("DeePMD-kit v3.2.0")
elif words[0] == "convert-backend":
    shutil.copy(words[1], words[2])
else:
    shutil.copy(words[2], words[4])
"""


@pytest.fixture
def task(tmp_path):
    """A folder of a task of training as DP-GEN makes it, with an input of its keys."""
    work = tmp_path / "00.train"
    names = []
    for number, natoms in enumerate((6, 8)):
        names.append(f"../data.init/water.{number}")
        write_system(
            work / "data.init" / f"water.{number}", frames=5, natoms=natoms, seed=number
        )
    folder = work / "000"
    folder.mkdir()
    config = tiny_input(
        names, num_steps=4, training__save_freq=2, training__seed=2890377451
    )
    config["model"]["descriptor"]["seed"] = 3184112839
    config["model"]["fitting_net"]["seed"] = 1107123
    data = config["training"]["training_data"]
    data |= {"batch_size": [1, 2], "auto_prob": "prob_sys_size; 0:1:0.3; 1:2:0.7"}
    del config["training"]["training_data"]["systems"]
    data["systems"] = names
    config["training"] |= {"disp_file": "lcurve.out", "save_ckpt": "model.ckpt"}
    (folder / "input.json").write_text(json.dumps(config, indent=4))
    return folder


def sh(folder, line):
    """Run a line with the commands of this package, and with a program in the place of
    DeePMD-kit.
    """
    tools = folder.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "dp").write_text(PROGRAM)
    (tools / "dp").chmod((tools / "dp").stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join(
        [str(tools), str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    )
    found = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": found,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def training_line(flag, options="", init=""):
    command = f"dp-ema {flag} train input.json{options}".replace("  ", " ")
    line = (
        f"{{ if [ ! -f model.ckpt.pt ]; then {command}{init}; else {command} --restart "
        f"model.ckpt; fi }}"
    )
    return f"/bin/sh -c {shlex.quote(line)}"


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_an_iteration_trains_freezes_compresses_and_the_next_one_starts_from_its_models(
    task,
):
    done = sh(task, training_line("--pt", " --skip-neighbor-stat"))
    assert done.returncode == 0, done.stderr
    assert "backend pytorch: accepted, dp-ema has one backend" in done.stderr
    assert {"lcurve.out", "checkpoint", "model.ckpt.pt"} <= names(
        task
    )  # which are sent back beside train.log
    for line in ("dp-ema --pt freeze", "dp-ema --pt compress"):
        done = sh(task, line)
        assert done.returncode == 0, done.stderr
    assert {"frozen_model.pth", "frozen_model_compressed.pth"} <= names(task)

    before = (task / "lcurve.out").read_bytes()
    again = sh(
        task, training_line("--pt")
    )  # a job that is submitted once more continues, and there is nothing left
    assert again.returncode == 0, again.stderr
    assert (task / "lcurve.out").read_bytes() == before

    later = task.parent / "001"
    for name, start in (
        ("model.ckpt", "--init-model"),
        ("init.pth", "--init-frz-model"),
        ("init.pth", "--finetune"),
    ):
        (later / "old").mkdir(parents=True)
        (later / "old" / "model.ckpt.pt").symlink_to(task / "model.ckpt.pt")
        (later / "old" / "init.pth").symlink_to(task / "frozen_model.pth")
        (later / "input.json").write_bytes((task / "input.json").read_bytes())
        done = sh(later, training_line("--pt", init=f" {start} old/{name}"))
        assert done.returncode == 0, done.stderr
        assert "model.ckpt-4.pt" in names(later)
        later = later.with_name(f"{int(later.name) + 1:03d}")
