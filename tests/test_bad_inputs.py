"""A sample of generated bad inputs, and single ones that were once reported as a bug or that misled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_inputs import GOOD, sit_down, write_systems
from bad_inputs.case import sample
from bad_inputs.families import all_cases
from bad_inputs.families.text import bomb

FAMILIES = (
    "options",
    "text",
    "paths",
    "data",
    "HDF5",
    "data of others",
    "files",
    "checkpoints",
    "frozen models",
    "commands",
    "machine",
)
SAMPLE, SEED = 150, 20


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    return write_systems(tmp_path_factory.mktemp("systems"))


@pytest.fixture
def desk(tmp_path, systems, monkeypatch, capsys):
    return sit_down(tmp_path, systems, monkeypatch, capsys)


def test_there_are_bad_inputs_of_every_family():
    cases = all_cases()
    assert tuple(dict.fromkeys(case.family for case in cases)) == FAMILIES
    assert min(sum(case.family == family for case in cases) for family in FAMILIES) > 50
    assert {case.family for case in sample(cases, SAMPLE, SEED)} == set(FAMILIES)


@pytest.mark.timeout(300)
def test_a_sample_of_bad_inputs_is_answered_right():
    """A process of its own: each case is a fork of it, with limits of time and memory."""
    folder = Path(__file__).parent / "bad_inputs"
    words = [sys.executable, str(folder), "--sample", str(SAMPLE), "--seed", str(SEED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +all +\d\d\d ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("merge", [False, True])
def test_anchors_that_multiply_are_refused_at_once(desk, merge):
    Path("input.yaml").write_text(bomb(12, merge))
    began = time.process_time()
    desk.run("check", "input.yaml").must_say(
        "input.yaml: anchors that expand to more than 100,000 values: this is no input."
    )
    assert time.process_time() - began < 5  # all memory or for ever, if they are not refused; some ms if they are


@pytest.mark.parametrize(
    ("env", "phrase"),
    [
        ({"LOCAL_RANK": "²"}, "LOCAL_RANK = '²': expected a whole number, "),
        ({"LOCAL_RANK": "9" * 5000}, "9'... (5,000 characters): expected a whole number, "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': expected a whole number, 1 to "),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT = 'x': expected a whole number, "),
        (
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "99999"},
            "MASTER_PORT = '99999': expected a whole number, 1 to 65535",
        ),
    ],
)
def test_ranks_and_ports_that_are_no_numbers_are_reported(desk, monkeypatch, env, phrase):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    desk.run("check", "input.json", "--config-only").must_say(phrase)


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        (
            {"model__descriptor__sel": [10**12, 40]},
            "sel = [1000000000000, 40]: expected a list with one whole number per",
        ),
        ({"model__descriptor__sel": "auto:1e9"}, 'sel = "auto:1e9": expected a list'),
        (
            {"model__descriptor__neuron": [10**12]},
            "neuron = [1000000000000]: expected a list of at least one whole number > 0",
        ),
        ({"model__fitting_net__neuron": [10**12]}, "none above 100,000."),
        ({"model__fitting_net__numb_fparam": 10**12}, "numb_fparam = 1000000000000: expected a whole number from 0 to"),
        ({"training__training_data__rglob_patterns": ["/abs*"]}, "none of them beginning with /."),
        ({"training__training_data__rglob_patterns": [""]}, "expected patterns of paths below the folders"),
        ({"training__training_data__rglob_patterns": ["a**"]}, "expected patterns of paths below the folders"),
        ({"training__training_data__systems": ["a\0b"]}, "expected a text without the characters"),
        ({"training__save_ckpt": "\ud800"}, "expected a text without the characters"),
    ],
)
def test_sizes_and_texts_that_nothing_can_hold_are_reported(desk, changes, phrase):
    desk.write(**changes)
    desk.run("check", "input.json", "--config-only").must_say(phrase)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                     "tried to allocate 8000000000000 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("Resource temporarily unavailable"),
        ImportError("_backend_agg.so: failed to map segment from shared object"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    ],
)  # fmt: skip
def test_lack_of_memory_is_reported_with_what_to_do(desk, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("deepmd_ema.cli.inputs.check", fail)
    reported = desk.run("check", "input.json")
    reported.must_say("dp-ema: out of memory", "Use a smaller batch_size")
    assert "8000000000000 bytes" in reported.text or "8000000000000" not in str(error)


@pytest.mark.parametrize(
    "words", ["test -m m.pt -n -5", "test -m m.pt -n x", "change-bias m.pt -n ²", "test -m m.pt -n 1.5"]
)
def test_a_number_of_frames_is_a_number(desk, words):
    desk.run(*words.split()).must_say("expected a number of frames, 0 for all")


@pytest.mark.parametrize(
    "words", ["freeze -o", "plot val.log -o", "train input.json -o", "test --plot", "train input.json -l"]
)
def test_an_empty_name_of_an_output_is_refused(desk, words):
    desk.run(*words.split(), "").must_say("'': expected the name of a file")


def test_advice_names_the_input_as_it_is_called(desk):
    desk.write(training__zero_stage=1)
    Path("input.json").rename("water.json")
    advice = "export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 dp-ema train water.json"
    desk.run("train", "water.json", "--device", "cpu").must_say(advice, code=GOOD)


def test_the_end_of_a_run_names_its_files_and_the_next_command(desk):
    desk.write(
        validating__full_validation=True, validating__ema_full_validation=True, validating__validation_freq=2,
        validating__full_val_start=0.0,
    )  # fmt: skip
    reported = desk.train()
    reported.must_say(
        "trained model: model.ckpt.pt\n",
        "averaged  model_ema.ckpt.pt (ema)",
        "best      best.ckpt-2.t-1.pt (live, E:MAE = ",
        "errors    ema, step 2, MAE / RMSE: E ",
        "for 2 steps, validation included",
        "next      dp-ema test -m model_ema.ckpt.pt --valid-data input.json --plot",
        "dp-ema freeze -c model_ema.ckpt.pt",
        code=GOOD,
    )
    for line in re.findall(r"dp-ema ((?:test|freeze) .*)", reported.text):
        assert desk.run(*line.split()).code == GOOD


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["type.raw", "set.000/force.npy", "set.000/coord.npy"])
def test_a_pipe_among_the_data_is_reported_and_not_waited_for(desk, name):
    file = Path("data", name)
    file.unlink()
    os.mkfifo(file)
    desk.run("check", "input.json").must_say(f"data/{name}: is a pipe or a device, expected a file.")
