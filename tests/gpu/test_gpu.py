"""The same runs on a CUDA device: exact restarts, numbers of the CPU, no wait inside a step."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import assert_same, tiny_input
from training_runs import WITH_AVERAGES, StopAfter, load

from deepmd_ema.errors import Interrupted
from deepmd_ema.training.run import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid, mixed_like):
    """Return a function that trains on the GPU in a folder of its own."""

    def run(name, num_steps=20, options=None, device="cuda", **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        config = tiny_input(
            [water_like, mixed_like],
            [water_like_valid],
            num_steps=num_steps,
            **{**WITH_AVERAGES, **(options or {})},
        )
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", device=device, **how)
        return folder

    return run


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_restart_on_a_gpu_continues_to_the_last_bit(start, precision):
    options = {
        "model__descriptor__precision": precision,
        "model__fitting_net__precision": precision,
    }
    whole = start("whole", 20, options)
    with pytest.raises(Interrupted, match="SIGTERM"):
        start("parts", 20, options, callback=StopAfter(7))
    parts = start("parts", 20, options, restart="model.ckpt.pt")
    assert_same(load(whole / "model.ckpt-20.pt"), load(parts / "model.ckpt-20.pt"))
    for name in ("lcurve.out", "val.log", "val_ema.log"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


@pytest.mark.real_gpu("products in TF32")
def test_tf32_rounds_training_steps_and_nothing_else(start):
    options = {
        "model__descriptor__precision": "float32",
        "model__fitting_net__precision": "float32",
    }
    options["model__fitting_net__neuron"] = [
        64,
        64,
    ]  # for matrices of 8 x 8 cuBLAS may choose a kernel without TF32
    exact = load(start("exact", 5, options) / "model.ckpt-5.pt")["model"]
    rounded = load(
        start("rounded", 5, {**options, "training__enable_tf32": True})
        / "model.ckpt-5.pt"
    )["model"]
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)
    assert all(
        torch.allclose(exact[name], rounded[name], rtol=1e-2, atol=1e-2)
        for name in exact
    )
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_talk_through_nccl_train_to_the_numbers_of_one_process(
    start, tmp_path, stage
):
    ranks = min(2, torch.cuda.device_count())
    alone = start("alone", 20, {"training__training_data__batch_size": 2 * ranks})
    folder = tmp_path / "ranks"
    folder.mkdir()
    config = json.loads((alone / "input.json").read_text())
    config["training"] |= {"zero_stage": stage}
    config["training"]["training_data"]["batch_size"] = 2
    (folder / "input.json").write_text(json.dumps(config))
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
    ]
    done = subprocess.run(
        [*launcher, "-m", "deepmd_ema", "train", "input.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("model.ckpt-20.pt", "model_ema.ckpt-20.pt"):
        a, b = load(alone / name)["model"], load(folder / name)["model"]
        assert all(torch.allclose(a[n], b[n], rtol=1e-7, atol=1e-9) for n in a), name


@pytest.mark.real_gpu("Triton")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "reduce-overhead", "dynamic": False}],
    ids=["default", "CUDA graphs"],
)
def test_compiled_code_trains_to_the_numbers_of_eager_steps(start, tmp_path, options):
    compiled = {"training__enable_compile": True, "training__compile_options": options}
    eager, whole = start("eager", 6), start("compiled", 6, compiled)
    a, b = (
        load(eager / "model.ckpt-6.pt")["model"],
        load(whole / "model.ckpt-6.pt")["model"],
    )
    assert all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-10) for name in a)


def test_copies_of_a_step_hold_that_step_while_the_device_continues():
    from deepmd_ema.distributed.tensors import HostCopies

    weights = torch.arange(1 << 20, device="cuda", dtype=torch.float64)
    expected, copies = weights.cpu(), HostCopies()
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 64
    copy = copies(weights)
    weights.zero_()  # as the next step does
    assert copy.is_pinned()
    copies.arrival()()
    assert torch.equal(copy, expected)
