"""Sharded checkpoints: folders to which every rank writes its own rows, with the content of a gathered file."""

import io
import json
import os
import pickle
import shutil
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import FullDisk, assert_same, config_parts, tiny_input, training_parts, write_system
from parallel_runs import run_ranks, train
from torch.distributed.checkpoint import metadata

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint import sharded
from deepmd_ema.cli.main import main
from deepmd_ema.config.outputs import HEAD
from deepmd_ema.distributed import tensors
from deepmd_ema.distributed.files import file_digest
from deepmd_ema.distributed.tensors import HostCopies, OwnRows, RowShard, StoredTensor
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, WriteError
from deepmd_ema.infer.load import load_models
from deepmd_ema.training.run import run_training

pytestmark = pytest.mark.timeout(240)

STEPS = 4
OPTIONS = {
    "model__fitting_net__neuron": [7, 7],  # 7 rows are distributed unevenly
    "training__checkpoint_format": "sharded",
    "training__save_freq": 2,
    "training__disp_freq": 2,
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "training__averaging": [{"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True}],
    "validating__full_validation": True,
    "validating__validation_freq": 2,
    "validating__full_val_start": 0,
    "validating__max_best_ckpt": 9,
}
WHOLE = [{"name": "whole", "type": "swa", "layout": "full_tensor"}]


def payload(step=1, rows=6):
    """Return a training checkpoint in which some tensors are to be distributed, and the same with whole tensors."""
    weight, moment = torch.arange(3.0 * rows).view(rows, 3) + step, torch.full((rows, 3), float(step))
    whole = {
        **checkpoint.payload_head("training", "live", step, config_parts(), None),
        **training_parts(),
        "model": {"w": weight, "again": weight, "b": torch.ones(2), "none": torch.zeros(0, 3)},
        "optimizer": {"type": "Adam", "state": {"w": {"step": torch.tensor(3.0), "exp_avg": moment}}},
    }
    own = OwnRows(0, 1, HostCopies())
    shards = {**whole, "model": {**whole["model"], "none": own.owned(whole["model"]["none"])}}
    same = own.owned(weight)
    shards["model"] |= {"w": same, "again": same}
    state = {"step": torch.tensor(3.0), "exp_avg": own.owned(moment)}
    return {**shards, "optimizer": {"type": "Adam", "state": {"w": state}}}, whole


def write(path, step=1, rows=6):
    checkpoint.save(Path(path), payload(step, rows)[0], world=World())
    return Path(path)


def damage(path, at=-40):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_folder_has_the_content_of_a_file(tmp_path):
    folder = write(tmp_path / "model.ckpt-1.dcp")
    found = checkpoint.load(folder)
    assert_same(found, payload()[1])
    assert found["model"]["w"] is found["model"]["again"]  # it is on the disk once
    assert list(found["model"]) == ["w", "again", "b", "none"]
    assert not list(tmp_path.glob("*.part*"))


def test_the_same_content_has_the_same_bytes(tmp_path):
    one, other = (write(tmp_path / name / "model.ckpt-1.dcp") for name in ("one", "other"))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


def test_torch_alone_reads_a_folder(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(write(tmp_path / "model.ckpt-1.dcp"), tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(found["model/w"], payload()[1]["model"]["w"])


def test_a_rank_reads_its_rows_only(tmp_path):
    folder = write(tmp_path / "model.ckpt-1.dcp")
    stored = checkpoint.load_shards(folder)["model"]["w"]
    assert isinstance(stored, StoredTensor)
    assert torch.equal(stored.read(2, 3), payload()[1]["model"]["w"][2:5])
    assert stored.read(6, 0).shape == (0, 3)


@pytest.mark.parametrize("rows", [5, 4099])
def test_rows_that_every_rank_holds_are_shared_out_without_gaps(rows):
    tensor = torch.randn(rows, 3)
    parts = [OwnRows(rank, 4, HostCopies())(tensor) for rank in range(4)]
    if rows == 5:  # small: rank 0 writes all of it
        assert all(torch.equal(part, tensor) for part in parts)
        return
    assert all(
        isinstance(part, RowShard) and part.part.untyped_storage().nbytes() == part.part.nbytes for part in parts
    )
    assert torch.equal(torch.cat([part.part for part in parts]), tensor)
    assert [part.first for part in parts] == [0, 1025, 2050, 3075]


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("__0_0.distcp", damage, "__0_0.distcp is not what was written"),
        (".metadata", damage, ".metadata is not what was written"),
        (HEAD, damage, f"{HEAD}: "),
        (
            "__0_0.distcp",
            Path.unlink,
            "incomplete: __0_0.distcp missing, of 2 files with shards. Copy the whole folder",
        ),
        (".metadata", Path.unlink, "incomplete: .metadata missing"),
        (HEAD, Path.unlink, f"incomplete: {HEAD} is missing"),
        ("__0_0.distcp", lambda path: path.write_bytes(path.read_bytes()[:-1]), "__0_0.distcp is not what was written"),
    ],
)
def test_a_damaged_folder_is_reported_with_the_one_before(tmp_path, capsys, file, change, says):
    older, newest = write(tmp_path / "model.ckpt-1.dcp"), write(tmp_path / "model.ckpt-2.dcp", step=2)
    change(newest / file)
    assert main(["show", str(newest)]) == 2
    said = capsys.readouterr().err
    assert f"{newest}: damaged, {says}" in said
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
    with pytest.raises(CheckpointError, match=r"\.metadata is not the table of its tensors"):
        checkpoint.load(folder)
    assert not (tmp_path / "was here").exists()


class _Attribute:
    """Is pickled as ``getattr(owner, name)``, as Python 3.11.0 to 3.11.3 pickles a member of an enumeration."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_a_table_written_by_python_3_11_2_is_read():
    kind = metadata._MEM_FORMAT_ENCODING
    table = pickle.dumps(_Attribute(kind, "TORCH_PRESERVE_FORMAT"))
    assert sharded._TableUnpickler(io.BytesIO(table)).load() is kind.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(("owner", "name"), [(metadata.Metadata, "__init__"), (metadata._MEM_FORMAT_ENCODING, "mro")])
def test_a_table_cannot_take_other_attributes(owner, name):
    with pytest.raises(pickle.UnpicklingError, match=name):
        sharded._TableUnpickler(io.BytesIO(pickle.dumps(_Attribute(owner, name)))).load()


def test_the_head_alone_is_refused(tmp_path):
    folder = write(tmp_path / "model.ckpt-1.dcp")
    with pytest.raises(CheckpointError, match=r"a part of a sharded checkpoint. Give its folder"):
        checkpoint.load(folder / HEAD)


def test_a_full_disk_keeps_the_older_folder(tmp_path, monkeypatch):
    older = write(tmp_path / "model.ckpt-1.dcp")
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: save(content, FullDisk(file)))
    with pytest.raises(WriteError, match=r"cannot be written .*Make room on the disk.* is whole and still usable"):
        checkpoint.save(tmp_path / "model.ckpt-2.dcp", payload(2)[0], older, world=World())
    assert [path.name for path in tmp_path.iterdir()] == [older.name]


def test_a_folder_that_a_rank_cannot_see_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("deepmd_ema.checkpoint.sharded._make_part", lambda path: path.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match=r"rank 0 does not see the folder.*a folder that all ranks share"):
        write(tmp_path / "model.ckpt-1.dcp")


def write_and_die(path, at):
    """Write the folder again in a child process, killed at change ``at`` of the disk; return whether it was."""
    pid = os.fork()
    if pid == 0:
        left = [at]

        def before(call):
            def change(*given, **how):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*given, **how)

            return change

        for owner, name in [(os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "fsync")]:
            setattr(owner, name, before(getattr(owner, name)))
        torch.save = before(torch.save)
        try:
            write(path, step=2)
            os._exit(0)
        finally:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_kill_at_any_change_of_the_disk_leaves_the_old_or_the_new_folder(tmp_path, is_there):
    struck, seen = 0, set()
    for at in range(1, 60):
        folder = tmp_path / str(at) / "model.ckpt-1.dcp"
        folder.parent.mkdir()
        if is_there:
            write(folder)
        killed = write_and_die(folder, at)
        if is_there or folder.exists():
            step = checkpoint.load(folder)["step"]
            assert_same(checkpoint.load(folder), payload(step)[1])
            seen.add(step)
        write(folder, step=3)  # continues, and clears away what was left
        assert checkpoint.load(folder)["step"] == 3
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        if not killed:
            break
        struck += 1
    assert not killed
    assert struck >= 10
    assert seen == ({1, 2} if is_there else {2})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    home = tmp_path_factory.mktemp("sharded")
    write_system(home / "data", frames=8, natoms=6, seed=1)
    write_system(home / "valid", frames=2, natoms=6, seed=2)
    return home


@pytest.fixture(scope="module")
def run(data):
    """Return a function that gives the folder of a run, unbroken or restarted from the middle of another one."""

    @cache
    def made(stage, ranks, origin=None, form="sharded", num_steps=STEPS, whole=False):
        options = {**OPTIONS, "training__zero_stage": stage, "training__checkpoint_format": form}
        options["training__averaging"] = [*OPTIONS["training__averaging"], *WHOLE * whole]
        config = tiny_input([data / "data"], [data / "valid"], num_steps=num_steps, **options)
        for section in ("training_data", "validation_data"):
            config["training"][section]["batch_size"] = 2 // ranks
        folder, how = data / f"{stage}-{ranks}-{len(list(data.iterdir()))}", {}
        if origin is not None:
            shutil.copytree(origin, folder, symlinks=True)
            there = next(folder.glob(f"model.ckpt-{STEPS // 2}.*"))
            how = {"restart": there.name, "allow_config_change": True}
        if ranks > 1:
            train(folder, ranks, config, **how)
            return folder
        folder.mkdir(exist_ok=True)
        (folder / "input.json").write_text(json.dumps(config))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run_training("input.json", device="cpu", **how)
        return folder

    return made


def restart_and_count(folder, start):
    """Restart as one rank; return how many stored elements it has read, and how many tensors it has gathered."""
    counts = Counter()
    read, gather = sharded._read_rows, tensors.all_gather_rows

    def read_and_count(*given):
        rows = read(*given)
        counts["read"] += rows.numel()
        return rows

    def gather_and_count(*given):
        counts["gathered"] += 1
        return gather(*given)

    os.chdir(folder)
    with (
        mock.patch.multiple(sharded, _read_rows=read_and_count),
        mock.patch.multiple(tensors, all_gather_rows=gather_and_count),
    ):
        run_training("input.json", device="cpu", restart=start)
    return counts["read"], counts["gathered"]


def contents(folder, form="dcp"):
    """Return the content of every checkpoint of a run by its name, without what names the format and the run."""
    found = {}
    for path in sorted([*folder.glob(f"*.{form}"), *folder.glob(f"snapshots/*.{form}")]):
        content = checkpoint.load(path)
        found[path.stem] = {name: part for name, part in content.items() if name not in ("config", "run")}
    return found


def test_every_file_of_a_run_has_the_content_of_a_gathered_one(run):
    sharded, gathered = contents(run(0, 1)), contents(run(0, 1, form="gathered"), "pt")
    assert sharded.keys() == gathered.keys()
    assert {"model.ckpt-4", "model_ema.ckpt-4", "model_p05.ckpt-2", "best.ckpt-4.t-1", "model.ckpt"} <= sharded.keys()
    assert_same(sharded, gathered)


def assert_same_run(one, other):
    assert_same(contents(one), contents(other))
    for table in ("lcurve.out", "val.log"):
        assert (one / table).read_text() == (other / table).read_text()


def assert_same_checkpoint(one, other):
    old, new = (checkpoint.load(folder / f"model.ckpt-{STEPS // 2}.dcp") for folder in (one, other))
    for part in ("model", "optimizer", "averages", "streams"):
        assert_same(old[part], new[part], part)


def test_a_restart_at_stage_3_is_bitwise_and_no_rank_gathers_a_tensor_to_save_or_load(run, data):
    whole, again = run(3, 2), data / "again"
    shutil.copytree(whole, again, symlinks=True)
    start = again / f"model.ckpt-{STEPS // 2}.dcp"
    total = sum(stored.numel() for stored in _stored(checkpoint.load_shards(start)))
    counts = [ended.value for ended in run_ranks(2, restart_and_count, str(again), start.name)]
    for read, gathered in counts:
        assert gathered == 0
        assert read < 0.6 * total  # rows of 7 are 4 and 3
    sizes = [(again / f"model.ckpt-{STEPS}.dcp" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.6 * sum(sizes)
    assert_same_run(whole, again)


def test_a_restart_at_stage_1_is_bitwise(run):
    whole = run(1, 2, whole=True)
    assert_same_run(whole, run(1, 2, whole, whole=True))


def test_a_checkpoint_of_sharded_weights_is_the_same_bits_on_one_rank(run):
    before = run(3, 2)
    assert_same_checkpoint(before, run(0, 1, before, num_steps=STEPS // 2))


def test_a_checkpoint_of_sharded_moments_is_the_same_bits_at_stage_2(run):
    before = run(1, 2, whole=True)
    assert_same_checkpoint(before, run(2, 2, before, num_steps=STEPS // 2, whole=True))


def test_the_format_may_change_at_a_restart(run):
    gathered = run(0, 1, form="gathered")
    folder = run(0, 1, gathered)
    assert (folder / "checkpoint").read_text() == f"model.ckpt-{STEPS}.dcp"
    assert not (folder / "model.ckpt.pt").is_symlink()  # would lead to an older one
    assert_same(contents(folder)["model.ckpt"], contents(gathered, "pt")["model.ckpt"])


def test_every_command_reads_a_sharded_checkpoint(run, data, tmp_path, monkeypatch, capsys):
    sharded, gathered = run(0, 1), run(0, 1, form="gathered")
    for folder, form in ((sharded, "dcp"), (gathered, "pt")):
        out = tmp_path / form
        out.mkdir()
        for words in (
            ["freeze", "-c", f"{folder}/model.ckpt.{form}", "--average", "p05", "-o", f"{out}/model.dp"],
            ["freeze", "-c", str(folder), "-o", f"{out}/live.dp"],
            ["freeze", "-c", f"{folder}/model_ema.ckpt", "-o", f"{out}/ema.dp"],
            ["convert", f"{folder}/best.ckpt-{STEPS}.t-1.{form}", f"{out}/best.pt"],
            ["test", "-m", f"{folder}/model_ema.ckpt.{form}", "-s", f"{data}/valid", "-d", f"{out}/detail"],
            ["show", f"{folder}/model.ckpt.{form}"],
            ["change-bias", f"{folder}/model.ckpt.{form}", "-b", "-3", "-6", "-o", f"{out}/bias.pt"],
            ["posthoc", str(folder), "--valid-data", f"{folder}/input.json", "-o", f"{out}/posthoc.pt"],
        ):
            assert main(words) == 0, (words, capsys.readouterr().err)
    names = sorted(path.name for path in (tmp_path / "pt").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "dcp").iterdir())
    models = [
        [load_models(tmp_path / form / name).models[""].model.state_dict() for form in ("dcp", "pt")]
        for name in names
        if name.endswith((".dp", ".pt"))
    ]
    assert len(models) == 6
    for one, other in models:
        assert_same(one, other)


@pytest.mark.parametrize("how", ["init_model", "finetune"])
def test_a_run_starts_from_the_weights_of_a_sharded_checkpoint(run, tmp_path, monkeypatch, how):
    whole = run(0, 1)
    shutil.copy(whole / "input.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    run_training("input.json", device="cpu", **{how: str(whole / "model_ema.ckpt.dcp")})
    assert checkpoint.load(tmp_path)["step"] == STEPS


def test_a_new_run_sets_the_folders_of_an_earlier_one_aside(run, tmp_path, monkeypatch):
    shutil.copytree(run(0, 1), tmp_path / "run", symlinks=True)
    before = contents(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    run_training("input.json", device="cpu")
    assert_same(contents(tmp_path / "run" / "earlier-1"), before)
    assert checkpoint.load(tmp_path / "run" / "earlier-1")["step"] == STEPS  # by its pointer
    assert_same(contents(tmp_path / "run"), before)


def test_old_folders_are_removed_and_best_ones_stay(data, tmp_path, monkeypatch):
    options = {**OPTIONS, "training__save_freq": 1, "training__max_ckpt_keep": 2, "validating__max_best_ckpt": 1}
    config = tiny_input([data / "data"], [data / "valid"], num_steps=STEPS, **options)
    (tmp_path / "input.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    run_training("input.json", device="cpu")
    names = {path.name for path in tmp_path.glob("*.dcp") if not path.is_symlink()}
    assert {name for name in names if name.startswith("model.")} == {"model.ckpt-3.dcp", "model.ckpt-4.dcp"}
    assert len([name for name in names if name.startswith("best.")]) == 1
    assert len(list(tmp_path.glob("snapshots/*.dcp"))) == STEPS
    assert not [path for path in tmp_path.rglob("*") if ".part" in path.name]


def fail_to_write(folder, rank):
    """Train as one rank, of which ``rank`` has a full disk."""
    os.chdir(folder)
    if os.environ["RANK"] == str(rank):
        save = torch.save
        torch.save = lambda content, file: save(content, FullDisk(file))
    run_training("input.json", device="cpu")


def test_a_rank_that_cannot_write_ends_the_run_with_its_message(run, data):
    folder = data / "full"
    folder.mkdir()
    shutil.copy(run(3, 2) / "input.json", folder)
    first, second = run_ranks(2, fail_to_write, str(folder), 1, may_fail=True)
    assert second.error == "WriteError"
    assert "cannot be written (No space left on device)" in second.message
    assert first.error == "ReportedElsewhere"
    assert not list(folder.glob("*.dcp"))
    assert not list(folder.glob("*.part*"))


def _stored(tree):
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _stored(value)
