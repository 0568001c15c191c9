"""Errors that add up: values, missing labels, stress, merging, single frames."""

import math

import numpy as np
import pytest
import torch
from flat_batches import flat_batch, predicted, random_frame

from deepmd_ema.model.metrics import (
    Errors,
    evaluate,
    force_errors_by_type,
    group_frames,
    worst_frames,
)

BOX = np.array([[4.0, 0, 0], [0.6, 4.3, 0], [-0.4, 0.8, 4.2]])
SIZES = (3, 6, 4)


class Parrot(torch.nn.Module):
    """Predicts the given numbers, batch after batch, and remembers its mode."""

    def __init__(self, predictions):
        super().__init__()
        self.predictions, self.modes = list(predictions), []

    def forward(self, batch):
        self.modes.append(self.training)
        return self.predictions.pop(0)


def frames_and_guesses(seed=0, boxes=(BOX, 1.5 * BOX, None)):
    rng = np.random.default_rng(seed)
    labelled = [
        random_frame(rng, n, box, source=(f"system{k % 2}", k))
        for k, (n, box) in enumerate(zip(SIZES, boxes))
    ]
    guesses = [
        random_frame(rng, n, types=f["types"], box=f["box"])
        for n, f in zip(SIZES, labelled)
    ]
    return labelled, guesses


def measure(labelled, guesses, per_batch=2, **options):
    batches = [
        flat_batch(labelled[k : k + per_batch])
        for k in range(0, len(labelled), per_batch)
    ]
    predictions = [
        predicted(guesses[k * per_batch : (k + 1) * per_batch], b)
        for k, b in enumerate(batches)
    ]
    return evaluate(Parrot(predictions), batches, torch.device("cpu"), **options)


def test_every_error_equals_its_plain_formula():
    labelled, guesses = frames_and_guesses()
    found = measure(labelled, guesses).summary()
    difference = {
        name: [g[name] - f[name] for f, g in zip(labelled, guesses)]
        for name in ("energy", "force", "virial", "atom_energy")
    }
    volume = [abs(np.linalg.det(f["box"])) for f in labelled[:2]]
    expected = {
        "e": difference["energy"],
        "e_peratom": [d / n for d, n in zip(difference["energy"], SIZES)],
        "f": np.concatenate(difference["force"]),
        "v": difference["virial"],
        "v_peratom": [d / n for d, n in zip(difference["virial"], SIZES)],
        "s": [d / v for d, v in zip(difference["virial"], volume)],
        "ae": np.concatenate(difference["atom_energy"]),
    }
    for name, values in expected.items():
        assert found[f"mae_{name}"] == pytest.approx(
            np.mean(np.abs(values)), rel=1e-13
        ), name
        assert found[f"rmse_{name}"] == pytest.approx(
            np.sqrt(np.mean(np.square(values))), rel=1e-13
        ), name
    assert (found["num_frames"], found["num_atoms"]) == (3, 13)


def test_frames_without_a_label_do_not_count_and_no_label_at_all_is_nan():
    labelled, guesses = frames_and_guesses()
    expected = measure(labelled[:1], guesses[:1]).summary()
    for frame in labelled[1:]:
        for name in ("energy", "force", "virial", "atom_energy", "hessian"):
            del frame[name]
    found = measure(labelled, guesses).summary()
    assert {k: v for k, v in found.items() if "num" not in k} == pytest.approx(
        {k: v for k, v in expected.items() if "num" not in k}, nan_ok=True
    )
    nothing = measure(labelled[1:], guesses[1:]).summary()
    assert all(math.isnan(v) for k, v in nothing.items() if "num" not in k)
    assert nothing["num_frames"] == 2


def test_collected_frames_are_in_file_order_and_have_the_errors_of_the_whole():
    labelled, guesses = frames_and_guesses()
    errors = measure(labelled, guesses, collect=True)
    for frame, label, guess in zip(errors.frames, labelled, guesses):
        assert frame.source == label["source"]
        np.testing.assert_array_equal(frame.atom_type, label["types"])
        for name in ("energy", "force", "virial", "atom_energy"):
            np.testing.assert_array_equal(frame.label[name], label[name])
            np.testing.assert_array_equal(frame.prediction[name], guess[name])
    assert errors.frames[2].volume is None
    together = Errors()
    for frame in errors.frames:
        together.merge(frame.errors)
    assert together.summary() == pytest.approx(errors.summary(), nan_ok=True)
    assert not measure(labelled, guesses).frames


def test_frames_group_by_system_rank_by_error_and_split_by_element():
    labelled, guesses = frames_and_guesses()
    errors = measure(labelled, guesses, collect=True)
    groups = group_frames(errors.frames, lambda frame: frame.source[0])
    expected = measure(labelled[::2], guesses[::2]).summary()
    assert groups["system0"].summary() == pytest.approx(expected, nan_ok=True)
    worst = worst_frames(errors.frames, "F:RMSE", 2)
    scores = [frame.errors.metric("F:RMSE") for frame in errors.frames]
    assert [frame.errors.metric("F:RMSE") for frame in worst] == sorted(
        scores, reverse=True
    )[:2]
    by_type = force_errors_by_type(errors.frames, 3)
    types = np.concatenate([f["types"] for f in labelled])
    difference = np.concatenate(
        [g["force"] - f["force"] for f, g in zip(labelled, guesses)]
    )
    for kind in (0, 1):
        assert by_type[kind].metric("F:MAE") == pytest.approx(
            np.abs(difference[types == kind]).mean()
        )
        assert by_type[kind].summary()["num_atoms"] == (types == kind).sum()
    assert math.isnan(by_type[2].metric("F:MAE"))
