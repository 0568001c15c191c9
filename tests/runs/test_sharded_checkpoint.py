"""Sharded checkpoints: folders to which every rank writes its own rows, with the content of a
gathered file.
"""

import os
import pickle
import shutil
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    assert_same,
    checkpoint_payload,
    killed_at,
    tiny_input,
    validated,
    write_system,
)
from parallel_runs import run_ranks, train

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint import sharded
from deepmd_ema.cli.main import main
from deepmd_ema.config.outputs import HEAD
from deepmd_ema.distributed import tensors
from deepmd_ema.distributed.tensors import HostCopies, OwnRows, StoredTensor
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError
from deepmd_ema.files import file_digest
from deepmd_ema.infer.load import load_models
from deepmd_ema.training.run import run_training

pytestmark = pytest.mark.timeout(240)

STEPS = 4
OPTIONS = validated(
    2,
    model__fitting_net__neuron=[7, 7],  # 7 rows are distributed unevenly
    training__checkpoint_format="sharded",
    training__save_freq=2,
    training__disp_freq=2,
    training__averaging=[
        {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True}
    ],
    validating__ema_full_validation=False,
    validating__max_best_ckpt=9,
)
WHOLE = [{"name": "whole", "type": "swa", "layout": "full_tensor"}]


def payload(step=1):
    """Return a training checkpoint in which some tensors are to be distributed, and the same with
    whole tensors.
    """
    moment, none = torch.full((2, 3), float(step)), torch.zeros(0, 3)
    whole = checkpoint_payload(
        step, optimizer={"type": "Adam", "state": {"w": {"exp_avg": moment}}}
    )
    weight, own = whole["model"]["a.weight"] + step, OwnRows(0, 1, HostCopies())
    whole["model"] |= {"w": weight, "again": weight, "none": none}
    same, state = own.owned(weight), {"w": {"exp_avg": own.owned(moment)}}
    model = {**whole["model"], "w": same, "again": same, "none": own.owned(none)}
    return {
        **whole,
        "model": model,
        "optimizer": {"type": "Adam", "state": state},
    }, whole


def write(path, step=1):
    checkpoint.save(Path(path), payload(step)[0], world=World())
    return Path(path)


def damage(path, at=-40):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_rows_that_every_rank_holds_are_shared_out_without_gaps():
    small, large = torch.randn(5, 3), torch.randn(4099, 3)
    of_small, parts = (
        [OwnRows(rank, 4, HostCopies())(t) for rank in range(4)] for t in (small, large)
    )
    assert all(torch.equal(part, small) for part in of_small)  # rank 0 writes all of it
    assert all(
        part.part.untyped_storage().nbytes() == part.part.nbytes for part in parts
    )
    assert torch.equal(torch.cat([part.part for part in parts]), large)
    assert [part.first for part in parts] == [0, 1025, 2050, 3075]


CHANGED, MISSING = "{} is not what was written", "incomplete: {} missing"


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("__0_0.distcp", damage, CHANGED),
        (".metadata", damage, CHANGED),
        (HEAD, damage, "{}: "),
        (
            "__0_0.distcp",
            Path.unlink,
            f"{MISSING}, of 2 files with shards. Copy the whole folder",
        ),
        (".metadata", Path.unlink, MISSING),
        (HEAD, Path.unlink, "incomplete: {} is missing"),
    ],
)
def test_a_damaged_folder_is_reported_with_the_one_before(
    tmp_path, capsys, file, change, says
):
    older, newest = (
        write(tmp_path / "model.ckpt-1.dcp"),
        write(tmp_path / "model.ckpt-2.dcp", step=2),
    )
    change(newest / file)
    assert main(["show", str(newest)]) == 2
    said = capsys.readouterr().err
    assert f"{newest}: damaged, {says.format(file)}" in said
    assert f"The newest intact checkpoint before it is {older}" in said
    assert "Traceback" not in said


def test_a_table_of_tensors_cannot_run_a_program(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was here"),)

    folder = write(tmp_path / "model.ckpt-1.dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    head = torch.load(folder / HEAD, weights_only=True)
    head["shards"]["files"][".metadata"] = file_digest(folder / ".metadata")
    del head["digest"]
    torch.save(head, folder / HEAD)
    with pytest.raises(
        CheckpointError, match=r"\.metadata is not the table of its tensors"
    ):
        checkpoint.load(folder)
    assert not (tmp_path / "was here").exists()


def test_the_folder_around_a_checkpoint_is_made_if_it_is_missing(tmp_path):
    path = write(tmp_path / "run" / "weights" / "model.ckpt-1.dcp")
    assert_same(checkpoint.load(path)["model"], payload()[1]["model"])


def test_a_folder_that_a_rank_cannot_see_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "deepmd_ema.checkpoint.sharded._make_part",
        lambda path: path.with_name("elsewhere"),
    )
    with pytest.raises(
        CheckpointError,
        match=r"rank 0 does not see the folder.*a folder that all ranks share",
    ):
        write(tmp_path / "model.ckpt-1.dcp")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_change_of_the_disk_leaves_the_old_or_the_new_folder(tmp_path):
    seen = set()
    for at in range(1, 60):
        folder = tmp_path / str(at) / "model.ckpt-1.dcp"
        folder.parent.mkdir()
        write(folder)
        killed = killed_at(at, partial(write, folder, step=2))
        found = checkpoint.load(folder)
        step = found["step"]
        assert_same(found, payload(step)[1])
        assert found["model"]["w"] is found["model"]["again"]  # it is on the disk once
        seen.add(step)
        write(folder, step=3)  # continues, and clears away what was left
        assert checkpoint.load(folder)["step"] == 3
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        if not killed:
            break
    assert (killed, seen, at > 10) == (False, {1, 2}, True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    home = tmp_path_factory.mktemp("sharded")
    write_system(home / "data", frames=8, natoms=6, seed=1)
    write_system(home / "valid", frames=2, natoms=6, seed=2)
    return home


@pytest.fixture(scope="module")
def run(data):
    """Return a function that gives the folder of a run, unbroken or restarted from the middle of
    another one.
    """

    @cache
    def made(
        stage, ranks, origin=None, form="sharded", num_steps=STEPS, whole=False, **more
    ):
        options = {
            **OPTIONS,
            "training__zero_stage": stage,
            "training__checkpoint_format": form,
            **more,
        }
        options["training__averaging"] = [
            *OPTIONS["training__averaging"],
            *WHOLE * whole,
        ]
        config = tiny_input(
            [data / "data"], [data / "valid"], num_steps=num_steps, **options
        )
        for section in ("training_data", "validation_data"):
            config["training"][section]["batch_size"] = 2 // ranks
        folder, how = data / f"{stage}-{ranks}-{len(list(data.iterdir()))}", {}
        if origin is not None:
            there = next(origin.glob(f"model.ckpt-{STEPS // 2}.*"))
            how = {"restart": there.name, "allow_config_change": True}
        train(folder, ranks, config, origin=origin, **how)
        return folder

    return made


def restart_and_count(folder, start):
    """Restart as one rank; return how many stored elements it has read, and how many tensors it has
    gathered.
    """
    os.chdir(folder)
    rows, read = [], sharded._read_rows
    with (
        mock.patch.object(
            sharded, "_read_rows", lambda *given: rows.append(read(*given)) or rows[-1]
        ),
        mock.patch.object(
            tensors, "all_gather_rows", wraps=tensors.all_gather_rows
        ) as gather,
    ):
        run_training("input.json", device="cpu", restart=start)
    return sum(part.numel() for part in rows), gather.call_count


def contents(folder, form="dcp"):
    """Return the content of every checkpoint of a run by its name, without what names the format
    and the run.
    """
    found = {}
    for path in sorted(
        [*folder.glob(f"*.{form}"), *folder.glob(f"snapshots/*.{form}")]
    ):
        content = checkpoint.load(path)
        found[path.stem] = {
            name: part
            for name, part in content.items()
            if name not in ("config", "run")
        }
    return found


def test_every_file_of_a_run_has_the_content_of_a_gathered_one(run):
    sharded, gathered = contents(run(0, 1)), contents(run(0, 1, form="gathered"), "pt")
    assert sharded.keys() == gathered.keys()
    assert {
        "model.ckpt-4",
        "model_ema.ckpt-4",
        "model_p05.ckpt-2",
        "best.ckpt-4.t-1",
        "model.ckpt",
    } <= sharded.keys()
    assert_same(sharded, gathered)


def assert_same_run(one, other):
    assert_same(contents(one), contents(other))
    for table in ("lcurve.out", "val.log"):
        assert (one / table).read_text() == (other / table).read_text()


def test_a_restart_at_stage_3_is_bitwise_and_no_rank_gathers_a_tensor_to_save_or_load(
    run, data
):
    whole, again = run(3, 2), data / "again"
    shutil.copytree(whole, again, symlinks=True)
    start = again / f"model.ckpt-{STEPS // 2}.dcp"
    total = sum(stored.numel() for stored in _stored(checkpoint.load_shards(start)))
    counts = [
        ended.value for ended in run_ranks(2, restart_and_count, str(again), start.name)
    ]
    for read, gathered in counts:
        assert gathered == 0
        assert read < 0.6 * total  # rows of 7 are 4 and 3
    sizes = [
        (again / f"model.ckpt-{STEPS}.dcp" / f"__{rank}_0.distcp").stat().st_size
        for rank in range(2)
    ]
    assert max(sizes) < 0.6 * sum(sizes)
    assert_same_run(whole, again)


def test_a_restart_at_stage_1_is_bitwise_and_sharded_weights_are_the_same_bits_on_one_rank(
    run,
):
    whole = run(1, 2, whole=True)
    assert_same_run(whole, run(1, 2, whole, whole=True))
    before = run(3, 2)
    folders = before, run(0, 1, before, num_steps=STEPS // 2)
    old, new = (
        checkpoint.load(folder / f"model.ckpt-{STEPS // 2}.dcp") for folder in folders
    )
    for part in ("model", "optimizer", "averages", "streams"):
        assert_same(old[part], new[part], part)


def test_the_format_may_change_at_a_restart(run):
    gathered = run(0, 1, form="gathered")
    folder = run(0, 1, gathered)
    assert (folder / "checkpoint").read_text() == f"model.ckpt-{STEPS}.dcp"
    assert not (folder / "model.ckpt.pt").is_symlink()  # would lead to an older one
    assert_same(contents(folder)["model.ckpt"], contents(gathered, "pt")["model.ckpt"])


def test_every_command_reads_a_sharded_checkpoint(
    run, data, tmp_path, monkeypatch, capsys
):
    sharded, gathered = run(0, 1), run(0, 1, form="gathered")
    for folder, form in ((sharded, "dcp"), (gathered, "pt")):
        out = tmp_path / form
        out.mkdir()
        for words in (
            [
                "freeze",
                "-c",
                f"{folder}/model.ckpt.{form}",
                "--average",
                "p05",
                "-o",
                f"{out}/model.dp",
            ],
            ["convert", f"{folder}/best.ckpt-{STEPS}.t-1.{form}", f"{out}/best.pt"],
            [
                "test",
                "-m",
                f"{folder}/model_ema.ckpt.{form}",
                "-s",
                f"{data}/valid",
                "-d",
                f"{out}/detail",
            ],
            ["show", f"{folder}/model.ckpt.{form}"],
            [
                "change-bias",
                f"{folder}/model.ckpt.{form}",
                "-b",
                "-3",
                "-6",
                "-o",
                f"{out}/bias.pt",
            ],
            [
                "posthoc",
                str(folder),
                "--valid-data",
                f"{folder}/input.json",
                "-o",
                f"{out}/posthoc.pt",
            ],
        ):
            assert main(words) == 0, (words, capsys.readouterr().err)
    names = sorted(path.name for path in (tmp_path / "pt").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "dcp").iterdir())
    for name in ("model.dp", "best.pt", "bias.pt", "posthoc.pt"):
        models = [
            load_models(tmp_path / form / name).models[""].model.state_dict()
            for form in ("dcp", "pt")
        ]
        assert_same(*models)


def test_a_new_run_starts_from_sharded_weights_and_sets_the_folders_of_an_earlier_one_aside(
    run, tmp_path, monkeypatch
):
    shutil.copytree(run(0, 1), tmp_path / "run", symlinks=True)
    before = contents(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    run_training(
        "input.json", device="cpu", init_model=str(run(0, 1) / "model_ema.ckpt.dcp")
    )
    assert_same(contents(tmp_path / "run" / "earlier-1"), before)
    assert (
        checkpoint.load("earlier-1")["step"] == checkpoint.load(".")["step"] == STEPS
    )  # by its pointer


def test_old_folders_are_removed_and_best_ones_stay(run):
    options = {
        "training__save_freq": 1,
        "training__max_ckpt_keep": 2,
        "validating__max_best_ckpt": 1,
    }
    folder = run(0, 1, **options)
    names = {path.name for path in folder.glob("*.dcp") if not path.is_symlink()}
    assert {name for name in names if name.startswith("model.")} == {
        "model.ckpt-3.dcp",
        "model.ckpt-4.dcp",
    }
    assert len([name for name in names if name.startswith("best.")]) == 1
    assert len(list(folder.glob("snapshots/*.dcp"))) == STEPS
    assert not [path for path in folder.rglob("*") if ".part" in path.name]


def _stored(tree):
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _stored(value)
