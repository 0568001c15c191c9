"""`dp-ema posthoc`: averages made of snapshots, ranked, written, read; and everything that can be
wrong with them.
"""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_same, tiny_input
from kept_runs import write_kept_run

from deepmd_ema import checkpoint, cli
from deepmd_ema.commands.posthoc.combination import find_combinations
from deepmd_ema.commands.posthoc.run import parse_shapes, parse_sigma_rels, run_posthoc
from deepmd_ema.commands.posthoc.snapshots import combine, find_snapshots
from deepmd_ema.errors import UserError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model

FLOAT32 = 1e-6  # relative, of weights whose snapshots are float32


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like_valid):
    return write_kept_run(tmp_path_factory.mktemp("kept") / "run", [water_like_valid])


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that a test may spoil, as deep in folders: its data are named as they are
    found from there.
    """
    return Path(shutil.copytree(run, tmp_path / "run"))


def change(path, **changes):
    """Change entries of a file; a function gets what the file holds."""
    payload = checkpoint.load(path)
    checkpoint.save(
        path,
        payload
        | {key: new(payload) if callable(new) else new for key, new in changes.items()},
    )


def flat(weights, names):
    return torch.cat([weights[name].double().ravel() for name in names])


def test_the_best_length_is_ranked_written_and_said(run, tmp_path, monkeypatch, capsys):
    """From another folder: the paths of the run's data are those of the folder of the run."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["posthoc", str(run), "--shapes", "none"]) == 0
    said = capsys.readouterr()
    assert not said.err
    assert (
        f"{run}: step 400, 40 snapshots of p05 (sigma_rel 0.05), p10 (sigma_rel 0.1)"
        in said.out
    )
    assert re.search(
        r"combined: condition \S+; sigma_rel that the snapshots can give: 0\.0\d+ to 0\.2",
        said.out,
    )
    assert "errors on 6 frames of 1 system" in said.out
    with (run / "posthoc.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows[:6]] == [
        "live",
        "p05",
        "p10",
        "p07",
        "fast",
        "flat",
    ]
    made = [row for row in rows if row["kind"] == "posthoc"]
    assert len(made) == 9
    assert float(rows[0]["score_overall"]) == pytest.approx(1)
    (chosen,) = [row for row in rows if row["chosen"] == "1"]
    assert float(chosen["score_overall"]) == min(
        float(row["score_overall"]) for row in made
    )
    (marked,) = [line for line in said.out.splitlines() if line.endswith("<- chosen")]
    assert f"{float(chosen['sigma_rel']):.4f}" in marked
    assert all(float(row["residual"]) <= 0.05 for row in made)
    payload = checkpoint.load(run / "model_posthoc.pt")
    assert (payload["kind"], payload["weights"], payload["step"]) == (
        "weights",
        "posthoc",
        400,
    )
    average = payload["average"]
    assert average["sigma_rel"] == float(chosen["sigma_rel"])
    assert average["condition"] == float(chosen["condition"]) > 1
    assert (average["profile"], average["type"], average["snapshots"]) == (
        "posthoc",
        "power",
        40,
    )
    assert (run / "posthoc.png").read_bytes().startswith(b"\x89PNG")


def test_the_written_file_is_the_best_by_the_metric_and_has_the_errors_of_its_row(
    run, tmp_path, water_like_valid
):
    report = run_posthoc(
        run,
        ["0.04:0.2:5"],
        metric="f:mae",
        output=tmp_path / "m.pt",
        say=lambda _: None,
    )
    made = [row.errors.metric("F:MAE") for row in report.rows if row.kind == "posthoc"]
    assert len(made) == 5
    assert report.scores()[report.best] == min(made)
    found = measure(str(tmp_path / "m.pt"), [str(water_like_valid)]).total
    for metric in ("E:RMSE", "F:RMSE", "V:RMSE"):
        assert found.metric(metric) == pytest.approx(
            report.chosen.errors.metric(metric), rel=1e-9
        )


def test_a_length_that_was_also_tracked_agrees_in_weights_and_errors(run):
    kept = find_snapshots(run)
    found = find_combinations(kept.tracks, [0.07, 0.05], kept.step)
    made, same = combine(kept, found.combinations)
    bank = kept.payload["averages"]["profiles"]
    live, direct = (
        flat(kept.payload["model"], kept.averaged),
        flat(bank["p07"]["weights"], kept.averaged),
    )
    difference = (flat(made, kept.averaged) - direct).norm()
    assert 0 < difference < 5e-4 * direct.norm()
    assert difference < found.combinations[0].residual * (direct - live).norm()
    assert flat(same, kept.averaged) == pytest.approx(
        flat(bank["p05"]["weights"], kept.averaged).numpy(), rel=FLOAT32
    )
    report = run_posthoc(run, [0.07], say=lambda _: None)
    tracked = next(row for row in report.rows if row.name == "p07")
    assert report.chosen.errors.metric("F:RMSE") == pytest.approx(
        tracked.errors.metric("F:RMSE"), rel=2e-3
    )
    assert report.chosen.mean_age == pytest.approx(tracked.mean_age, rel=1e-9)
    kept = find_snapshots(
        run, step=200
    )  # what is not averaged is that of the last step
    (weights,) = combine(
        kept, find_combinations(kept.tracks, [0.07], 200).combinations, most_bytes=1
    )
    assert weights["out_bias"].flatten().tolist() == pytest.approx([-0.2, -0.2])
    assert {weights[name].dtype for name in kept.averaged} == {torch.float64}


def test_the_file_is_a_model_for_every_reader(
    run, tmp_path, water_like, capsys, monkeypatch
):
    path = tmp_path / "m.pt"
    run_posthoc(run, [0.06], output=path, say=lambda _: None)
    capsys.readouterr()
    assert cli.main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert (
        "average posthoc: sigma_rel 0.06, gamma 13.63, made of 40 snapshots, looks back 25"
        in said
    )
    assert cli.main(["freeze", "-c", str(path), "-o", str(tmp_path / "m.dp")]) == 0
    frozen = load_model(tmp_path / "m.dp")
    assert frozen.info.average["sigma_rel"] == pytest.approx(0.06)
    assert_same(
        dict(frozen.model.state_dict()), dict(load_model(path).model.state_dict())
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text(
        json.dumps(tiny_input([water_like], num_steps=1))
    )
    capsys.readouterr()
    assert cli.main(["train", "--restart", str(path), "input.json"]) == 2
    said = capsys.readouterr().err
    assert "holds weights (posthoc) of step 400 and not the state of a run" in said
    assert f"--init-model {path}" in said
    assert cli.main(["train", "--init-model", str(path), "input.json"]) == 0
    started = checkpoint.load(tmp_path / "model.ckpt-1.pt")["model"]
    assert_same(
        started["descriptor.mean"], checkpoint.load(path)["model"]["descriptor.mean"]
    )


def test_files_that_do_not_belong_to_the_run_are_left_out_with_a_note(copy, capsys):
    """Snapshots of an average whose settings were changed hold no power profile, and gave wrong
    lengths.
    """
    snapshots = copy / "snapshots"
    change(snapshots / "model_p05.ckpt-20.pt", run="another")
    late = checkpoint.load(snapshots / "model_p05.ckpt-400.pt")
    checkpoint.save(snapshots / "model_p05.ckpt-420.pt", {**late, "step": 420})
    for step in range(320, 401, 20):
        path = snapshots / f"model_p05.ckpt-{step}.pt"
        change(path, average={**checkpoint.load(path)["average"], "gamma": 3.5})
    change(
        snapshots / "model_p05.ckpt-40.pt", average={**late["average"], "updates": 0}
    )
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.11"]) == 0
    said = capsys.readouterr().out
    assert "of another run, left out: model_p05.ckpt-20.pt" in said
    assert "beyond model.ckpt-400.pt, left out: model_p05.ckpt-420.pt" in said
    assert "settings were changed at a restart, left out: model_p05.ckpt-320.pt" in said
    assert "step 400, 33 snapshots of p" in said


def test_lengths_are_numbers_and_ranges_and_shapes_are_names_with_or_without_a_part():
    assert parse_sigma_rels(["0.1", "0.03", "0.03"]) == [0.03, 0.1]
    assert parse_sigma_rels(["0.02:0.2:3"]) == [
        0.02,
        pytest.approx(math.sqrt(0.004)),
        0.2,
    ]
    assert len(parse_sigma_rels(["0.02:0.2"])) == 9
    assert parse_shapes(["1-sqrt:1", "linear:0.1", "1-sqrt:1.0"]) == [
        ("1-sqrt", 1),
        ("linear", 0.1),
    ]
    assert parse_shapes(["none"]) == []
    wrong = [
        "0.3",
        "-0.1",
        "0.1:0.2:1000",
        "x",
        "0.2:0.1",
        "0.1:0.2:1",
        "0.1:0.2:2.5",
        "0.1:0.2:3:4",
        "0.1:",
        "0.1::9",
        "nan",
        "",
    ]
    with pytest.raises(UserError) as caught:
        parse_sigma_rels([*wrong, "0.05"])
    assert len(caught.value.problems) == len(wrong)
    assert caught.value.problems[0].startswith(
        "--sigma-rel 0.3: expected a number above 0 and at most 0.2886"
    )


def test_lengths_and_decays_are_ranked_together_and_the_file_says_its_shape_and_part(
    run, tmp_path, capsys
):
    options = [
        "-o",
        str(tmp_path / "m.pt"),
        "--plot",
        str(tmp_path / "m.png"),
        "--table",
        str(tmp_path / "m.csv"),
    ]
    assert (
        cli.main(
            ["posthoc", str(run), "--shapes", "linear:0.2", "1-sqrt:0.4", *options]
        )
        == 0
    )
    said = capsys.readouterr().out
    with (tmp_path / "m.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["residual"]]
    assert [
        (row["weights"], row["kind"], row["shape"], row["part"]) for row in rows
    ] == [
        ("linear 20 %", "shape", "linear", "0.2"),
        ("1-sqrt 40 %", "shape", "1-sqrt", "0.4"),
    ]
    (chosen,) = [row for row in rows if row["chosen"] == "1"]
    assert float(chosen["score_overall"]) == min(
        float(row["score_overall"]) for row in rows
    )
    (line,) = [
        line
        for line in said.splitlines()
        if line.startswith("best length, and best decay of each shape: ")
    ]
    assert line.index(chosen["weights"]) == min(
        line.index(row["weights"]) for row in rows
    )
    average = checkpoint.load(tmp_path / "m.pt")["average"]
    assert (average["type"], average["shape"], average["part"]) == (
        "decay",
        chosen["shape"],
        float(chosen["part"]),
    )
    assert cli.main(["show", str(tmp_path / "m.pt")]) == 0
    assert (
        f"{chosen['shape']} decay of the learning rate, over the last"
        in capsys.readouterr().out
    )


def flip_a_bit(copy):
    path = copy / "snapshots" / "model_p10.ckpt-40.pt"
    content = bytearray(path.read_bytes())
    weight = checkpoint.load(path)["model"]["descriptor.embeddings.0.layers.0.weight"]
    content[content.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(bytes(content))


def validated_on(data):
    """Return the config of a file whose run has other validation data."""

    def changed(payload):
        payload["config"]["training"]["validation_data"] = data
        return payload["config"]

    return {"config": changed}


def not_a_number(payload):
    """Return the weights of a file with one that is not a number."""
    name = "fitting.nets.0.layers.0.bias"
    return {
        **payload["model"],
        name: torch.full_like(payload["model"][name], torch.nan),
    }


def without_age(payload):
    return {
        name: fact for name, fact in payload["average"].items() if name != "mean_age"
    }


P05, P10, LAST = (
    "snapshots/model_p05.ckpt-60.pt",
    "snapshots/model_p10.ckpt-40.pt",
    "model.ckpt-400.pt",
)


@pytest.mark.parametrize(
    ("spoil", "words", "phrase"),
    [
        (
            None,
            ["--sigma-rel", "0.006"],
            "40 snapshots of sigma_rel 0.05, 0.1 resolve sigma_rel 0.0",
        ),
        (
            None,
            ["--shapes", "cosine:0.05"],
            "--shapes: cosine 5 %: less than 4 intervals between snapshots;",
        ),
        (None, ["--step", "210"], "--step 210: "),
        (None, ["--metric", "F:RMS"], "--metric F:RMS: unknown. Did you mean F:RMSE?"),
        (
            None,
            ["--solve", "bias"],
            "posthoc --solve: was removed, since dynamics failed more often; use",
        ),
        (
            None,
            ["-o", "RUN/model.ckpt.pt"],
            "model.ckpt.pt: a file of kind training, which only a run can write",
        ),
        (
            None,
            ["-o", "RUN/snapshots/model_p05.ckpt-20.pt"],
            "model_p05.ckpt-20.pt: a file of kind snapshot",
        ),
        (None, ["-o", "RUN/m.dp"], "expected a name that ends in .pt"),
        (
            None,
            ["--table", "RUN/snapshots"],
            "snapshots: cannot be written (Is a directory)",
        ),
        (
            lambda copy: shutil.rmtree(copy / "snapshots"),
            [],
            '"type": "power", "sigma_rel": 0.05, "snapshots": true',
        ),
        (
            lambda copy: [
                path.unlink()
                for path in copy.glob("snapshots/*")
                if "p05.ckpt-400" not in path.name
            ],
            [],
            "1 snapshot up to step 400; at least 2",
        ),
        (flip_a_bit, [], "model_p10.ckpt-40.pt: damaged"),
        (
            (
                P10,
                {
                    "model": lambda p: {
                        **p["model"],
                        p["averaged"][0]: torch.zeros(3, 3),
                    }
                },
            ),
            [],
            "of another shape",
        ),
        (
            (P05, {"model": not_a_number}),
            [],
            "05.ckpt-60.pt: damaged, fitting.nets.0.layers.0.bias is not finite",
        ),
        (
            (LAST, {"model": not_a_number}),
            [],
            "t-400.pt: damaged, fitting.nets.0.layers.0.bias is not finite",
        ),
        (
            (P05, {"average": without_age}),
            [],
            "60.pt: its content is not as dp-ema writes it (KeyError: 'mean_age')",
        ),
        (
            (LAST, {"averages": {"steps": 400, "profiles": {"p05": 3}}}),
            [],
            "400.pt: its content is not",
        ),
        (
            (P05, {"averaged": lambda p: p["averaged"][1:]}),
            [],
            "model_p05.ckpt-60.pt: other tensors were averaged",
        ),
        (
            (
                P05,
                {
                    "average": lambda p: {
                        **p["average"],
                        "should_update": "every_second",
                    }
                },
            ),
            [],
            "updated when every_second decided",
        ),
        *(
            (
                (
                    P05,
                    {
                        "average": lambda p, gamma=gamma: {
                            **p["average"],
                            "gamma": gamma,
                        }
                    },
                ),
                [],
                f"60.pt: average.gamma is {gamma}, expected a number >= 0",
            )
            for gamma in (float("nan"), -0.5)
        ),
        (
            (LAST, validated_on({"systems": ["nowhere"]})),
            [],
            "the validation data of the run's input. Give others",
        ),
        (
            (LAST, validated_on(None)),
            [],
            "no training.validation_data to rank averages with. Give systems",
        ),
    ],
)
def test_what_is_wrong_is_reported_before_the_work_and_nothing_is_written_over(
    copy, capsys, spoil, words, phrase
):
    """`-o model.ckpt.pt` put weights in place of the link to the newest checkpoint: no restart
    could continue.
    """
    (copy / "model.ckpt.pt").symlink_to("model.ckpt-400.pt")
    if isinstance(spoil, tuple):
        change(copy / spoil[0], **spoil[1])
    elif spoil is not None:
        spoil(copy)
    before = sorted(path.name for path in copy.iterdir())
    words = ["--sigma-rel", "0.06", *words] if words[:1] != ["--sigma-rel"] else words
    assert (
        cli.main(
            ["posthoc", str(copy), *(word.replace("RUN", str(copy)) for word in words)]
        )
        == 2
    )
    said = capsys.readouterr()
    assert phrase in said.err
    assert "Traceback" not in said.err + said.out
    assert sorted(path.name for path in copy.iterdir()) == before
    assert (copy / "model.ckpt.pt").is_symlink()


def test_the_data_of_the_run_are_not_needed_where_others_are_given(
    copy, tmp_path, water_like_valid, capsys
):
    change(copy / LAST, **validated_on(None))
    assert (
        cli.main(
            ["posthoc", str(copy), "--sigma-rel", "0.06", "-s", str(water_like_valid)]
        )
        == 0
    )
    (tmp_path / "other.json").write_text(
        json.dumps(tiny_input([water_like_valid], [water_like_valid]))
    )
    assert (
        cli.main(
            [
                "posthoc",
                str(copy),
                "--sigma-rel",
                "0.06",
                "--valid-data",
                str(tmp_path / "other.json"),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.count("errors on 6 frames") == 2
