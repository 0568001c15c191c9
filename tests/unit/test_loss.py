"""The ener loss: DeePMD-kit's numbers, frames with and without labels, weights that move with the
learning rate.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from flat_batches import COMPARED, flat_batch, predicted, random_frame
from loss_cases import ALL

from deepmd_ema.config.labels import LABELS
from deepmd_ema.config.schema.optim import EnerLossConfig as Config
from deepmd_ema.distributed.world import World
from deepmd_ema.training.loss import EnergyLoss

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "loss.json").read_text())
SAME_MATH = 1e-12


def golden_frames(kind, missing=""):
    """Return the frames of the golden file with their labels or the predictions."""
    number = len(GOLDEN[kind]["energy"])
    frames = []
    for k in range(number):
        frame = {"types": np.array([1, 0, 0, 1, 0]), "box": np.eye(3)}
        for name in ("energy", "force", "virial", "atom_energy"):
            frame[name] = np.array(GOLDEN[kind][name][k])
        frame |= {
            "energy": frame["energy"][0],
            "atom_energy": frame["atom_energy"][:, 0],
        }
        frame["atom_pref"] = np.array(GOLDEN["weight"][k])
        frames.append({name: value for name, value in frame.items() if name != missing})
    return frames


def compute(config, labelled, predictions, lr=1e-3, start_lr=1e-3, names=LABELS):
    batch = flat_batch(labelled, names=names)
    total, shown = EnergyLoss(config, start_lr, World())(
        predicted(predictions, batch), batch, lr
    )
    return total.item(), {name: value.item() for name, value in shown.items()}


@pytest.mark.parametrize(
    "name", [n for n, case in GOLDEN["results"].items() if "error" not in case]
)
def test_total_and_displayed_values_are_those_of_deepmd_kit(name):
    case = GOLDEN["results"][name]
    config = Config(**case["loss"])
    total, shown = compute(
        config,
        golden_frames("label", case["missing"]),
        golden_frames("prediction"),
        GOLDEN["lr"],
        GOLDEN["start_lr"],
    )
    assert total == pytest.approx(case["total"], rel=SAME_MATH)
    assert list(shown) == list(case["shown"]), "names and order of the columns"
    for key, value in case["shown"].items():
        assert shown[key] == pytest.approx(
            float("nan") if value is None else value, rel=SAME_MATH, nan_ok=True
        ), key


def test_forces_are_pooled_and_energies_are_averaged_over_frames_of_different_sizes():
    rng = np.random.default_rng(1)
    labelled = [random_frame(rng, n) for n in (2, 7, 4)]
    guess = [
        f | {"energy": f["energy"] + 0.1 * k, "force": f["force"] + k + 1}
        for k, f in enumerate(labelled)
    ]
    total, shown = compute(Config(), labelled, guess)
    energy = np.mean([(0.1 * k) ** 2 / n for k, n in enumerate((2, 7, 4))])
    force = (2 * 1 + 7 * 4 + 4 * 9) / 13
    assert total == pytest.approx(0.02 * energy + 1000 * force, rel=SAME_MATH)
    assert shown["rmse_e"] == pytest.approx(
        np.sqrt(np.mean([(0.1 * k / n) ** 2 for k, n in enumerate((2, 7, 4))]))
    )
    assert shown["rmse_f"] == pytest.approx(np.sqrt(force))


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_func": "mae"}, {"intensive_ener_virial": True}, {"relative_f": 0.2}],
)
def test_a_frame_without_a_label_changes_nothing_of_that_term(options):
    rng = np.random.default_rng(2)
    labelled = [random_frame(rng, n) for n in (3, 5)]
    guess = [random_frame(rng, n, types=f["types"]) for n, f in zip((3, 5), labelled)]
    unlabelled, extra = random_frame(rng, 6, names=()), random_frame(rng, 6)
    extra["types"] = unlabelled["types"]
    config = Config(**ALL, **options)
    total, shown = compute(config, [*labelled, unlabelled], [*guess, extra])
    expected_total, expected = compute(config, labelled, guess)
    assert total == pytest.approx(expected_total, rel=SAME_MATH)
    assert shown == pytest.approx(expected, rel=SAME_MATH)


@pytest.mark.parametrize(
    ("name", "symbol"), [(name, LABELS[name].symbol) for name in COMPARED]
)
def test_a_label_that_no_frame_has_shows_nan_and_gives_no_gradient(name, symbol):
    rng = np.random.default_rng(3)
    labelled = [random_frame(rng, 3)]
    del labelled[0][name]
    for names in (LABELS, tuple(n for n in LABELS if n != name)):
        batch = flat_batch(labelled, names=names)
        guess = {
            k: v.requires_grad_()
            for k, v in predicted([random_frame(rng, 3)], batch).items()
        }
        total, shown = EnergyLoss(Config(**ALL), 1e-3, World())(guess, batch, 1e-3)
        total.backward()
        assert shown[f"rmse_{symbol}"].isnan()
        assert shown["rmse"].isfinite()
        if name in guess:
            assert not guess[name].grad.any()


def test_frames_without_weights_of_atoms_count_with_ones_only_if_the_input_says_so():
    rng = np.random.default_rng(5)
    labelled = [random_frame(rng, n) for n in (3, 4)]
    guess = [random_frame(rng, n, types=f["types"]) for n, f in zip((3, 4), labelled)]
    lacking = [
        {name: value for name, value in labelled[0].items() if name != "atom_pref"},
        labelled[1],
    ]
    with_ones = [{**lacking[0], "atom_pref": np.ones(3)}, labelled[1]]
    prefactors = {"start_pref_pf": 7, "limit_pref_pf": 2}
    default = Config(**prefactors, use_default_pf=True)
    assert compute(default, lacking, guess) == compute(
        Config(**prefactors), with_ones, guess
    )
    assert compute(default, labelled, guess) == compute(
        Config(**prefactors), labelled, guess
    )
    assert (
        compute(Config(**prefactors), lacking, guess)[1]["rmse_pf"]
        != compute(default, lacking, guess)[1]["rmse_pf"]
    )


def prefactors(loss, rate):
    return dict(zip(loss.terms, loss.prefactors(rate).tolist()))


def test_weights_go_from_start_to_limit_with_the_learning_rate():
    loss = EnergyLoss(
        Config(start_pref_e=0.02, limit_pref_e=1, start_pref_f=1000, limit_pref_f=1),
        2e-3,
        World(),
    )
    assert prefactors(loss, 2e-3) == pytest.approx({"e": 0.02, "f": 1000})
    assert prefactors(loss, 1e-3) == pytest.approx({"e": 0.51, "f": 500.5})
    assert prefactors(loss, 0) == pytest.approx({"e": 1, "f": 1})
