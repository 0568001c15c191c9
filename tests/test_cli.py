"""The command line: what it takes, what it refuses and how, and with which exit code it leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import types

import pytest
import torch
from helpers import tiny_input

from deepmd_ema import __version__, cli, utils
from deepmd_ema.cli import loading
from deepmd_ema.errors import (
    ConfigError,
    DataError,
    Interrupted,
    RankLostError,
    ReportedElsewhere,
    Terminated,
    UserError,
)


def run_python(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def failing(monkeypatch):
    """Make `dp-ema show X` raise a given exception."""

    def install(error):
        def run(_):
            raise error

        monkeypatch.setattr("deepmd_ema.cli.models.show", run)

    return install


def test_help_names_every_command():
    result = run_python("-m", "deepmd_ema", "--help")
    assert result.returncode == 0
    for name in cli.COMMANDS:
        assert name in result.stdout


def test_the_command_line_loads_nothing_heavy():
    heavy = {"torch", "numpy", "dargs", "yaml", "h5py", "vesin", "logging"}
    code = f"import sys, deepmd_ema.cli; print({heavy} & set(sys.modules))"
    assert run_python("-c", code).stdout.strip() == "set()"


# imported by nothing that a run on one process without compiled code needs; together they take over a second
HEAVY = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy",
         "matplotlib", "h5py", "yaml", "lmdb", "scipy", "torch.utils.tensorboard"}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_a_run_loads_no_more_than_it_needs(optimizer, water_like, tmp_path):
    """Half of the time until the first step was spent on importing torch's compiler and sharded tensors."""
    config = tiny_input([water_like])
    config |= {"optimizer": {"type": optimizer}}
    (tmp_path / "input.json").write_text(json.dumps(config))
    code = (
        "import gc, sys; from deepmd_ema.cli import main; code = main(['train', 'input.json']); "
        f"print(code, gc.isenabled(), gc.get_freeze_count() > 0, {HEAVY!r} & set(sys.modules))"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "0 True True set()", done.stderr


def test_a_mistake_in_the_input_is_reported_before_torch_is_imported(tmp_path):
    """It took as long as the import of everything, three seconds."""
    (tmp_path / "input.json").write_text('{"modle": {}}')
    code = "import sys; from deepmd_ema.cli import main; print(main(['train', 'input.json']), 'torch' in sys.modules)"
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "2 False"
    assert "modle" in done.stderr


def test_libraries_are_loaded_beforehand_only_where_torch_has_them(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    for spec in (None, importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")):
        monkeypatch.setattr(loading, "find_spec", lambda name, spec=spec: spec)
        loading._load()


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"dp-ema {__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0
    assert "usage: dp-ema" in capsys.readouterr().out


def test_no_command_prints_the_help_and_leaves_with_2(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2
    assert "train a model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "the command 'trian' is unknown. Did you mean train? Known: init, train, check"),
        (["compress"], "-i frozen_model.pth: is not there. Freeze a model first: dp-ema freeze -o frozen_model.pth"),
        (["compress", "-i", "m.dp"], "-i m.dp: expected a .pt2, .pth or .pte file. The networks of a .dp"),
        (["compress", "-i", "m.pt2", "-o", "n.pth"], "-o n.pth: expected a name that ends in .pt2, as m.pt2 does."),
        (["compress", "--step", "0.01"], "compress --step: tables have the number of terms that their error bound"),
        (["doc-train-input"], "use `dp-ema doc`"),
        (["check"], "the following arguments are required: INPUT"),
        (["train", "a.json", "-r", "x", "-i", "y"], "--init-frz-model: not allowed with argument -r/--restart"),
        (["train", "a.json", "--retsart", "x"], "train has no option --retsart. Did you mean --restart?"),
        (["train", "a.json", "-t", "x", "-i", "y"], "--init-frz-model: not allowed with argument -t/--finetune"),
        (
            ["train", "a.json", "-f", "x", "-r", "y"],
            "-r/--restart: not allowed with argument -i/--init-model",
        ),
        (["train", "a.json", "--nproc-per-node", "0"], "'0': expected a number of processes, gpu or auto"),
        (["train", "a.json", "--model-branch=x"], "--model-branch: chooses a model of the file of --finetune or"),
        (["train", "a.json", "--force-load"], "weights are loaded whole"),
        (["train", "a.json", "-m", "master"], "train -m: rank 0 speaks"),
        (["train", "a.json", "--mpi-log", "master"], "rank 0 speaks"),
        (["train", "a.json", "--pt"], "train --pt: give the backend before the command, or leave it out"),
        (["--tf", "train", "a.json"], "--tf: there is one backend, PyTorch: leave it out, or use --pt"),
        (["-b", "jax", "train", "a.json"], "'jax': expected a backend that uses PyTorch: pt, pytorch, pt-expt"),
        (["--pt", "-b", "pt", "train", "a.json"], "-b/--backend: not allowed with argument --pt"),
        (["freeze", "--lower-kind", "edges"], "argument --lower-kind: invalid choice: 'edges'"),
        (["freeze", "--lower-kind", "graph"], "--lower-kind graph: frozen_model.dp takes neighbor lists (nlist)"),
        (
            ["freeze", "--lower-kind", "nlist"],
            "--lower-kind nlist: frozen_model.dp holds the model, not a graph",
        ),
        (["freeze", "--dp", ""], "argument --dp: '': expected a path, and this is empty"),
        (["test", "--shuffle-test"], "frames are taken in order"),
        (["test", "-s", "x", "-f", "y"], "-f/--datafile: not allowed with argument -s/--system"),
        (["show", "x", "-v", "7"], "'7': expected DEBUG, INFO, WARNING or ERROR"),
        (["show", "x", "y"], "show does not know what to do with: y"),
    ],
)
def test_a_wrong_command_line_gets_one_message(words, message, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("dp-ema: ")
    assert "Traceback" not in err


def test_several_mistakes_are_a_numbered_list(capsys):
    assert cli.main(["train", "a.json", "--force-load", "--retsart"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "dp-ema: 2 problems"
    assert err[1].startswith("  1. train --force-load: ")
    assert err[2].startswith("  2. train has no option --retsart.")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no such file"), 2, "dp-ema: no such file\n"),
        (ConfigError(["a", "b"]), 2, "dp-ema: 2 problems in input.json\n  1. a\n  2. b\n"),
        (DataError(["a", "b"]), 2, "dp-ema: 2 problems in the data of input.json\n  1. a\n  2. b\n"),
        (Interrupted("stopped; continue with X", 2), 130, "stopped; continue with X\n"),
        (Interrupted("stopped; continue with X", 15), 143, "stopped; continue with X\n"),
        (KeyboardInterrupt(), 130, "dp-ema: stopped by Ctrl-C\n"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "needs torch, which is not installed. pip"),
        (ModuleNotFoundError("x", name="matplotlib.figure"), 2, "pip install 'dp-ema[plot]'"),
        (ModuleNotFoundError("No module named 'zork'", name="zork"), 1, "dp-ema: ModuleNotFoundError: No module"),
        (ZeroDivisionError("division\nby zero"), 1, "ZeroDivisionError: division by zero\nThis should not happen. Run"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_code(failing, error, code, message, capsys):
    failing(error)
    assert cli.main(["show", "input.json"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (MemoryError(), ""),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), " (unable to allocate 7.45 GiB)"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"),
         " (tried to allocate 20.00 GiB)"),
    ],
)  # fmt: skip
def test_where_memory_runs_out_the_message_says_how_much_and_what_needs_less(failing, error, size, capsys):
    failing(error)
    assert cli.main(["show", "x"]) == 2
    assert capsys.readouterr().err == (
        f"dp-ema: out of memory{size}. Use a smaller batch_size, fewer neighbors (rcut, sel) or smaller layers "
        "(neuron), or a machine with more memory; `dp-ema check --time` measures the memory of some steps.\n"
    )


@pytest.mark.parametrize("words", [["--debug", "show", "x"], ["show", "--debug", "x"], ["show", "x", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_is(failing, words, capsys):
    failing(ZeroDivisionError("by zero"))
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("dp-ema: ZeroDivisionError: by zero\n")


def test_a_long_list_of_problems_fits_one_screen(failing, capsys):
    failing(DataError([f"problem {k}" for k in range(100)]))
    assert cli.main(["show", "input.json"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == cli.MAX_PROBLEMS + 2
    assert err[-1] == "     and 75 more; `dp-ema check` shows all"


def test_another_rank_says_which_it_is(failing, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    failing(UserError("no such file"))
    assert cli.main(["show", "x"]) == 2
    assert capsys.readouterr().err == "dp-ema (rank 3): no such file\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (Interrupted("stopped", 15), 143), (KeyboardInterrupt(), 130), (Terminated(), 143),
     (RankLostError("gone"), 1), (ValueError("a bug"), 1)],
)  # fmt: skip
def test_what_another_rank_reports_is_not_said_again(failing, capsys, error, code):
    elsewhere = ReportedElsewhere()
    elsewhere.__cause__ = error
    failing(elsewhere)
    assert cli.main(["show", "x"]) == code
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_early_is_no_error():
    code = "import sys; from deepmd_ema import cli; " \
           "from deepmd_ema.cli import models; models.show = lambda args: print('x\\n' * 200000); " \
           "sys.exit(cli.main(['show', 'x']))"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=30) == cli.EXIT_PIPE
    assert err == b""


def test_check_without_torch_still_checks_the_options(tmp_path):
    """A machine that only edits inputs need not have torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    (tmp_path / "input.json").write_text('{"model": {}, "training": {"numb_steps": "x"}}')
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run_python("-m", "deepmd_ema", "check", "input.json", cwd=tmp_path, env=environ)
    assert result.returncode == 2
    assert "numb_steps" in result.stderr
    assert "torch" not in result.stderr
    result = run_python("-m", "deepmd_ema", "show", "x.pt", cwd=tmp_path, env=environ)
    assert result.returncode == 2
    assert result.stderr.startswith("dp-ema: this needs torch, which is not installed. pip install torch")


def test_the_manual_and_the_schema_are_printed(capsys):
    assert cli.main(["doc", "training.ema_decay"]) == 0
    assert "training.ema_decay" in capsys.readouterr().out
    assert cli.main(["doc", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out)["type"] == "object"
    assert cli.main(["doc", "training.no_such_option"]) == 2


def test_options_are_checked_without_the_data(tmp_path, capsys):
    path = tmp_path / "input.json"
    path.write_text(json.dumps(tiny_input(["nowhere"])))
    assert cli.main(["check", str(path), "--config-only"]) == 0
    assert "the options are good" in capsys.readouterr().out
    assert cli.main(["check", str(path)]) == 2
    assert "nowhere: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "error", "speaks"),
    [
        (0, Terminated, True),
        (1, Terminated, True),
        (2, Terminated, False),
        (0, KeyboardInterrupt, True),
        (1, KeyboardInterrupt, False),
    ],
)
def test_a_launcher_that_ends_the_ranks_while_torch_is_loaded_leaves_a_message(
    rank, error, speaks, monkeypatch, capsys
):
    """When rank 0 was killed, nobody reported anything."""

    class Loading(types.ModuleType):
        def __getattr__(self, name):
            raise error

    monkeypatch.setitem(sys.modules, "deepmd_ema.training.run", Loading("deepmd_ema.training.run"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", str(rank))
    assert cli.main(["train", "input.json"]) == (143 if error is Terminated else 130)
    said = capsys.readouterr().err
    assert ("stopped by" in said) is speaks
    if speaks and error is Terminated:
        assert said == f"dp-ema (rank {rank}): stopped by SIGTERM outside the training steps; nothing was saved\n"


@pytest.mark.parametrize("words", [["check", "input.json"], ["doc"], ["show", "model.ckpt.pt"], ["plot", "."]])
def test_a_command_without_a_log_refuses_a_file_for_it(words, capsys):
    """The file was not written, without a message."""
    for place in (0, len(words)):
        assert cli.main([*words[:place], "-l", "a.log", *words[place:]]) == 2
        reported = f"dp-ema: -l a.log: {words[0]} keeps no log. Its output is kept by `dp-ema {words[0]} ... > FILE`.\n"
        assert capsys.readouterr().err == reported


def test_options_before_the_command_count(tmp_path, monkeypatch, capsys):
    """They were taken and overwritten by the defaults of the command."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["-l", "a.log", "-v", "DEBUG", "freeze", "-c", "nowhere.pt"]) == 2
    assert (tmp_path / "a.log").is_file()
    assert "nowhere.pt" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, True), (2, False)])
def test_a_rank_that_is_ended_while_the_command_line_is_loaded_leaves_a_message(rank, speaks, tmp_path):
    """It was silent until the first imports were done."""
    code = (
        "import builtins, os, signal, deepmd_ema.__main__ as program\n"
        "load = builtins.__import__\n"
        "def end(name, *rest):\n"
        "    if name == 'deepmd_ema.cli': os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = end\n"
        "program.main()"
    )
    found = run_python("-c", code, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"})
    assert found.returncode == (143 if speaks else -15)
    assert found.stderr == f"dp-ema (rank {rank}): stopped by SIGTERM\n" * speaks


def test_a_name_cannot_steer_the_terminal(capsys):
    """Names of files come from archives and other people."""
    assert cli.main(["show", "\x1b[2Jmodel.pt"]) == 2
    assert capsys.readouterr().err.startswith("dp-ema: \\x1b[2Jmodel.pt: no such file")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of the GNU C library")
def test_freed_memory_is_kept_unless_the_user_says_what_to_do_with_it():
    """In a process of its own: it lasts."""
    code = """
import resource, sys
import torch
from deepmd_ema.utils import keep_freed_memory
kept = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)  # more than the C library keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults() < 4_000)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    for more, said in (({}, "True True"), ({"MALLOC_ARENA_MAX": "2"}, "False False")):
        assert run_python("-c", code, env=env | more).stdout.strip() == said


def test_of_freed_memory_no_more_is_kept_than_requested(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    set_to = {}
    library = types.SimpleNamespace(mallopt=lambda option, value: set_to.update({option: value}) or 1)
    monkeypatch.setattr(utils.ctypes, "CDLL", lambda _: library)
    assert utils.keep_freed_memory(512 << 20)
    assert set_to == {-1: 512 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not utils.keep_freed_memory(512 << 20)
