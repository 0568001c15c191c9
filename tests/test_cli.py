"""The command line: what it takes, what it refuses and how, and with which exit code it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import tiny_input

from deepmd_ema import cli
from deepmd_ema.errors import Interrupted, UserError


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


def test_the_command_line_loads_nothing_heavy():
    heavy = {"torch", "numpy", "dargs", "yaml", "h5py", "vesin", "logging"}
    code = f"import sys, deepmd_ema.cli; print({heavy} & set(sys.modules))"
    assert run_python("-c", code).stdout.strip() == "set()"


# imported by nothing that a run on one process without compiled code needs; together they take over a second
HEAVY = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy",
         "matplotlib", "h5py", "yaml", "lmdb", "scipy", "torch.utils.tensorboard"}  # fmt: skip


def test_a_run_loads_no_more_than_it_needs(water_like, tmp_path):
    """Half of the time until the first step was spent on importing torch's compiler and sharded tensors."""
    config = tiny_input([water_like]) | {"optimizer": {"type": "AdamW"}}
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


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0
    assert "usage: dp-ema" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["trian"], "the command 'trian' is unknown. Did you mean train? Known: init, train, check"),
    (["compress"], "-i frozen_model.pth: is not there. Freeze a model first: dp-ema freeze -o frozen_model.pth"),
    (["compress", "-i", "m.pt2", "-o", "n.pth"], "-o n.pth: expected a name that ends in .pt2, as m.pt2 does."),
    (["doc-train-input"], "use `dp-ema doc`"),
    (["train", "a.json", "--retsart", "x"], "train has no option --retsart. Did you mean --restart?"),
    (["train", "a.json", "-t", "x", "-i", "y"], "--init-frz-model: not allowed with argument -t/--finetune"),
    (["train", "a.json", "-m", "master"], "train -m: rank 0 speaks"),
    (["--tf", "train", "a.json"], "--tf: there is one backend, PyTorch: leave it out, or use --pt"),
    (["-b", "jax", "train", "a.json"], "'jax': expected a backend that uses PyTorch: pt, pytorch, pt-expt"),
    (["freeze", "--lower-kind", "graph"], "--lower-kind graph: frozen_model.dp takes neighbor lists (nlist)"),
    (["show", "x", "-v", "7"], "'7': expected DEBUG, INFO, WARNING or ERROR"),
    (["train", "a.json", "--nproc-per-node", "0"], "'0': expected a number of processes, gpu or auto"),
    (["freeze", "--dp", ""], "argument --dp: '': expected a path, and this is empty"),
    (["train", "a.json", "--pt"], "train --pt: give the backend before the command, or leave it out"),
    (["init", "a.xyz", "-o", "absent/input.yaml"], "-o absent/input.yaml: absent is no folder that can be written to."),
])  # fmt: skip
def test_a_wrong_command_line_gets_one_message(words, message, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("dp-ema: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "code", "message"), [
    (UserError("no such file"), 2, "dp-ema: no such file\n"), (KeyboardInterrupt(), 130, "dp-ema: stopped by Ctrl-C\n"),
    (Interrupted("stopped; continue with X", 2), 130, "stopped; continue with X\n"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "needs torch, which is not installed. pip"),
    (ModuleNotFoundError("x", name="matplotlib.figure"), 2, "pip install 'dp-ema[plot]'"),
    (MemoryError(), 2, "dp-ema: out of memory. Use a smaller batch_size, fewer neighbors (rcut, sel) or smaller"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), 2,
     "dp-ema: out of memory (tried to allocate 20.00 GiB). Use a smaller batch_size"),
    (ZeroDivisionError("division\nby zero"), 1, "ZeroDivisionError: division by zero\nThis should not happen. Run"),
])  # fmt: skip
def test_an_error_becomes_a_message_and_an_exit_code(failing, error, code, message, capsys):
    failing(error)
    assert cli.main(["show", "input.json"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--debug", "show", "x"], ["show", "--debug", "x"], ["show", "x", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_is(failing, words, capsys):
    failing(ZeroDivisionError("by zero"))
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("dp-ema: ZeroDivisionError: by zero\n")


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


@pytest.mark.parametrize("words", [["check", "input.json"], ["doc"], ["show", "model.ckpt.pt"], ["plot", "."]])
def test_a_command_without_a_log_refuses_a_file_for_it(words, capsys):
    """The file was not written, without a message."""
    for place in (0, len(words)):
        assert cli.main([*words[:place], "-l", "a.log", *words[place:]]) == 2
        reported = f"dp-ema: -l a.log: {words[0]} keeps no log. Its output is kept by `dp-ema {words[0]} ... > FILE`.\n"
        assert capsys.readouterr().err == reported
