"""Runs on a CUDA device beside the CPU: optimizers, averages, losses, several tasks, validation,
exact restarts.
"""

import itertools
import json
import shutil

import pytest
from helpers import assert_same_files, changed, tiny_input, write_system
from lkf_cases import KINDS, NO_VIRIAL
from parallel_cases import HESSIANS, LOSSES, MESSAGES, VALIDATED, assert_same_run
from two_tasks import input_of_two_tasks, write_data

from deepmd_ema.training.run import run_training

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS, HALF = 8, 4
# all best files stay, so that a restart from the middle finds those of its time
COMMON = {
    "training__save_freq": HALF,
    "training__disp_freq": 2,
    "validating__max_best_ckpt": 9,
    **VALIDATED,
}
OPTIMIZERS = {
    "Adam": {"type": "Adam"},
    "AdamW": {"type": "AdamW", "weight_decay": 0.01},
    "HybridMuon in bfloat16": {"type": "HybridMuon", "enable_gram": False},
    **KINDS,
}
# of the largest number of a tensor, after all steps: rates of Adam on CUDA are in float32
ROUNDING = 1e-7
# directions of Muon are in bfloat16 or, by Gram matrices on CUDA, in float16; a CPU has float32
# there
IN_HALF = {"AdaMuon": 1e-4, "HybridMuon in bfloat16": 1e-4, "HybridMuon": 1e-3}
# bases of SOAP turn with rounding where gradients are almost 0
IN_TURNED_BASES = {"SOAP": 1e-5}
SETTINGS = {
    "device": ("live", "cpu"),
    "layout": ("local_shard", "full_tensor"),
    "dtype": ("float64", "float32"),
}
BUFFERS = ("copy", "average")
AVERAGES = [
    {
        "name": f"average{k}",
        "decay": 0.9,
        "buffers": BUFFERS[k % 2],
        **dict(zip(SETTINGS, chosen)),
    }
    for k, chosen in enumerate(itertools.product(*SETTINGS.values()))
]
BANK = [
    *({**average, "full_validation": True, "lcurve": True} for average in AVERAGES),
    {
        "name": "power",
        "type": "power",
        "sigma_rel": 0.1,
        "snapshots": True,
        "snapshot_freq": 3,
    },
    {
        "name": "equal",
        "type": "swa",
        "start_step": 3,
        "update_every": 2,
        "device": "cpu",
    },
]

RUNS = {
    **LOSSES,
    "hessian": HESSIANS,
    "clipped, displayed on average": {
        "training__gradient_max_norm": 0.5,
        "training__disp_avg": True,
    },
    "three batches a step": {
        "training__accumulate": 3,
        "training__averaging": [{**AVERAGES[0], "lcurve": True}],
    },
    "bias fitted at the end": {"training__change_bias_after_training": True},
    "messages and a table": {
        name: value for name, value in MESSAGES.items() if name.startswith("model")
    },
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that trains on an input in a folder of its own: run(name, config,
    **how).
    """

    def trained(name, config, device="cuda", **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", device=device, **how)
        return folder

    return trained


@pytest.fixture
def check(run, tmp_path):
    """Return a function that asserts that a run on the GPU is that of the CPU and restarts to the
    last bit.
    """

    def checked(config, tolerance=ROUNDING):
        whole = run("gpu", config)
        assert_same_run(run("cpu", config, device="cpu"), whole, tolerance)
        shutil.copytree(whole, tmp_path / "parts", symlinks=True)
        return whole, assert_same_files(
            whole, run("parts", config, restart=f"model.ckpt-{HALF}.pt")
        )

    return checked


@pytest.fixture(scope="module")
def all_labels(tmp_path_factory):
    """A system with every label."""
    folder = tmp_path_factory.mktemp("data") / "labels"
    return write_system(
        folder,
        frames=5,
        natoms=6,
        seed=6,
        mixed=True,
        atom_ener=True,
        atom_pref=True,
        hessian=True,
    )


@pytest.fixture
def config_of(water_like, mixed_like, water_like_valid):
    """Return a function that makes an input from its options."""

    def made(**options):
        return tiny_input(
            [water_like, mixed_like],
            [water_like_valid],
            num_steps=STEPS,
            **COMMON,
            **options,
        )

    return made


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_takes_the_steps_of_the_cpu_and_restarts_to_the_last_bit(
    check, config_of, kind
):
    check(
        config_of(optimizer=OPTIMIZERS[kind], **NO_VIRIAL),
        (IN_HALF | IN_TURNED_BASES).get(kind, ROUNDING),
    )


def test_averages_of_every_device_layout_and_precision_are_those_of_the_cpu(
    check, config_of
):
    _, files = check(config_of(training__averaging=BANK))
    assert {f"model_{average['name']}.ckpt-{STEPS}.pt" for average in BANK} <= files
    assert {
        "val_average7.log",
        "lcurve_average0.out",
        "snapshots/model_power.ckpt-6.pt",
    } <= files


@pytest.mark.parametrize("name", RUNS)
def test_every_loss_and_kind_of_model_trains_as_on_the_cpu(check, all_labels, name):
    config = tiny_input(
        [all_labels],
        [all_labels],
        num_steps=STEPS,
        **COMMON,
        training__enable_ema=True,
        **RUNS[name],
    )
    whole, _ = check(config)
    assert ("rmse_h_trn" in (whole / "lcurve.out").read_text()) == (name == "hessian")


def test_several_tasks_train_as_on_the_cpu(check, tmp_path):
    config = input_of_two_tasks(write_data(tmp_path / "data"), num_steps=STEPS)
    _, files = check(changed(config, COMMON))
    assert {"val_water.log", "val_salt_slow.log"} <= files
