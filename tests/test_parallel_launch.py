"""The launchers themselves: torchrun in its three spellings, and the environment that srun gives."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same, tiny_input
from parallel_runs import free_port, train

from deepmd_ema import cli

ROOT = Path(__file__).parents[1]
STEPS = 4

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def forked(tmp_path_factory, water_like):
    """Return the folder of a run of the forked processes of other tests on the same input."""
    folder = tmp_path_factory.mktemp("forked")
    train(folder, 2, config(water_like))
    return folder


def config(system):
    return tiny_input([system], num_steps=STEPS, training__zero_stage=3, training__enable_ema=True)


def environment(**more):
    """Return the environment of a launcher that finds this package and the command ``dp-ema``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = [p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p]
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", **more}


def ready(tmp_path, system):
    (tmp_path / "input.json").write_text(json.dumps(config(system)))


def assert_trained(folder, forked):
    left, right = (torch.load(f / f"model.ckpt-{STEPS}.pt", weights_only=True) for f in (folder, forked))
    assert_same(left, right)
    assert (folder / "lcurve.out").read_bytes() == (forked / "lcurve.out").read_bytes()


SPELLINGS = {
    "path": ("DP-EMA",),
    "module": ("-m", "deepmd_ema"),
    "own": ("DP-EMA",),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_torchrun_starts_a_run(tmp_path, water_like, forked, spelling):
    command = shutil.which("dp-ema", path=environment()["PATH"])
    assert command is not None, "the package is not installed: pip install -e ."
    words = [command if word == "DP-EMA" else word for word in SPELLINGS[spelling]]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *words]
    launcher, more = (launcher, []) if spelling != "own" else (words, ["--nproc-per-node", "2"])
    ready(tmp_path, water_like)
    done = subprocess.run(
        [*launcher, "train", "input.json", *more, "--device", "cpu"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(tmp_path, forked)
    assert done.stderr.count("trained model: model.ckpt.pt") == 1  # reported by one rank


def test_torchrun_starts_the_command_as_users_write_it(tmp_path, water_like, forked):
    ready(tmp_path, water_like)
    # as torchrun's --master-port: 29500, its default, may be in use here
    env = environment(PET_NO_PYTHON="1", PET_MASTER_PORT=str(free_port()), CUDA_VISIBLE_DEVICES="")
    command = "torchrun --nproc_per_node=2 dp-ema train input.json"
    done = subprocess.run(command.split(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(tmp_path, forked)


def test_the_environment_of_srun_starts_a_run(tmp_path, water_like, forked):
    ready(tmp_path, water_like)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "deepmd_ema", "train", "input.json", "--device", "cpu"],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment(**meeting, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert_trained(tmp_path, forked)


def test_processes_that_cannot_be_started_are_one_message(tmp_path, water_like, monkeypatch, capsys):
    ready(tmp_path, water_like)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("torchrun was started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ["train", "input.json", "--nproc-per-node"]
    said = []
    for number, gpus, more in (
        ("gpu", 0, []),
        ("gpu", 4, ["--device", "cpu"]),
        ("3", 2, []),
        ("2", 0, ["--restart", "x", "--init-model", "y"]),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert cli.main([*words, number, *more]) == 2
        said.append(capsys.readouterr().err)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main([*words, "2"]) == 2
    said.append(capsys.readouterr().err)
    expected = (
        "--nproc-per-node gpu: there is no GPU here, or --device cpu is given. Give a number of processes.",
        "--nproc-per-node gpu: there is no GPU here, or --device cpu is given. Give a number of processes.",
        "--nproc-per-node 3: there are 2 GPUs here. Give 2 or fewer, or --device cpu.",
        "not allowed with argument",
        "--nproc-per-node 2: a launcher has started this process already. Leave it out.",
    )
    for text, phrase in zip(said, expected, strict=True):
        assert phrase in text
        assert text.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input.json"]


@pytest.mark.parametrize(("number", "gpus", "size"), [("gpu", 4, 4), ("auto", 4, 4), ("auto", 0, 1), ("2", 4, 2)])
def test_torchrun_gets_the_command_without_the_option(tmp_path, water_like, monkeypatch, number, gpus, size):
    ready(tmp_path, water_like)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, words)) or sys.exit(0))
    for option in (["--nproc-per-node", number], [f"--nproc-per-node={number}"]):
        with pytest.raises(SystemExit):
            cli.main(["--pt", "train", *option, "input.json", "-o", "x.json"])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*launcher, "-m", "deepmd_ema", "--pt", "train", "input.json", "-o", "x.json"]
    assert started == [(sys.executable, command)] * 2
