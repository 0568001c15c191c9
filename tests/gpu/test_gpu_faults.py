"""Choice of the GPU of a rank, faults of NCCL, and a rank that is lost while others wait in a
collective.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_runs import free_port, launcher_environment
from rank_faults import SAVE_EVERY, last_words, make_run

from deepmd_ema.distributed.rendezvous import cause_of, is_peer_lost
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import RankLostError, UserError

LIMIT_S = 100
ON_GPU = ("train", "input.json", "--device", "cuda")
DUPLICATE = (
    "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
    "version 2.27.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n"
)
REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was a network "
    "error, NCCL version 2.27\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely."
)


@pytest.fixture
def visible(monkeypatch):
    """Return a function that sets the number of GPUs that torch sees; no kernel is launched on
    them.
    """

    def see(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.tensor(0.0))

    return see


def test_a_rank_that_sees_one_gpu_takes_it_whatever_its_number(visible):
    visible(1)
    assert [str(select_device("cuda", rank)) for rank in (0, 1, 7)] == ["cuda:0"] * 3
    assert str(select_device(None, 3)) == "cuda:0"
    visible(4)
    assert [str(select_device("cuda", rank)) for rank in (0, 3)] == ["cuda:0", "cuda:3"]
    assert str(select_device("cuda:2", 1)) == "cuda:2"


def test_more_local_ranks_than_gpus_are_refused_with_both_numbers(visible):
    visible(2)
    with pytest.raises(
        UserError,
        match=r"no GPU for local rank 2, this machine shows 2 GPUs\. Start 2 processes",
    ):
        select_device("cuda", 2)


def test_a_fault_of_nccl_itself_is_no_lost_rank_and_is_shown():
    own = [
        DUPLICATE,
        "ncclSystemError: System call (e.g. socket, malloc) failed.\nLast error:\nBootstrap : no "
        "interface",
    ]
    for text in own:
        assert not is_peer_lost(dist.DistBackendError(text))
    assert cause_of(dist.DistBackendError(DUPLICATE)).startswith(
        "Duplicate GPU detected : rank 0 and rank 1"
    )
    assert cause_of(RuntimeError("first\nsecond")) == "first"
    for text in (
        REMOTE,
        "NCCL communicator was aborted on rank 1.",
        "Watchdog caught collective operation timeout",
    ):
        assert is_peer_lost(dist.DistBackendError(text))
    assert is_peer_lost(dist.DistNetworkError("Connection reset"))
    assert is_peer_lost(RankLostError("gone"))


@pytest.mark.gpu
@pytest.mark.pretended_gpu
def test_two_tasks_that_see_one_gpu_each_train(tmp_path):
    folder, port = make_run(tmp_path / "run"), free_port()
    words = [sys.executable, "-m", "deepmd_ema", *ON_GPU]
    ranks = [
        subprocess.Popen(
            words,
            cwd=folder,
            env=_environment(k, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    ends = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert "on cuda:0" in ends[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("faults", "lost"), [(("hang", "die"), 1), (("die", "hang"), 0)]
)
def test_a_killed_rank_ends_the_others_that_wait_in_a_collective_for_ever(
    tmp_path, faults, lost
):
    folder, port = make_run(tmp_path / "run"), free_port()
    # not forks: those have none of the threads in which a device's backward pass runs
    code = (
        "import sys; from rank_faults import be_a_rank; sys.exit(be_a_rank(sys.argv[1], "
        "sys.argv[2:]))"
    )
    with (folder / "reported.txt").open("w") as said:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, fault, *ON_GPU],
                cwd=folder,
                env=_environment(k, port, devices=2),
                stdout=said,
                stderr=said,
            )
            for k, fault in enumerate(faults)
        ]
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    assert codes[lost] == -signal.SIGKILL, (folder / "reported.txt").read_text()
    assert codes[1 - lost] == 1, (folder / "reported.txt").read_text()
    (line,) = last_words(folder)
    assert f"rank {lost}" in line
    assert "ended" in line
    assert torch.load(folder / "model.ckpt.pt", weights_only=True)["step"] == SAVE_EVERY


def _environment(rank, port, devices=1):
    path = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return (
        os.environ
        | launcher_environment(rank, 2, port)
        | {"PRETEND_CUDA_DEVICES": str(devices), "PYTHONPATH": path}
    )
