"""Potentials that are copied, pickled, used by threads and processes, and inside of modes of torch."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import write_run
from toy_models import TRICLINIC, toy_atoms, toy_model

from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.tabulated import interpolations_of

NATOMS = 12
SINGLE = {"model__descriptor__precision": "float32", "model__fitting_net__precision": "float32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), model__descriptor__interpolate="always", **SINGLE)[0]


@pytest.fixture(scope="module")
def frames():
    rng = np.random.default_rng(3)
    return [toy_frame(rng, NATOMS) for _ in range(3)]


def same(one, two, atol=0.0):
    for name, value in vars(one).items():
        np.testing.assert_allclose(getattr(two, name), value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
@pytest.mark.parametrize("descriptor", ["se_e2_a", "dpa2"])
def test_a_potential_that_was_used_can_be_copied(descriptor, make):
    """Neither could be pickled, and tables that dpa2 makes inside torch.func could not be copied."""
    config, model = toy_model(descriptor, {"interpolate": "always"})
    potential, kept = Potential(LoadedModel(model, config, Provenance("toy", "frozen")), device="cpu"), KeptPairs(1.0)
    frame = (*toy_atoms(0, 9), TRICLINIC)
    known = potential.evaluate(*frame, kept=kept)
    assert all(interpolation.tables.made for interpolation in interpolations_of(model).values())
    made = make(potential)
    same(made.evaluate(*frame, kept=make(kept)), known)
    made._model.out_bias.add_(1.0)
    same(potential.evaluate(*frame, kept=kept), known)


MODES = {
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "default_device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_nothing(path, frames, mode):
    outside = Potential(path, device="cpu")
    known = outside.evaluate(*frames[0])
    with MODES[mode]():
        inside = Potential(path, device="cpu")
        same(inside.evaluate(*frames[0]), known)
        same(outside.evaluate(*frames[0]), known)
    same(inside.evaluate(*frames[0]), known)


@pytest.mark.parametrize("interpolate", ["always", "never"])
def test_four_threads_with_one_potential_get_the_numbers_of_one(interpolate):
    config, model = toy_model("se_e2_a", {"interpolate": interpolate})
    loaded = LoadedModel(model, config, Provenance("toy", "frozen"))
    systems = [
        [(coord + 0.01 * step, types, TRICLINIC) for step in range(8)] for coord, types in map(toy_atoms, range(4))
    ]
    known = [
        [Potential(copy.deepcopy(loaded), device="cpu").evaluate(*frame) for frame in of_one] for of_one in systems
    ]
    shared, begin = Potential(loaded, device="cpu"), threading.Barrier(4)

    def evaluate(frames):
        kept = KeptPairs(1.0)
        begin.wait()  # together, also where the first call prepares something
        return [(shared.evaluate(*frame), shared.evaluate(*frame, kept=kept)) for frame in frames]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evaluate, systems))
    for expected, of_thread in zip(known, found):
        for one, both in zip(expected, of_thread):
            for prediction in both:
                same(one, prediction, atol=1e-10)


FORKED = """
import os, sys, numpy, torch
from deepmd_ema.infer.potential import Potential
torch.set_num_threads(2)
potential = Potential(sys.argv[1], device="cpu")
coord, types = numpy.random.default_rng(0).uniform(0, 9, (300, 3)), [0, 1] * 150
known = potential.evaluate(coord, types, 10 * numpy.eye(3)).energy
torch.randn(1000, 1000).matmul(torch.randn(1000, 1000)).tanh().sum()
child = os.fork()
if child == 0:
    found = potential.evaluate(coord, types, 10 * numpy.eye(3)).energy
    os._exit(0 if abs(found - known).max() < 1e-2 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_forks_evaluates_with_one_thread(path):
    """It waited for threads that only its parent has."""
    done = subprocess.run([sys.executable, "-c", FORKED, path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "torch computes with one thread here. Start processes with" in done.stderr
