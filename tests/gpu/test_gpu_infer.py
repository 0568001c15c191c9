"""Inference, tests, changed biases and posthoc averages of trained models on a CUDA device, beside
the CPU.
"""

import re

import numpy as np
import pytest
import torch
from helpers import toy_frame, write_system
from infer_models import write_run
from kept_runs import write_kept_run
from toy_models import SECTIONS

from deepmd_ema import cli
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.commands.posthoc.run import run_posthoc
from deepmd_ema.data import loader
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential

pytestmark = pytest.mark.gpu

SAME_MATH = {"rtol": 1e-11, "atol": 1e-11}
KINDS = ("se_e2_a", "se_atten", "dpa3")
RESULTS = ("energy", "force", "virial", "atom_energy")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Periodic, open and mixed systems."""
    root = tmp_path_factory.mktemp("data")
    write_system(root / "cell", frames=4, natoms=8, seed=1, sets=2, atom_ener=True)
    write_system(root / "open", frames=3, natoms=5, seed=2, pbc=False)
    write_system(root / "mixed", frames=3, natoms=6, seed=3, mixed=True, virtual=2)
    return root


def both(function):
    """Return the results of ``function`` for the CPU and for the GPU."""
    return function("cpu"), function("cuda")


def assert_results(found, expected):
    for name in RESULTS:
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), **SAME_MATH, err_msg=name
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [16, 1024])
def test_a_potential_on_a_gpu_has_the_results_of_the_cpu(
    tmp_path, monkeypatch, kind, at_once
):
    """Also of frames that do not fit into one batch."""
    monkeypatch.setitem(loader.ATOMS_AT_ONCE, "cuda", at_once)
    section = SECTIONS[kind] | ({"sel": [30, 30]} if kind == "se_e2_a" else {})
    path, _ = write_run(tmp_path, model__descriptor=section)
    cpu, gpu = both(lambda device: Potential(path, device=device))
    assert gpu.device == torch.device("cuda", 0)
    rng = np.random.default_rng(3)
    for pbc in (True, False):
        made = [toy_frame(rng, 12, pbc=pbc) for _ in range(3)]
        frames = (
            np.stack([m[0] for m in made]),
            made[0][1],
            np.stack([m[2] for m in made]) if pbc else None,
        )
        assert_results(gpu.evaluate(*frames), cpu.evaluate(*frames))


@pytest.mark.parametrize("skin", [0.0, 1.0])
def test_systems_of_torch_sim_have_the_results_of_the_cpu(run, skin):
    ase, ts = pytest.importorskip("ase"), pytest.importorskip("torch_sim")
    from deepmd_ema.torch_sim import DPModel

    systems = []
    for natoms in (12, 5, 1):
        coord, types, box = toy_frame(np.random.default_rng(natoms), natoms)
        systems.append(ase.Atoms(["OH"[t] for t in types], coord, cell=box, pbc=True))

    def evaluated(device):
        model = DPModel(run[0], device=device, skin=skin)
        return model(ts.io.atoms_to_state(systems, model.device, torch.float64))

    cpu, gpu = both(evaluated)
    assert {"energy", "forces", "stress"} <= gpu.keys() == cpu.keys()
    for name, value in gpu.items():
        assert value.is_cuda, name
        torch.testing.assert_close(value.cpu(), cpu[name], **SAME_MATH)


def test_errors_on_labelled_data_are_those_of_the_cpu(run, data, capsys):
    cpu, gpu = both(lambda device: measure(run[0], [data], device=device))
    assert len(gpu.frames) == len(cpu.frames) == 10
    expected = cpu.total.summary()
    for name, value in gpu.total.summary().items():
        assert value == pytest.approx(expected[name], rel=1e-9, nan_ok=True), name
    assert (
        cli.main(["test", "-m", str(run[0]), "-s", str(data), "--device", "cuda"]) == 0
    )
    printed = re.findall(r"Force  RMSE *: (\S+)", capsys.readouterr().out)
    assert float(printed[-1]) == pytest.approx(expected["rmse_f"], rel=1e-5)


def test_posthoc_averages_are_ranked_as_on_the_cpu(tmp_path, water_like_valid):
    kept = write_kept_run(tmp_path / "run", [water_like_valid])

    def ranked(device):
        files = {
            "output": tmp_path / f"{device}.pt",
            "plot": tmp_path / f"{device}.png",
        }
        report = run_posthoc(
            kept,
            ["0.06", "0.07"],
            table=tmp_path / f"{device}.csv",
            device=device,
            say=str,
            **files,
        )
        return report, load_model(files["output"]).model.state_dict()

    (cpu, weights), (gpu, found) = both(ranked)
    assert gpu.chosen.name == cpu.chosen.name
    assert gpu.chosen.errors.metric("F:RMSE") == pytest.approx(
        cpu.chosen.errors.metric("F:RMSE"), rel=1e-9
    )
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, **SAME_MATH)


@pytest.mark.real_gpu("AOTInductor for CUDA")
@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.timeout(600)
def test_a_pt2_that_is_frozen_for_a_gpu_has_the_results_of_its_checkpoint(tmp_path):
    path, _ = write_run(tmp_path)
    freeze(load_model(path), tmp_path / "model.pt2", device="cuda")
    compiled, plain = (
        Potential(file, device="cuda") for file in (tmp_path / "model.pt2", path)
    )
    frames = [toy_frame(np.random.default_rng(3), natoms) for natoms in (12, 5)]
    for frame in frames:
        found, expected = compiled.evaluate(*frame), plain.evaluate(*frame)
        for name in RESULTS:
            np.testing.assert_allclose(
                getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-10
            )
