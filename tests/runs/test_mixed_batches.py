"""Training on batches of frames of several systems: the same numbers, gradients, restarts, ranks,
tasks, LMDB.
"""

import pytest
from helpers import assert_same, tiny_input, trains_in, write_system
from parallel_cases import assert_same_run
from parallel_runs import train as train_on_ranks
from training_runs import StopAfter, load

from deepmd_ema.errors import Interrupted

pytestmark = pytest.mark.timeout(300)

RULES = ("mixed:3", "mix:30")
DP_GEN = "prob_sys_size; 0:2:0.9; 2:3:0.1"  # as DP-GEN writes it
VALIDATED = {
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "training__save_freq": 100,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 6,
    "validating__full_val_start": 0,
}


@pytest.fixture(scope="module")
def atomic(tmp_path_factory):
    """6 frames of 9 atoms with atomic energies."""
    return write_system(
        tmp_path_factory.mktemp("data") / "atomic",
        frames=6,
        natoms=9,
        seed=8,
        atom_ener=True,
    )


@pytest.fixture
def systems(water_like, open_like, atomic):
    """Systems of 12, 7 and 9 atoms: the second has no virials, only the third has atomic
    energies.
    """
    return [water_like, open_like, atomic]


@pytest.fixture
def start(tmp_path, monkeypatch, systems):
    return trains_in(tmp_path, monkeypatch, (systems, systems[:2]), VALIDATED)


def with_rule(rule, **more):
    sections = (
        "training__training_data__batch_size",
        "training__validation_data__batch_size",
    )
    return {**dict.fromkeys(sections, rule), **more}


@pytest.mark.parametrize("rule", ["mixed:3", "mix:38"])  # 12 atoms a frame
def test_mixed_batches_of_one_system_train_to_the_same_bits_as_batches_of_that_size(
    tmp_path, monkeypatch, water_like, rule
):
    start = trains_in(tmp_path, monkeypatch, ([water_like], [water_like]), VALIDATED)
    plain, mixed = start("plain", 14, with_rule(3)), start("mixed", 14, with_rule(rule))
    for name in ("lcurve.out", "val.log", "val_ema.log"):
        assert (plain / name).read_bytes() == (mixed / name).read_bytes()
    assert_same(
        load(plain / "model.ckpt.pt")["model"], load(mixed / "model.ckpt.pt")["model"]
    )


@pytest.mark.parametrize("auto_prob", ["prob_sys_size", DP_GEN])
@pytest.mark.parametrize("rule", RULES)
def test_a_restart_continues_to_the_last_bit(start, rule, auto_prob):
    options = with_rule(
        rule, training__training_data__auto_prob=auto_prob, loss__start_pref_ae=1
    )
    whole = start("whole", 16, options)
    for at in (5, 12):
        with pytest.raises(Interrupted, match=f"after step {at} of 16"):
            start(f"parts{at}", 16, options, callback=StopAfter(at))
        parts = start(f"parts{at}", 16, options, restart="model.ckpt.pt")
        for name in ("model", "model_ema"):
            assert_same(
                load(whole / f"{name}.ckpt-16.pt"), load(parts / f"{name}.ckpt-16.pt")
            )
        for name in ("lcurve.out", "val.log", "val_ema.log"):
            assert (whole / name).read_bytes() == (parts / name).read_bytes()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_follow_one_process_with_a_batch_of_all_their_frames(
    tmp_path, monkeypatch, systems, stage
):
    start = trains_in(tmp_path, monkeypatch, (systems, systems), VALIDATED)
    alone = start("alone", 9, with_rule("mixed:4"))
    config = tiny_input(
        systems,
        systems,
        num_steps=9,
        **VALIDATED,
        **with_rule("mixed:2", training__zero_stage=stage),
    )
    train_on_ranks(tmp_path / "ranks", 2, config)
    assert_same_run(alone, tmp_path / "ranks")
