"""Files of every earlier version stay readable; tests/golden/checkpoints/make.py keeps those of a
version.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import write_system

from deepmd_ema import Potential, checkpoint
from deepmd_ema.cli import main

KEPT = sorted(
    p
    for p in (Path(__file__).parents[1] / "golden" / "checkpoints").iterdir()
    if (p / "predictions.npz").exists()
)
BANKS = [
    p
    for p in KEPT
    if "averaging" in json.loads((p / "input.json").read_text())["training"]
]


def assert_predicts_as_kept(file, kept):
    found = Potential(file).evaluate(kept["coord"], kept["types"], kept["box"])
    name = Path(file).name
    assert np.allclose(found.energy, kept[f"{name}_energy"], rtol=1e-12, atol=0)
    assert np.allclose(found.force, kept[f"{name}_force"], rtol=0, atol=1e-12)


def continue_run(folder, steps, *options):
    """Restart the kept checkpoint of step 4 in this folder, up to ``steps``."""
    write_system("data", frames=4, seed=1)
    config = json.loads((folder / "input.json").read_text())
    config["training"]["numb_steps"] = steps
    Path("input.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.ckpt-4.pt", ".")
    assert (
        main(
            [
                "train",
                "--restart",
                "model.ckpt-4.pt",
                "input.json",
                "--device",
                "cpu",
                *options,
            ]
        )
        == 0
    )


@pytest.mark.parametrize("folder", KEPT, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "name", ["model.ckpt-4.pt", "model_ema.ckpt-4.pt", "average.dp"]
)
def test_a_file_of_an_earlier_version_predicts_what_it_did(folder, name):
    assert_predicts_as_kept(folder / name, np.load(folder / "predictions.npz"))


@pytest.mark.parametrize("folder", BANKS, ids=lambda p: p.name)
def test_a_restart_from_an_earlier_version_continues_as_that_version_did(
    folder, tmp_path, monkeypatch
):
    """Live weights and every average two steps later are those that the earlier version had
    there.
    """
    monkeypatch.chdir(tmp_path)
    continue_run(folder, 6)
    kept = np.load(folder / "predictions.npz")
    later = sorted({name.rpartition("_")[0] for name in kept if "ckpt-6" in name})
    assert len(later) == 5
    for name in later:
        assert_predicts_as_kept(name, kept)
    assert [
        int(row.split()[0])
        for row in Path("val_flat.log").read_text().splitlines()
        if row[:1] != "#"
    ] == [6]


@pytest.mark.parametrize("folder", BANKS, ids=lambda p: p.name)
def test_a_checkpoint_with_a_removed_layout_is_read_and_restarted(
    folder, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    payload = checkpoint.load(folder / "model.ckpt-4.pt")
    old = {"layout": "rank_range"}
    averages, sections = (
        payload["averages"]["profiles"],
        payload["config"]["training"]["averaging"],
    )
    payload["averages"]["profiles"] = {
        name: {**average, **old} for name, average in averages.items()
    }
    payload["config"]["training"]["averaging"] = [
        {**section, **old} for section in sections
    ]
    (tmp_path / "old").mkdir()
    checkpoint.save(tmp_path / "old" / "model.ckpt-4.pt", payload)
    shutil.copy(folder / "input.json", tmp_path / "old")
    continue_run(tmp_path / "old", 6)
    assert (
        "layout was rank_range in the checkpoint and is local_shard from now on"
        in caplog.text
    )
    kept = np.load(folder / "predictions.npz")
    for name in {name.rpartition("_")[0] for name in kept if "ckpt-6" in name}:
        assert_predicts_as_kept(name, kept)
    assert main(["show", "model.ckpt-4.pt"]) == 0
    assert (
        main(
            [
                "freeze",
                "-c",
                "model.ckpt-4.pt",
                "--average",
                next(iter(averages)),
                "-o",
                "a.dp",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("place", "value", "is_mentioned"),
    [
        ("training.solve_last_layer", True, True),
        ("training.solve_last_layer", False, False),
        ("validating.physics", {"md_steps": 5}, True),
        ("validating.validation_metric", "P:LIMITS", True),
    ],
)
def test_a_checkpoint_with_a_removed_option_is_restarted(
    place, value, is_mentioned, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "deepmd_ema")
    payload, (section, option) = (
        checkpoint.load(KEPT[-1] / "model.ckpt-4.pt"),
        place.split("."),
    )
    payload["config"][section] = {**payload["config"][section], option: value}
    if value == "P:LIMITS":
        payload["best"] = {"live": {"metric": value, "records": [[3.0, 2]]}}
    (tmp_path / "old").mkdir()
    checkpoint.save(tmp_path / "old" / "model.ckpt-4.pt", payload)
    shutil.copy(KEPT[-1] / "input.json", tmp_path / "old")
    continue_run(tmp_path / "old", 6)
    assert (
        bool(re.search(rf"{place}\S* = .* in the checkpoint: .*removed", caplog.text))
        == is_mentioned
    )
    assert main(["show", "model.ckpt-4.pt"]) == 0
    assert main(["freeze", "-c", "model.ckpt-4.pt", "-o", "a.dp"]) == 0
