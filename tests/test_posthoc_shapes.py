"""Decays of the learning rate made of snapshots: profiles, what snapshots resolve, `dp-ema posthoc --shapes`."""

from __future__ import annotations

import csv
import re

import numpy as np
import pytest
from kept_runs import shares_of, write_kept_run

from deepmd_ema import checkpoint, cli
from deepmd_ema.averaging import gamma_of
from deepmd_ema.averaging.posthoc.combination import (
    SHAPES,
    TOLERANCE,
    Decay,
    Track,
    _products,
    find_combinations,
    place_decays,
)
from deepmd_ema.averaging.posthoc.run import DEFAULT_PARTS, find_requested, parse_shapes, run_posthoc
from deepmd_ema.averaging.posthoc.snapshots import find_snapshots
from deepmd_ema.errors import UserError
from deepmd_ema.infer.load import load_model

EXACT = 1e-12
NODES = (60, 70, 90, 95, 100)


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like_valid):
    """20 snapshots of each of two profiles."""
    return write_kept_run(tmp_path_factory.mktemp("kept") / "run", [water_like_valid], steps=200, every=10)


def snapshots(steps, count, start=0, every=1):
    each = (steps - start) // every // count
    return [Track(gamma_of(s), each * n, start, every) for n in range(1, count + 1) for s in (0.05, 0.10)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shares_of_a_decay_leave_what_its_learning_rate_leaves(shape):
    """Their sum over all later updates is the learning rate, as the shape says at the nodes and linear in between."""
    shares = shares_of(Decay(shape, NODES))
    left = 1 - np.cumsum(shares)
    at_nodes = [SHAPES[shape]((node - 60) / 40) for node in NODES]
    assert left == pytest.approx(np.interp(np.arange(1, 101), NODES, at_nodes), abs=EXACT)
    assert shares.sum() == pytest.approx(1, abs=EXACT)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_average_with_these_shares_is_the_run_whose_updates_decay(shape):
    moves = np.random.default_rng(0).normal(size=(100, 5))
    shares = shares_of(Decay(shape, NODES))
    factor = np.concatenate([[1.0], 1 - np.cumsum(shares)[:-1]])  # of each update; the last ones are smallest
    assert shares @ np.cumsum(moves, 0) == pytest.approx(factor @ moves, abs=EXACT)


def test_a_linear_decay_is_the_mean_over_its_part():
    assert shares_of(Decay("linear", (80, 87, 100))) == pytest.approx(np.repeat([0, 1 / 20], [80, 20]), abs=EXACT)


@pytest.mark.parametrize("shape", SHAPES)
def test_width_and_mean_age_of_a_decay_are_those_of_its_shares(shape):
    decay, update = Decay(shape, NODES, start=7, every=3), np.arange(1, 101)
    shares = shares_of(decay)
    assert decay.end == 307
    assert decay.mean_age() == pytest.approx(3 * shares @ (100 - update))
    assert decay.sigma_rel == pytest.approx(np.sqrt(shares @ (update - shares @ update) ** 2) / 100)
    assert (decay.part, decay.steps) == (0.4, 120)


@pytest.mark.parametrize(("start", "every"), [(0, 1), (4, 3)])
def test_products_with_decays_are_those_of_the_weights_written_out(start, every):
    tracks = [*snapshots(start + 60 * every, 6, start, every), Track(2.0, 30, start, every)]
    decays, _ = place_decays([("1-sqrt", 0.7), ("linear", 0.3)], tracks, start + 60 * every)
    profiles = [*tracks, *decays]
    written = np.array([np.pad(shares_of(p), (0, 60 - p.updates)) for p in profiles])
    assert _products(profiles) == pytest.approx(written @ written.T, abs=EXACT)


@pytest.mark.parametrize("count", [20, 40])
def test_two_profiles_resolve_the_decays_that_begin_at_a_snapshot(count):
    tracks = snapshots(4000, count)
    decays, left_out = place_decays(parse_shapes(list(SHAPES)), tracks, 4000)
    assert len(decays) + sum(map(len, left_out.values())) == len(SHAPES) * len(DEFAULT_PARTS)
    for one in find_combinations(tracks, [], 4000, decays).combinations:
        assert one.residual <= TOLERANCE
        assert one.coefficients.sum() == pytest.approx(1, abs=1e-10)
        trajectory = np.cumsum(np.random.default_rng(1).normal(size=(4000, 20)), 0)
        kept = np.array([shares_of(track) @ trajectory[: track.updates] for track in tracks])
        wanted, live = shares_of(one.target) @ trajectory, trajectory[-1]
        assert np.linalg.norm(one.coefficients @ kept - wanted) < one.residual * np.linalg.norm(wanted - live)


def test_a_decay_begins_at_the_nearest_snapshot_and_needs_some_to_have_a_shape():
    requests = [("linear", 0.12), ("cosine", 0.32), ("1-sqrt", 0.5)]
    decays, left_out = place_decays([*requests, ("linear", 0.04)], snapshots(1000, 10), 1000)
    assert [(decay.shape, decay.nodes) for decay in decays] == [
        ("linear", (900, 1000)), ("1-sqrt", (500, 600, 700, 800, 900, 1000))
    ]  # fmt: skip
    assert left_out == {
        "less than 4 intervals between snapshots": ["cosine 32 %"],
        "less than 1 interval between snapshots": ["linear 4 %"],
    }


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["cosine:0.3"], [("cosine", 0.3)]),
        (["linear"], [("linear", part) for part in DEFAULT_PARTS]),
        (["1-sqrt:1", "linear:0.1", "1-sqrt:1.0"], [("1-sqrt", 1), ("linear", 0.1)]),
        (["none"], []),
        (None, []),
    ],
)
def test_shapes_are_names_with_or_without_a_part(words, found):
    assert parse_shapes(words) == found


def test_every_shape_that_is_not_understood_is_named():
    words = ["exp", "linear:0", "linear:1.1", "cosine:", "cosine:x", "none", "linear:nan", "Linear", ""]
    with pytest.raises(UserError) as caught:
        parse_shapes([*words, "linear"])
    assert caught.value.problems[0].startswith("--shapes exp: ")
    assert len(caught.value.problems) == len(words)
    assert "expected one of linear, cosine, 1-sqrt, or one with the part of the run" in caught.value.problems[0]


def test_what_is_requested_decides_what_is_made(run):
    kept = find_snapshots(run)

    def made(sigma_rels, requests):
        found = find_requested(kept, sigma_rels, requests).combinations
        return sum(isinstance(one.target, Track) for one in found), sum(isinstance(one.target, Decay) for one in found)

    one = [("linear", 0.2)]
    assert made([], None) == (9, 8)
    assert made([], []) == (9, 0)
    assert made([0.06], None) == (1, 0)
    assert made([], one) == (0, 1)
    assert made([0.06], one) == (1, 1)


def test_lengths_and_decays_are_ranked_together_and_the_best_of_each_is_said(run, tmp_path, capsys):
    options = ["-o", str(tmp_path / "m.pt"), "--plot", str(tmp_path / "m.png"), "--table", str(tmp_path / "m.csv")]
    assert cli.main(["posthoc", str(run), "--sigma-rel", "0.06", "--shapes", "linear:0.2", "1-sqrt:0.4", *options]) == 0
    said = capsys.readouterr().out
    with (tmp_path / "m.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["residual"]]
    assert [(row["weights"], row["kind"], row["shape"], row["part"]) for row in rows] == [
        ("posthoc", "posthoc", "", ""),
        ("linear 20 %", "shape", "linear", "0.2"),
        ("1-sqrt 40 %", "shape", "1-sqrt", "0.4"),
    ]
    (chosen,) = [row for row in rows if row["chosen"] == "1"]
    scores = {float(row["score_overall"]): row["weights"] for row in rows}
    assert scores[min(scores)] == chosen["weights"]
    (line,) = [line for line in said.splitlines() if line.startswith("best length, and best decay of each shape: ")]
    named = {"posthoc": "sigma_rel 0.06"}
    places = [line.index(named.get(scores[score], scores[score])) for score in sorted(scores)]
    assert places == sorted(places)
    assert (tmp_path / "m.png").exists()


def test_the_file_of_a_decay_says_its_shape_and_part(run, tmp_path, capsys):
    path = tmp_path / "m.pt"
    report = run_posthoc(run, shapes=["cosine:0.4"], output=path, say=lambda _: None)
    assert [row.name for row in report.rows if row.combination] == ["cosine 40 %"]
    average = checkpoint.load(path)["average"]
    assert (average["type"], average["shape"], average["part"]) == ("decay", "cosine", 0.4)
    assert "gamma" not in average
    assert cli.main(["show", str(path)]) == 0
    assert "cosine decay of the learning rate, over the last 40.0% of the run, sigma_rel" in capsys.readouterr().out
    assert cli.main(["freeze", "-c", str(path), "-o", str(tmp_path / "m.dp")]) == 0
    assert load_model(tmp_path / "m.dp").info.average["shape"] == "cosine"


def test_decays_that_the_snapshots_do_not_resolve_are_left_out_unless_they_were_requested(run, capsys):
    kept = find_snapshots(run)
    assert find_requested(kept, [], None).left_out == {
        "less than 4 intervals between snapshots": ["cosine 5 %", "cosine 10 %", "1-sqrt 5 %", "1-sqrt 10 %"]
    }
    before = {path.name for path in run.iterdir()}
    assert cli.main(["posthoc", str(run), "--sigma-rel", "0.006", "--shapes", "cosine:0.05", "linear:1"]) == 2
    said = capsys.readouterr().err
    assert "sigma_rel 0.006: " in said
    assert "--shapes: cosine 5 %: less than 4 intervals between snapshots;" in said
    assert re.search(r"--shapes: linear 100 %: 2\d % of its profile would be missing, more than 5 %", said)
    assert "there are snapshots of 20 steps up to step 200. Keep them more often (a smaller snapshot_freq)" in said
    assert {path.name for path in run.iterdir()} == before
