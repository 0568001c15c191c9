"""Every line of `dp` in DeePMD-kit's documentation for training, freezing, testing and so on, with
the backend `ema`.

It needs dp-ema in the environment of DeePMD-kit 3.2.0 (`DIR/bin/pip install -e .`):

    DP_PEER=DIR python -m pytest -m nightly -s tests/peer/test_backend.py
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("DP_PEER", "/nonexistent"))
DATA = ROOT / "examples" / "water" / "data"
TIMEOUT_S = 300
SAME = 1e-12  # relative: between DeePMD-kit and dp-ema

pytestmark = [
    pytest.mark.skipif(
        not (PEER / "bin" / "dp-ema").exists(),
        reason="set DP_PEER to DeePMD-kit 3.2.0 with dp-ema",
    ),
    pytest.mark.timeout(3600),
    pytest.mark.nightly,
]
# lines of doc/ and README.md, with --ema for their backend, in this order: exit code, and a file
# that is written
LINES = [
    ("dp --ema train input.json", 0, "model.ckpt.pt"),
    ("dp --ema train input.json --restart model.ckpt.pt", 0, "lcurve.out"),
    ("dp --ema train input.json --mpi-log=workers", 2, ""),
    (
        "torchrun --nproc_per_node=2 --no-python dp --ema train input.json --skip-neighbor-stat",
        0,
        "model.ckpt.pt",
    ),
    ("torchrun --no-python dp --ema train input.json", 0, "model.ckpt.pt"),
    ("dp --ema freeze -o frozen_model.pth", 0, "frozen_model.pth"),
    ("dp --ema freeze", 0, "frozen_model.pth"),  # over the older one
    ("dp --ema freeze -o model.pth", 0, "model.pth"),
    ("dp --ema freeze -c model.ckpt.pt -o frozen_model", 0, "frozen_model.pth"),
    ("dp --ema freeze -c . -o frozen_model.pth --hessian", 2, ""),
    ("dp --ema freeze -o model.pt2 --lower-kind graph", 2, ""),
    (
        "dp --ema freeze -o model_branch1.pth --head CHOSEN_BRANCH -c multitask.pt",
        0,
        "model_branch1.pth",
    ),
    ("dp --ema freeze -o graph.pb --node-names o_energy", 2, ""),
    ("dp --ema test -m model.pth -s data -n 30", 0, ""),
    ("dp --ema test -m frozen_model.pth -s data -d detail -n 3", 0, "detail.e.out"),
    (
        "dp --ema test -m model.ckpt.pt -s data -d detail -a -n 1",
        0,
        "detail.e_peratom.out",
    ),
    ("dp --ema test -m model_ema.ckpt.pt -s data -n 3 -l test.log", 0, "test.log"),
    ("dp --ema test -m multitask.pt -s data -n 3 --head CHOSEN_BRANCH", 0, ""),
    (
        "dp --ema test -m model.ckpt.pt --valid-data input.json -n 2 --shuffle-test -r 1",
        0,
        "",
    ),
    (
        "dp --ema change-bias model.ckpt.pt -s data -o model_updated.pt",
        0,
        "model_updated.pt",
    ),
    (
        "dp --ema change-bias model.ckpt.pt -b -92.523 -187.66 -o model_updated.pt",
        0,
        "model_updated.pt",
    ),
    (
        "dp --ema change-bias model.ckpt.pt -s data -n 10 -m change -o model_updated.pt",
        0,
        "model_updated.pt",
    ),
    (
        "dp --ema change-bias multitask.pt -s data -o model_updated.pt --model-branch OTHER",
        0,
        "model_updated.pt",
    ),
    (
        "dp --ema show model.ckpt.pt type-map descriptor fitting-net size observed-type",
        0,
        "",
    ),
    (
        "dp --ema show multitask.pt model-branch type-map descriptor fitting-net size",
        0,
        "",
    ),
    ("dp --ema show frozen_model.pth type-map descriptor fitting-net size", 0, ""),
    ("dp --ema neighbor-stat -s data -r 6.0 -t O H", 0, ""),
    ("dp --ema convert-backend model.ckpt.pt other.pth", 0, "other.pth"),
    ("dp --ema convert-backend frozen_model.pth other.pt", 0, "other.pt"),
    ("dp --ema convert-backend other.pt other.dp", 0, "other.dp"),
    ("dp --ema train new.json --init-model pretrained.pt", 0, "new.ckpt.pt"),
    ("dp --ema train new.json --init-frz-model frozen_model.pth", 0, "new.ckpt.pt"),
    ("dp --ema train new.json --finetune pretrained.pt", 0, "new.ckpt.pt"),
    (
        "dp --ema train new.json --finetune pretrained.pt --use-pretrain-script",
        0,
        "new.ckpt.pt",
    ),
    (
        "dp --ema train new.json --finetune pretrained.pt --model-branch RANDOM",
        0,
        "new.ckpt.pt",
    ),
    (
        "dp --ema train new.json --finetune multitask.pt --model-branch CHOSEN_BRANCH",
        0,
        "new.ckpt.pt",
    ),
    ("dp --ema train new.json --finetune pretrained.pt --force-load", 2, ""),
    ("dp --ema transfer -r raw.pb -O old.pb", 2, ""),
    ("dp --ema train-nvnmd input.json -s s1", 2, ""),
    (
        "DP_BACKEND=ema dp train input.json --skip-neighbor-stat -o o.json -v DEBUG -l train.log",
        0,
        "train.log",
    ),
    ("DP_BACKEND=ema dp freeze", 0, "frozen_model.pth"),
    (
        "DP_BACKEND=ema dp --pt train input.json --skip-neighbor-stat",
        0,
        "model.ckpt.pt",
    ),
    ("DP_BACKEND=ema dp --pt freeze", 0, "frozen_model.pth"),
    ("DP_BACKEND=ema dp --pt test -n 3 -s data", 0, ""),
]


def sh(folder, line, check=False):
    """Run a line with the commands of the peer's environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "DP_BACKEND")
    }
    environment |= {
        "PATH": os.pathsep.join([str(PEER / "bin"), "/usr/bin", "/bin"]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data, inputs, and the model of a run and of one of two tasks."""
    folder = tmp_path_factory.mktemp("dp")
    shutil.copytree(DATA / "validation", folder / "data")
    energy, types = (
        np.load(folder / "data/set.000/energy.npy"),
        np.loadtxt(folder / "data/type.raw"),
    )
    np.save(
        folder / "data/set.000/atom_ener.npy",
        np.repeat(energy[:, None] / len(types), len(types), axis=1),
    )
    model = {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut": 4.0,
            "rcut_smth": 0.5,
            "neuron": [4, 8],
            "axis_neuron": 4,
        },
        "fitting_net": {"neuron": [8, 8]},
    }
    of_run = {"numb_steps": 4, "disp_freq": 2, "save_freq": 2}
    data = {
        "training_data": {"systems": ["data"]},
        "validation_data": {"systems": ["data"]},
    }
    rest = {
        "learning_rate": {
            "type": "exp",
            "start_lr": 1e-3,
            "stop_lr": 1e-5,
            "decay_steps": 2,
        }
    }
    loss = {"type": "ener", "start_pref_v": 0.02, "limit_pref_v": 1}
    single = {
        "model": model,
        **rest,
        "loss": loss,
        "training": {**of_run, **data, "enable_ema": True},
    }
    (folder / "input.json").write_text(json.dumps(single))
    single["training"]["save_ckpt"] = "new.ckpt"
    (folder / "new.json").write_text(json.dumps(single))
    shared = {"type_map_all": model["type_map"], "descriptor_all": model["descriptor"]}
    task = {
        "type_map": "type_map_all",
        "descriptor": "descriptor_all",
        "fitting_net": model["fitting_net"],
    }
    tasks = ("CHOSEN_BRANCH", "OTHER")
    several = {
        "model": {"shared_dict": shared, "model_dict": dict.fromkeys(tasks, task)},
        **rest,
        "loss_dict": dict.fromkeys(tasks, loss),
        "training": {
            **of_run,
            "data_dict": dict.fromkeys(tasks, data),
            "save_ckpt": "multi",
        },
    }
    (folder / "multi.json").write_text(json.dumps(several))
    sh(
        folder,
        "dp --ema train multi.json && cp multi.pt multitask.pt && cp multi.pt pretrained.pt",
        check=True,
    )
    sh(
        folder,
        "dp --ema train input.json && cp model.ckpt.pt pretrained.pt",
        check=True,
    )
    return folder


def test_every_line_of_the_documentation_of_dp(home):
    rows, wrong = [], []
    for line, code, file in LINES:
        before = (
            (home / file).stat().st_mtime_ns if file and (home / file).exists() else 0
        )
        done = sh(home, line)
        is_written = (
            not file or (home / file).stat().st_mtime_ns > before or "restart" in line
        )
        rows.append(f"| `{line}` | {done.returncode} | {file} |")
        if (
            done.returncode != code
            or not is_written
            or (code == 2 and "Traceback" in done.stderr)
        ):
            wrong.append(
                f"{line}: exit {done.returncode}, expected {code}\n"
                f"{(done.stdout + done.stderr)[-1500:]}"
            )
    print("\n| line | exit code | file |\n|---|---|---|", *rows, sep="\n")
    assert not wrong, "\n".join(wrong)


def test_deep_pot_has_the_energies_forces_and_virials_of_dp_ema(home):
    program = """
import sys, numpy as np
from deepmd.infer import DeepPot
from deepmd_ema.infer.potential import Potential
coord, box = np.load("data/set.000/coord.npy")[:2], np.load("data/set.000/box.npy")[:2]
types = [int(word) for word in open("data/type.raw").read().split()]
worst = 0.0
for file in ("model.ckpt.pt", "model_ema.ckpt.pt"):
    for cells in (box, None):
        theirs = DeepPot(file).eval(coord, cells, types)
        ours = Potential(file).evaluate(coord.reshape(2, -1, 3), np.array(types), cells)
        for one, other in zip(theirs, (ours.energy, ours.force, ours.virial)):
            worst = max(worst, np.abs(one.ravel() - other.ravel()).max() / np.abs(one).max())
print("worst", worst)
"""
    done = sh(home, f"python -c '{program}'", check=True)
    worst = float(done.stdout.rpartition("worst")[2])
    assert np.isfinite(worst)
    assert worst < SAME
