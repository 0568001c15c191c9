"""Training on 2 and 3 processes: every stage gives what one process gives, and continues the run of
any other.
"""

from functools import cache

import numpy as np
import pytest
from helpers import (
    assert_same,
    assert_same_files,
    write_system,
)
from parallel_cases import (
    BANK,
    HESSIANS,
    LOSSES,
    MESSAGES,
    STAGES,
    STEPS,
    WITH_BANK,
    assert_same_run,
    config_of,
)
from parallel_runs import train
from training_runs import load

pytestmark = pytest.mark.timeout(480)

# the frames of a step are of one system: one that has oxygen only in every other frame, or whose
# last batch has fewer frames than there are ranks, or no virials
MIXED = {
    "model__data_stat_nbatch": 1,
    "model__fitting_net__neuron": [7, 7],
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "training__gradient_max_norm": 0.5,
    "training__disp_avg": True,
    "training__change_bias_after_training": True,
    "training__numb_epoch": 2,
}


OPTIMIZED = {
    "model__fitting_net__neuron": [7, 7],
    "training__enable_ema": True,
    "training__gradient_max_norm": 0.5,
    "training__save_freq": 4,
}
GROUPS = [
    {"pattern": "fitting.*.bias", "lr_scale": 3, "weight_decay": 0},
    {"pattern": "descriptor.*", "lr_scale": 0.1},
]
OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.05, "groups": GROUPS},  # with steps of several batches
    "AdaMuon": {},
    "HybridMuon": {"enable_gram": False},
    "AdamWScheduleFree": {},
    "SOAP": {"precondition_frequency": 3},
}
# kind of a run -> steps, systems, options
KINDS = {
    "bank": (STEPS, ["water_like"], WITH_BANK),
    "mixed": (None, ["water_like", "odd", "lone"], MIXED),
    **{
        kind: (6, ["odd", "water_like"], options)
        for kind, options in {
            **LOSSES,
            "hessian": HESSIANS,
            "messages": MESSAGES,
        }.items()
    },
    **{
        kind: (8, ["water_like"], {**OPTIMIZED, "optimizer": {"type": kind, **options}})
        for kind, options in OPTIMIZERS.items()
    },
    "AdamW": (
        8,
        ["water_like", "open_like", "mixed_like"],
        {
            **OPTIMIZED,
            "optimizer": {"type": "AdamW", **OPTIMIZERS["AdamW"]},
            "training__accumulate": 3,
        },
    ),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Frames of 10 atoms: all kinds in the even ones, oxygen alone in the odd ones."""
    system = write_system(
        tmp_path_factory.mktemp("data") / "odd",
        frames=10,
        natoms=10,
        seed=6,
        mixed=True,
        atom_ener=True,
        hessian=True,
    )
    file = system / "set.000" / "real_atom_types.npy"
    types = np.load(file)
    types[1::2] = 0
    np.save(file, types)
    return system


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """8 open frames: 2 are left for the last batch, of which a third rank only repeats one."""
    return write_system(
        tmp_path_factory.mktemp("data") / "lone", frames=8, natoms=7, seed=3, pbc=False
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, request, water_like_valid):
    """Return a function that gives the folder of a run and what its ranks held: run(kind, stage,
    ranks).

    With an ``origin``, (stage, ranks), it is restarted from the middle of another run of this kind.
    """
    base = tmp_path_factory.mktemp("parallel")

    @cache
    def made(kind, stage, ranks, origin=None, num_steps=None):
        folder, (steps, names, options) = (
            base / f"{kind}-{stage}-{ranks}-{origin}-{num_steps}",
            KINDS[kind],
        )
        systems = [request.getfixturevalue(name) for name in names]
        config = config_of(
            systems, water_like_valid, stage, ranks, options, num_steps or steps
        )
        if kind == "AdamW":
            config["training"]["training_data"]["batch_size"] = f"mixed:{4 // ranks}"
        how = {}
        if origin is not None:
            is_other = origin != (stage, ranks) or num_steps is not None
            how = {
                "restart": f"model.ckpt-{steps // 2}.pt",
                "allow_config_change": is_other,
            }
        ended = train(
            folder, ranks, config, origin=origin and made(kind, *origin)[0], **how
        )
        return folder, [end.value for end in ended]

    return made


@pytest.mark.parametrize(
    ("stage", "ranks"), [(0, 3), (1, 3), (2, 3), (3, 3), (1, 2), (3, 2)]
)
def test_F4_every_stage_follows_one_process_with_all_the_frames(run, stage, ranks):
    folder, _ = run("bank", stage, ranks)
    assert_same_run(folder, run("bank", 0, 1)[0])
    assert_same_run(folder, run("bank", 0, ranks)[0], tolerance=1e-12)
    names = {path.name for path in folder.iterdir()}
    assert {
        "val.log",
        "val_ema.log",
        "val_slow.log",
        "lcurve_slow.out",
        "model_whole.ckpt-20.pt",
        "snapshots",
    } <= names


@pytest.mark.parametrize(("stage", "ranks"), [(0, 3), (3, 2), (3, 3)])
def test_uneven_batches_missing_elements_clipping_and_bias_follow_one_process(
    run, stage, ranks
):
    folder, _ = run("mixed", stage, ranks)
    assert_same_run(folder, run("mixed", 0, 1)[0])
    file = load(folder / "model.ckpt.pt")
    assert file["refitted"].keys() == {"live", "ema"}
    assert (
        file["step"] == 2 * 7
    )  # 3 batches of water, 2 of the odd frames, 2 of the open ones


@pytest.mark.parametrize(
    ("kind", "stage"),
    [*((kind, 3) for kind in LOSSES), ("hessian", 1), ("messages", 2), ("messages", 3)],
)
def test_losses_hessians_frozen_parts_and_messages_follow_one_process(run, kind, stage):
    assert_same_run(run(kind, stage, 2)[0], run(kind, 0, 1)[0])


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_hold_the_parts_that_are_promised_agree_on_the_rest_and_take_part_in_everything(
    run, stage
):
    _, held = run("bank", stage, 3)
    count = run("bank", 0, 2)[1][0]["elements"]["live"]
    for name in held[0]["elements"]:
        parts = [h["elements"][name] for h in held]
        if stage > 1 and name != "whole":  # the layout of `whole` is full_tensor
            assert sum(parts) == count
            assert max(parts) < count * 2 / 3
        else:
            assert parts == [count] * 3
            assert len({h["digests"][name] for h in held}) == 1
    assert held[0]["counts"]["validated", "slow"] == STEPS // 5
    assert held[0]["counts"]["written", "flat"] == 2
    assert held[0]["facts"]["whole"]["decay"] == pytest.approx(
        0.5 ** (16 / 3 / 24)
    )  # 16 frames in 3 steps
    assert all(
        h["counts"] == held[0]["counts"] and h["facts"] == held[0]["facts"]
        for h in held
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_optimizer_follows_one_process_with_all_the_frames(run, kind, stage):
    assert_same_run(
        run(kind, stage, 2)[0], run(kind, 0, 1)[0], 1e-6
    )  # moments of Adam beside Muon are in float32


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_continues_at_another_stage_with_the_state_of_its_optimizer(run, kind):
    assert_same_run(run(kind, 3, 2, (1, 2))[0], run(kind, 0, 1)[0], 1e-6)


def test_the_kalman_filter_is_refused_on_several_processes(
    tmp_path, water_like, water_like_valid
):
    options = {
        "optimizer": {"type": "LKF"},
        "loss__start_pref_v": 0,
        "loss__limit_pref_v": 0,
    }
    ended = train(
        tmp_path,
        2,
        config_of([water_like], water_like_valid, 0, 2, options),
        may_fail=True,
    )
    first, second = sorted(ended, key=lambda end: end.error)
    assert (first.error, second.error) == ("ConfigError", "ReportedElsewhere")
    assert (
        'optimizer.type = "LKF": trains in one process only, and 2 were launched'
        in first.message
    )
    assert not list(tmp_path.glob("*.pt"))


OTHER = [
    ((0, 2), (3, 3)),
    ((3, 3), (0, 1)),
    ((2, 2), (1, 3)),
    ((1, 2), (2, 2)),
]  # (stage, ranks)


@pytest.mark.parametrize("place", [(0, 2), (1, 2), (2, 2), (3, 3)], ids=str)
def test_a_restart_on_the_same_ranks_continues_to_the_last_bit(run, place):
    names = assert_same_files(run("bank", *place)[0], run("bank", *place, place)[0])
    assert {
        "lcurve_slow.out",
        "val_p05.log",
        "snapshots/model_p05.ckpt-20.pt",
        "model_whole.ckpt-20.pt",
    } <= names


@pytest.mark.parametrize(("origin", "place"), OTHER, ids=str)
def test_a_checkpoint_is_the_same_bits_after_loading_at_another_stage_on_other_ranks(
    run, origin, place
):
    (before, _), (after, _) = (
        run("bank", *origin),
        run("bank", *place, origin, STEPS // 2),
    )
    for name in ("model", "model_ema", *(f"model_{entry['name']}" for entry in BANK)):
        old, new = (
            load(folder / f"{name}.ckpt-{STEPS // 2}.pt") for folder in (before, after)
        )
        for part in (
            "config",
            "num_steps",
            "digest",
        ):  # the digest is of the other two as well
            del old[part], new[part]
        assert_same(old, new, name)


@pytest.mark.parametrize(("origin", "place"), OTHER[:3], ids=str)
def test_a_run_continues_at_another_stage_on_other_ranks(run, origin, place):
    assert_same_run(run("bank", *place, origin)[0], run("bank", *place)[0])
