"""The launchers themselves: torchrun in its spellings, and the environment that srun gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same, tiny_input
from parallel_runs import free_port, train

from deepmd_ema import cli

ROOT = Path(__file__).parents[2]
STEPS = 4

pytestmark = pytest.mark.timeout(480)


def config(system):
    return tiny_input(
        [system], num_steps=STEPS, training__zero_stage=3, training__enable_ema=True
    )


@pytest.fixture(scope="module")
def forked(tmp_path_factory, water_like):
    """Return the folder of a run of the forked processes of other tests on the same input."""
    folder = tmp_path_factory.mktemp("forked")
    train(folder, 2, config(water_like))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, water_like):
    """The folder of an input, where a launcher finds this package and the command ``dp-ema``."""
    (tmp_path / "input.json").write_text(json.dumps(config(water_like)))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_trained(folder, forked):
    left, right = (
        torch.load(f / f"model.ckpt-{STEPS}.pt", weights_only=True)
        for f in (folder, forked)
    )
    assert_same(left, right)
    assert (folder / "lcurve.out").read_bytes() == (forked / "lcurve.out").read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node=2 dp-ema train input.json",
        "dp-ema train input.json --nproc-per-node 2",  # which becomes torchrun -m deepmd_ema
    ],
)
def test_torchrun_starts_a_run(folder, forked, monkeypatch, command):
    # as torchrun's --master-port: 29500, its default, may be in use here
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if " dp-ema" in command:
        monkeypatch.setenv("PET_NO_PYTHON", "1")
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(folder, forked)
    assert (
        done.stderr.count("trained model: model.ckpt.pt") == 1
    )  # reported by one rank


def test_the_environment_of_srun_starts_a_run(folder, forked):
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SLURM_NTASKS": "2",
    }
    words, ranks = (
        [sys.executable, "-m", "deepmd_ema", "train", "input.json", "--device", "cpu"],
        [],
    )
    for rank in range(2):
        env = {
            **os.environ,
            **meeting,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
        }
        ranks.append(
            subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )
        )
    try:
        said = [rank.communicate(timeout=400)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert_trained(folder, forked)


def test_processes_that_cannot_be_started_are_one_message(folder, monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("torchrun was started"))
    for number, gpus, more, phrase in (
        (
            "gpu",
            0,
            [],
            "--nproc-per-node gpu: there is no GPU here, or --device cpu is given. Give a number",
        ),
        (
            "gpu",
            4,
            ["--device", "cpu"],
            "--nproc-per-node gpu: there is no GPU here, or --device cpu is given.",
        ),
        (
            "3",
            2,
            [],
            "--nproc-per-node 3: there are 2 GPUs here. Give 2 or fewer, or --device cpu.",
        ),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert cli.main(["train", "input.json", "--nproc-per-node", number, *more]) == 2
        assert phrase in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli.main(["train", "input.json", "--nproc-per-node", "2"]) == 2
    assert (
        "--nproc-per-node 2: a launcher has started this process already. Leave it out."
        in capsys.readouterr().err
    )


def test_torchrun_gets_the_command_without_the_option(folder, monkeypatch):
    started = []
    monkeypatch.setattr(
        os, "execve", lambda *arguments: started.append(arguments) or sys.exit(0)
    )
    for number, gpus, size in (("gpu", 4, 4), ("auto", 0, 1), ("2", 4, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(SystemExit):
            cli.main(
                [
                    "--pt",
                    "train",
                    f"--nproc-per-node={number}",
                    "input.json",
                    "-o",
                    "x.json",
                ]
            )
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={size}",
        ]
        command = [
            *launcher,
            "-m",
            "deepmd_ema",
            "--pt",
            "train",
            "input.json",
            "-o",
            "x.json",
        ]
        program, words, environ = started.pop()
        assert (program, words) == (sys.executable, command)
        assert {"SIGTERM", "SIGINT", "SIGUSR1", "SIGXCPU"} < {
            *environ["PET_SIGNALS_TO_HANDLE"].split(",")
        }
