"""`dp-ema posthoc`: averages made of snapshots, ranked, written, read; and everything that can be wrong with them."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import sys

import pytest
import torch
from helpers import assert_same, tiny_input
from kept_runs import AVERAGING, KEPT, write_kept_run

from deepmd_ema import checkpoint, cli
from deepmd_ema.averaging.posthoc.combination import find_combinations
from deepmd_ema.averaging.posthoc.run import parse_sigma_rels, run_posthoc
from deepmd_ema.averaging.posthoc.snapshots import combine, find_snapshots
from deepmd_ema.errors import CheckpointError, ConfigError, DataError, UserError
from deepmd_ema.infer.load import load_model

FLOAT32 = 1e-6  # relative, of weights whose snapshots are float32


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like_valid):
    return write_kept_run(tmp_path_factory.mktemp("kept") / "run", [water_like_valid])


@pytest.fixture
def copy(run, tmp_path, water_like_valid):
    """A copy of the run that a test may spoil, at another depth: its data are named as they are found from there."""
    target = tmp_path / "run"
    shutil.copytree(run, target)
    for path in target.rglob("*.pt"):
        payload = checkpoint.load(path)
        payload["config"]["training"]["validation_data"]["systems"] = [str(water_like_valid)]
        checkpoint.save(path, payload)
    return target


def change(path, **changes):
    """Change entries of a file."""
    checkpoint.save(path, {**checkpoint.load(path), **changes})


def flat(weights, names):
    return torch.cat([weights[name].double().ravel() for name in names])


def test_the_best_length_is_ranked_written_and_said(run, tmp_path, monkeypatch, capsys):
    """From another folder: the paths of the run's data are those of the folder of the run."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["posthoc", str(run), "--shapes", "none"]) == 0
    said = capsys.readouterr()
    assert not said.err
    assert f"{run}: step 400, 40 snapshots of p05 (sigma_rel 0.05), p10 (sigma_rel 0.1)" in said.out
    assert re.search(r"combined: condition \S+; sigma_rel that the snapshots can give: 0\.0\d+ to 0\.2", said.out)
    assert "errors on 6 frames of 1 system" in said.out
    with (run / "posthoc.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows[:6]] == ["live", "p05", "p10", "p07", "fast", "flat"]
    made = [row for row in rows if row["kind"] == "posthoc"]
    assert len(made) == 9
    assert float(rows[0]["score_overall"]) == pytest.approx(1)
    (chosen,) = [row for row in rows if row["chosen"] == "1"]
    assert float(chosen["score_overall"]) == min(float(row["score_overall"]) for row in made)
    (marked,) = [line for line in said.out.splitlines() if line.endswith("<- chosen")]
    assert f"{float(chosen['sigma_rel']):.4f}" in marked
    assert all(float(row["residual"]) <= 0.05 for row in made)
    payload = checkpoint.load(run / "model_posthoc.pt")
    assert (payload["kind"], payload["weights"], payload["step"]) == ("weights", "posthoc", 400)
    average = payload["average"]
    assert average["sigma_rel"] == float(chosen["sigma_rel"])
    assert average["condition"] == float(chosen["condition"]) > 1
    assert (average["profile"], average["type"], average["snapshots"]) == ("posthoc", "power", 40)
    assert (run / "posthoc.png").read_bytes().startswith(b"\x89PNG")


def test_the_written_file_has_the_errors_of_its_row(run, tmp_path, capsys):
    report = run_posthoc(run, ["0.07"], output=tmp_path / "m.pt", plot=tmp_path / "m.png", table=tmp_path / "m.csv",
                         say=print)  # fmt: skip
    assert cli.main(["test", "-m", str(tmp_path / "m.pt"), "-s", *map(str, valid_systems(run))]) == 0
    said = capsys.readouterr().out
    for title, metric in (
        ("Energy RMSE/Natoms", "E:RMSE"),
        ("Force  RMSE", "F:RMSE"),
        ("Virial RMSE/Natoms", "V:RMSE"),
    ):
        found = float(re.findall(rf"# ?{title} *: (\S+)|{title} *: (\S+)", said)[0][1])
        assert found == pytest.approx(report.chosen.errors.metric(metric), rel=1e-5)


def valid_systems(run):
    return [
        run / path for path in json.loads((run / "input.json").read_text())["training"]["validation_data"]["systems"]
    ]


def test_a_length_that_was_also_tracked_agrees_in_weights_and_errors(run):
    kept = find_snapshots(run)
    found = find_combinations(kept.tracks, [0.07, 0.05], kept.step)
    made, same = combine(kept, found.combinations)
    bank = kept.payload["averages"]["profiles"]
    live, direct = flat(kept.payload["model"], kept.averaged), flat(bank["p07"]["weights"], kept.averaged)
    difference = (flat(made, kept.averaged) - direct).norm()
    assert 0 < difference < 5e-4 * direct.norm()
    assert difference < found.combinations[0].residual * (direct - live).norm()
    assert flat(same, kept.averaged) == pytest.approx(flat(bank["p05"]["weights"], kept.averaged).numpy(), rel=FLOAT32)
    report = run_posthoc(run, [0.07], say=lambda _: None)
    tracked = next(row for row in report.rows if row.name == "p07")
    for metric in ("E:RMSE", "F:RMSE", "V:RMSE"):
        assert report.chosen.errors.metric(metric) == pytest.approx(tracked.errors.metric(metric), rel=2e-3)
    assert report.chosen.mean_age == pytest.approx(tracked.mean_age, rel=1e-9)


def test_averaged_buffers_of_snapshots_are_not_narrowed(tmp_path):
    """In float32 an energy of an element of -1e4 eV would be off by half a meV."""
    kept = find_snapshots(write_kept_run(tmp_path, None, steps=40, every=10, buffers="average"))
    snapshot = checkpoint.load(kept.snapshots[-1].path)
    assert "out_bias" in snapshot["averaged"]
    assert snapshot["model"]["out_bias"].dtype == torch.float64
    assert {snapshot["model"][name].dtype for name, _ in load_model(kept.reference).model.named_parameters()} == {
        torch.float32
    }


def test_what_is_not_averaged_is_that_of_the_last_step(run):
    kept = find_snapshots(run, step=200)
    (weights,) = combine(kept, find_combinations(kept.tracks, [0.07], 200).combinations)
    assert weights["out_bias"].flatten().tolist() == pytest.approx([-0.2, -0.2])
    assert weights.keys() == kept.payload["model"].keys()
    assert {weights[name].dtype for name in kept.averaged} == {torch.float64}


def test_lengths_that_do_not_fit_into_memory_together_take_more_passes(run):
    kept = find_snapshots(run)
    combinations = find_combinations(kept.tracks, [0.05, 0.06, 0.07], kept.step).combinations
    together = list(combine(kept, combinations))
    for most in (1, 2 * 8 * 1500):
        assert_same(list(combine(kept, combinations, most_bytes=most)), together)


@pytest.mark.parametrize("common", [{"start_step": 100}, {"update_every": 3}], ids=["late start", "every third step"])
def test_averages_that_start_late_or_skip_steps_are_placed_right(tmp_path, common):
    folder = write_kept_run(tmp_path, None, steps=301, every=14, **common)
    kept = find_snapshots(folder)
    found = find_combinations(kept.tracks, [0.07], kept.step)
    (made,) = combine(kept, found.combinations)
    step = kept.step
    assert step == 294
    again = write_kept_run(tmp_path / "again", None, steps=step, every=14, **common)
    payload = checkpoint.load(again)
    direct = flat(payload["averages"]["profiles"]["p07"]["weights"], kept.averaged)
    difference = (flat(made, kept.averaged) - direct).norm()
    assert difference < 0.03 * (direct - flat(payload["model"], kept.averaged)).norm()


def test_an_earlier_step_can_be_the_last(run, tmp_path, capsys):
    options = ["-o", str(tmp_path / "m.pt"), "--plot", str(tmp_path / "m.png"), "--table", str(tmp_path / "m.csv")]
    assert cli.main(["posthoc", str(run), "--step", "200", *options]) == 0
    said = capsys.readouterr().out
    assert "left out: 20 snapshots after step 200" in said
    assert "live, step 400" in said  # the checkpoint of step 200 is gone
    assert checkpoint.load(tmp_path / "m.pt")["step"] == 200


def test_the_live_weights_are_those_of_the_step_when_they_are_still_there(copy):
    payload = checkpoint.load(copy)
    checkpoint.save(copy / "model.ckpt-200.pt", {**payload, "step": 200})
    kept = find_snapshots(copy, step=200)
    assert kept.reference == copy / "model.ckpt-200.pt"
    change(copy / "model.ckpt-200.pt", run="another")
    assert find_snapshots(copy, step=200).reference == copy / "model.ckpt-400.pt"


@pytest.mark.parametrize("metric", ["E:RMSE", "F:MAE", "overall"])
def test_the_metric_says_what_best_means(run, metric):
    report = run_posthoc(run, ["0.04:0.2:5"], metric=metric.lower(), say=lambda _: None)
    assert report.metric == metric
    made = [score for row, score in zip(report.rows, report.scores()) if row.kind == "posthoc"]
    assert len(made) == 5
    assert report.scores()[report.best] == min(made)
    if metric != "overall":
        assert min(made) == min(row.errors.metric(metric) for row in report.rows if row.kind == "posthoc")


def test_a_better_tracked_average_is_named(run):
    report = run_posthoc(run, ["0.05"], metric="E:RMSE", say=lambda _: None)
    best = min(report.rows, key=lambda row: row.errors.metric("E:RMSE"))
    assert best.kind == "tracked"
    assert f"{best.name} is better still" in report.text()


def test_the_file_is_a_model_for_every_reader(run, tmp_path, water_like, capsys, monkeypatch):
    path = tmp_path / "m.pt"
    run_posthoc(run, [0.06], output=path, say=lambda _: None)
    capsys.readouterr()
    assert cli.main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert ": weights of dp-ema" in said
    assert "average posthoc: sigma_rel 0.06, gamma 13.63, made of 40 snapshots, looks back 25" in said
    assert "step 400" in said
    assert cli.main(["freeze", "-c", str(path), "-o", str(tmp_path / "m.dp")]) == 0
    frozen = load_model(tmp_path / "m.dp")
    assert frozen.info.average["sigma_rel"] == pytest.approx(0.06)
    assert_same(dict(frozen.model.state_dict()), dict(load_model(path).model.state_dict()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.json").write_text(json.dumps(tiny_input([water_like], num_steps=1)))
    capsys.readouterr()
    assert cli.main(["train", "--restart", str(path), "input.json"]) == 2
    said = capsys.readouterr().err
    assert "holds weights (posthoc) of step 400 and not the state of a run" in said
    assert f"--init-model {path}" in said
    assert cli.main(["train", "--init-model", str(path), "input.json"]) == 0
    started = checkpoint.load(tmp_path / "model.ckpt-1.pt")["model"]
    assert_same(started["descriptor.mean"], checkpoint.load(path)["model"]["descriptor.mean"])


def test_a_snapshot_is_a_model_as_well(run, capsys):
    path = run / "snapshots" / "model_p05.ckpt-200.pt"
    assert cli.main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert ": snapshot of an average of dp-ema" in said
    assert "average p05: sigma_rel 0.05, gamma 16.97, 200 updates, looks back 10.0 steps on average, step 200" in said
    assert (
        load_model(path)
        .info.describe()
        .startswith("averaged weights (p05) of step 200: sigma_rel 0.05, gamma 16.97, 200 updates")
    )


def test_without_matplotlib_all_but_the_picture_is_there(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ["-o", str(tmp_path / "m.pt"), "--plot", str(tmp_path / "m.png"), "--table", str(tmp_path / "m.csv")]
    assert cli.main(["posthoc", str(run), "--sigma-rel", "0.06", *options]) == 0
    assert "no picture: matplotlib is not installed. pip install 'dp-ema[plot]'" in capsys.readouterr().out
    assert (tmp_path / "m.pt").exists()
    assert (tmp_path / "m.csv").exists()


def test_a_bias_that_was_refitted_after_training_is_mentioned(copy, capsys):
    payload = checkpoint.load(copy)
    bias = dict.fromkeys(("live", "p05", "p10", "p07", "fast", "flat"), payload["model"]["out_bias"] + 1)
    change(copy / "model.ckpt-400.pt", refitted_bias=bias)
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.06"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fitted its output bias after the last step; this file and all errors above have the bias before" in said
    assert f"dp-ema change-bias {copy / 'model_posthoc.pt'} -s SYSTEM" in said


def test_the_removed_fit_of_the_output_layer_is_refused_with_what_to_use(run, capsys):
    assert cli.main(["posthoc", str(run), "--solve", "bias"]) == 2
    assert "posthoc --solve: was removed, since dynamics failed more often; use" in capsys.readouterr().err


def test_a_bias_that_was_refitted_after_training_does_not_make_tracked_weights_look_better(copy):
    """The table set live weights with a refitted bias beside lengths without one: 19.8 against 133 meV/atom."""
    before = run_posthoc(copy, [0.06], say=lambda _: None)
    bias = checkpoint.load(copy)["model"]["out_bias"] + 1
    change(copy / "model.ckpt-400.pt", refitted_bias=dict.fromkeys(("live", "p05", "p10", "p07"), bias))
    assert run_posthoc(copy, [0.06], say=lambda _: None).scores() == before.scores()


def test_an_average_whose_settings_were_changed_at_a_restart_is_left_out_with_a_note(copy, capsys):
    """Its snapshots hold no power profile: lengths came out wrong, with a small residual."""
    for path in (copy / "snapshots").glob("model_p05.ckpt-[34]*.pt"):
        if checkpoint.load(path)["step"] > 300:
            change(path, average={**checkpoint.load(path)["average"], "gamma": 3.5})
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.11"]) == 0
    said = capsys.readouterr().out
    assert "settings were changed at a restart, left out: model_p05.ckpt-320.pt" in said
    assert "step 400, 35 snapshots of p05 (sigma_rel 0.05), p10 (sigma_rel 0.1)\n" in said


def test_other_runs_and_later_steps_are_left_out_with_a_note(copy, capsys):
    snapshots = copy / "snapshots"
    change(snapshots / "model_p05.ckpt-20.pt", run="another")
    late = checkpoint.load(snapshots / "model_p05.ckpt-400.pt")
    checkpoint.save(snapshots / "model_p05.ckpt-420.pt", {**late, "step": 420})
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.06"]) == 0
    said = capsys.readouterr().out
    assert "of another run, left out: model_p05.ckpt-20.pt" in said
    assert "beyond model.ckpt-400.pt, left out: model_p05.ckpt-420.pt" in said
    assert "step 400, 39 snapshots" in said


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (["0.05"], [0.05]),
        (["0.1", "0.03", "0.03"], [0.03, 0.1]),
        (["0.02:0.2:3"], [0.02, pytest.approx(math.sqrt(0.004)), 0.2]),
        ([0.05, 0.07], [0.05, 0.07]),
    ],
)
def test_lengths_are_numbers_and_ranges(words, lengths):
    assert parse_sigma_rels(words) == lengths
    assert len(parse_sigma_rels(["0.02:0.2"])) == 9
    assert parse_sigma_rels(None) == []


def test_every_length_that_is_not_understood_is_named():
    words = ["0.3", "-0.1", "0.1:0.2:1000", "x", "0.2:0.1", "0.1:0.2:1", "0.1:0.2:2.5", "0.1:0.2:3:4", "nan", ""]
    with pytest.raises(UserError) as caught:
        parse_sigma_rels([*words, "0.05"])
    assert len(caught.value.problems) == len(words)
    assert caught.value.problems[0].startswith("--sigma-rel 0.3: expected a number above 0 and at most 0.2886")


def test_a_width_outside_the_resolvable_range_is_refused(run, capsys):
    before = {path.name for path in run.iterdir()}
    assert cli.main(["posthoc", str(run), "--sigma-rel", "0.006"]) == 2
    said = capsys.readouterr().err
    assert "sigma_rel 0.006: " in said
    assert "40 snapshots of sigma_rel 0.05, 0.1 resolve sigma_rel 0.0" in said
    assert {path.name for path in run.iterdir()} == before


def test_a_folder_without_snapshots_says_which_options_make_them(copy, tmp_path, capsys):
    shutil.rmtree(copy / "snapshots")
    assert cli.main(["posthoc", str(copy)]) == 2
    said = capsys.readouterr().err
    assert "no snapshots of the run of" in said
    assert '"type": "power", "sigma_rel": 0.05, "snapshots": true' in said
    with pytest.raises(CheckpointError, match="names the newest checkpoint"):
        find_snapshots(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_snapshots(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        find_snapshots(copy / "model.ckpt-400.pt")


def test_one_snapshot_is_not_enough(copy):
    for path in (copy / "snapshots").iterdir():
        if path.name != "model_p05.ckpt-400.pt":
            path.unlink()
    with pytest.raises(CheckpointError, match="1 snapshot up to step 400; at least 2"):
        find_snapshots(copy)


def test_a_step_without_a_snapshot_is_refused_with_those_near_it(run):
    with pytest.raises(CheckpointError, match=r"--step 210: .*20 steps, 20 to 400; the nearest: 1[68]0, .*200, 220"):
        find_snapshots(run, 210)


def test_every_unreadable_file_is_named(copy):
    names = ["model_p05.ckpt-20.pt", "model_p10.ckpt-40.pt"]
    (copy / "snapshots" / names[0]).write_bytes(b"")
    content = (copy / "snapshots" / names[1]).read_bytes()
    (copy / "snapshots" / names[1]).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError) as caught:
        find_snapshots(copy)
    assert [name for problem in caught.value.problems for name in names if name in problem.split(":")[0]] == names


def test_bytes_that_were_changed_on_the_disk_are_found_before_they_are_used(copy):
    path = copy / "snapshots" / "model_p10.ckpt-40.pt"
    content = bytearray(path.read_bytes())
    place = content.find(checkpoint.load(path)["model"]["descriptor.embeddings.0.layers.0.weight"].numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"model_p10.ckpt-40.pt: damaged"):
        find_snapshots(copy)


def test_snapshots_of_different_models_or_tensors_are_refused(copy):
    folder = copy / "snapshots"
    payload = checkpoint.load(folder / "model_p05.ckpt-20.pt")
    change(folder / "model_p05.ckpt-20.pt", averaged=payload["averaged"][1:])
    name = payload["averaged"][0]
    change(folder / "model_p05.ckpt-60.pt", averaged=payload["averaged"][1:])
    change(folder / "model_p10.ckpt-40.pt", model={**payload["model"], name: torch.zeros(3, 3)})
    with pytest.raises(CheckpointError) as caught:
        find_snapshots(copy)
    shapes, tensors = caught.value.problems
    assert "model_p05.ckpt-20.pt, " in tensors
    assert "model_p05.ckpt-60.pt: other tensors were averaged" in tensors
    assert f"different: {name}" in tensors
    assert "of another shape" in shapes


def test_a_snapshot_of_an_average_that_had_not_begun_is_not_used(copy):
    path = copy / "snapshots" / "model_p05.ckpt-20.pt"
    change(path, average={**checkpoint.load(path)["average"], "updates": 0})
    assert len(find_snapshots(copy).snapshots) == 39


def test_averages_that_were_updated_by_a_hook_are_refused(copy):
    path = copy / "snapshots" / "model_p05.ckpt-20.pt"
    change(path, average={**checkpoint.load(path)["average"], "should_update": "every_second"})
    with pytest.raises(CheckpointError, match="updated when every_second decided"):
        find_snapshots(copy)


def test_missing_validation_data_are_named_with_a_way_out(copy, tmp_path, water_like_valid, capsys):
    payload = checkpoint.load(copy)
    training = payload["config"]["training"]
    training["validation_data"]["systems"] = ["nowhere"]
    change(copy / "model.ckpt-400.pt", config=payload["config"])
    with pytest.raises(DataError, match=r"nowhere: no such file or folder.*Give others with -s"):
        run_posthoc(copy, say=lambda _: None)
    training["validation_data"] = None
    change(copy / "model.ckpt-400.pt", config=payload["config"])
    with pytest.raises(ConfigError, match=r"no training.validation_data to rank averages with. Give systems with -s"):
        run_posthoc(copy, say=lambda _: None)
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.06", "-s", str(water_like_valid)]) == 0
    (tmp_path / "other.json").write_text(json.dumps(tiny_input([water_like_valid], [water_like_valid])))
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.06", "--valid-data", str(tmp_path / "other.json")]) == 0
    assert capsys.readouterr().out.count("errors on 6 frames") == 2


@pytest.mark.parametrize("option", ["-o", "--table", "--plot"])
def test_a_place_that_cannot_be_written_is_reported_before_the_work(run, tmp_path, option, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["posthoc", str(run), "--sigma-rel", "0.06", option, str(tmp_path / "file" / "x.png")]) == 2
    said = capsys.readouterr()
    assert f"{option}: {tmp_path / 'file'}: cannot be written (File exists). There is a file where" in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("-o", "model.ckpt.pt", "a file of kind training, which only a run can write"),
        ("-o", "snapshots/model_p05.ckpt-20.pt", "a file of kind snapshot"),
        ("-o", "m.dp", "expected a name that ends in .pt"),
        ("--table", "snapshots", "cannot be written (Is a directory)"),
    ],
)
def test_nothing_that_the_run_needs_is_written_over(copy, option, name, words, capsys):
    """`-o model.ckpt.pt` put weights in place of the link to the newest checkpoint: no restart could continue."""
    (copy / "model.ckpt.pt").symlink_to("model.ckpt-400.pt")
    assert cli.main(["posthoc", str(copy), "--sigma-rel", "0.06", option, str(copy / name)]) == 2
    said = capsys.readouterr()
    assert f"{copy / name}: {words}" in said.err
    assert not said.out
    assert (copy / "model.ckpt.pt").is_symlink()


def test_a_metric_that_is_unknown_or_has_no_label_is_refused(run, open_like):
    with pytest.raises(UserError, match=r"--metric F:RMS: unknown. Did you mean F:RMSE\?"):
        run_posthoc(run, metric="F:RMS", say=lambda _: None)
    with pytest.raises(UserError, match=r"--metric .*: no frame of .* has a label to compare"):
        run_posthoc(run, metric="V:RMSE", systems=[open_like], say=lambda _: None)


def test_a_run_that_trains_leaves_what_posthoc_needs(tmp_path, water_like, water_like_valid, monkeypatch, capsys):
    """The whole way: train with two power profiles, then find a length that was tracked as well."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    averaging = [{**section, "snapshot_freq": 4} if section["name"] in KEPT else section for section in AVERAGING]
    values = tiny_input([water_like], [water_like_valid], num_steps=40, training__averaging=averaging,
                        training__save_dir="files")  # fmt: skip
    (folder / "input.json").write_text(json.dumps(values))
    assert cli.main(["train", "input.json"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main(["posthoc", "run", "--sigma-rel", "0.06", "0.07", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "step 40, 20 snapshots" in said
    kept = find_snapshots("run")
    (made,) = combine(kept, find_combinations(kept.tracks, [0.07], 40).combinations)
    direct = flat(load_model("run/files/model_p07.ckpt-40.pt").model.state_dict(), kept.averaged)
    assert (flat(made, kept.averaged) - direct).norm() < 1e-4 * direct.norm()
