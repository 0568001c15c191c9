"""The command line: what it takes, what it refuses and how, and with which exit code it leaves."""

import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import tiny_input
from toy_models import SECTIONS, TYPES

from deepmd_ema import checkpoint, cli
from deepmd_ema.errors import Interrupted, UserError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.report.curves import Curve


def run_python(*words, **options):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, **options
    )


def test_the_command_line_loads_nothing_heavy():
    heavy = {"torch", "numpy", "dargs", "yaml", "h5py", "vesin", "logging"}
    code = f"import sys, deepmd_ema.cli; print({heavy} & set(sys.modules))"
    assert run_python("-c", code).stdout.strip() == "set()"


# imported by nothing that a run on one process without compiled code needs; together they take over
# a second
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "sympy",
    "matplotlib",
    "h5py",
    "yaml",
    "lmdb",
    "scipy",
    "torch.utils.tensorboard",
}


# dpa3 and dpa4c take derivatives by torch.autograd.grad, which imports sympy (torch 2.13)
@pytest.mark.parametrize(
    ("name", "heavy"),
    [("se_e2_a", HEAVY), ("dpa3", HEAVY - {"sympy"}), ("dpa4c", HEAVY - {"sympy"})],
)
def test_a_run_loads_no_more_than_it_needs(name, heavy, water_like, tmp_path):
    """Half of the time until the first step was spent on importing torch's compiler and sharded
    tensors.
    """
    config = tiny_input([water_like], type_map=TYPES) | {"optimizer": {"type": "AdamW"}}
    config["model"]["descriptor"] = SECTIONS[name]
    (tmp_path / "input.json").write_text(json.dumps(config))
    code = (
        "import gc, sys; from deepmd_ema.cli import main; code = main(['train', 'input.json']); "
        f"print(code, gc.isenabled(), gc.get_freeze_count() > 0, {heavy!r} & set(sys.modules))"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "0 True True set()", done.stderr


def test_a_mistake_in_the_input_is_reported_before_torch_is_imported(tmp_path):
    """It took as long as the import of everything, three seconds."""
    (tmp_path / "input.json").write_text('{"modle": {}}')
    code = (
        "import sys; from deepmd_ema.cli import main; print(main(['train', 'input.json']), "
        "'torch' in sys.modules)"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "2 False"
    assert "modle" in done.stderr


@pytest.mark.parametrize("command", [[], *([name] for name in cli.COMMANDS)])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0
    assert "usage: dp-ema" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trian"],
            "the command 'trian' is unknown. Did you mean train? Known: init, train, check",
        ),
        (
            ["compress"],
            "-i frozen_model.pth: is not there. Freeze a model first: dp-ema freeze -o "
            "frozen_model.pth",
        ),
        (
            ["compress", "-i", "m.pt2", "-o", "n.pth"],
            "-o n.pth: expected a name that ends in .pt2, as m.pt2 does.",
        ),
        (["doc-train-input"], "use `dp-ema doc`"),
        (
            ["train", "a.json", "--retsart", "x"],
            "train has no option --retsart. Did you mean --restart?",
        ),
        (
            ["train", "a.json", "-t", "x", "-i", "y"],
            "--init-frz-model: not allowed with argument -t/--finetune",
        ),
        (["train", "a.json", "-m", "master"], "train -m: rank 0 speaks"),
        (
            ["--tf", "train", "a.json"],
            "--tf: there is one backend, PyTorch: leave it out, or use --pt",
        ),
        (
            ["-b", "jax", "train", "a.json"],
            "'jax': expected a backend that uses PyTorch: pt, pytorch, pt-expt",
        ),
        (
            ["freeze", "--lower-kind", "graph"],
            "--lower-kind graph: frozen_model.dp takes neighbor lists (nlist)",
        ),
        (["show", "x", "-v", "7"], "'7': expected DEBUG, INFO, WARNING or ERROR"),
        (
            ["train", "a.json", "--nproc-per-node", "0"],
            "'0': expected a number of processes, gpu or auto",
        ),
        (
            ["freeze", "--dp", ""],
            "argument --dp: '': expected a path, and this is empty",
        ),
        (
            ["train", "a.json", "--pt"],
            "train --pt: give the backend before the command, or leave it out",
        ),
        (
            ["init", "new", "--replay", "old"],
            "init --replay: is an option for fine-tuning",
        ),
        (
            ["init", "new", "--finetune", "old.pt", "--rcut", "5"],
            "init --rcut: the model is that of --finetune",
        ),
        (
            ["init", "a.xyz", "-o", "absent/input.yaml"],
            "-o absent/input.yaml: absent is no folder that can be written to.",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_message(words, message, capsys):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("dp-ema: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("no such file"), 2, "dp-ema: no such file\n"),
        (KeyboardInterrupt(), 130, "dp-ema: stopped by Ctrl-C\n"),
        (Interrupted("stopped; continue with X", 2), 130, "stopped; continue with X\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "needs torch, which is not installed. pip",
        ),
        (
            ModuleNotFoundError("x", name="matplotlib.figure"),
            2,
            "pip install 'dp-ema[plot]'",
        ),
        (
            MemoryError(),
            2,
            "dp-ema: out of memory. Use a smaller batch_size, fewer neighbors (rcut, sel) or "
            "smaller",
        ),
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"
            ),
            2,
            "dp-ema: out of memory (tried to allocate 20.00 GiB). Use a smaller batch_size",
        ),
        (
            ZeroDivisionError("division\nby zero"),
            1,
            "ZeroDivisionError: division by zero\nThis should not happen. Run",
        ),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_code(
    monkeypatch, error, code, message, capsys
):
    monkeypatch.setattr("deepmd_ema.cli.models.show", Mock(side_effect=error))
    assert cli.main(["show", "input.json"]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [["--debug", "show", "x"], ["show", "--debug", "x"], ["show", "x", "--debug"]],
)
def test_debug_shows_the_traceback_wherever_it_is(monkeypatch, words, capsys):
    monkeypatch.setattr(
        "deepmd_ema.cli.models.show", Mock(side_effect=ZeroDivisionError("by zero"))
    )
    assert cli.main(words) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("dp-ema: ZeroDivisionError: by zero\n")


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "import sys; from deepmd_ema import cli; "
        "from deepmd_ema.cli import models; models.show = lambda args: print('x\\n' * 200000); "
        "sys.exit(cli.main(['show', 'x']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
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
    (tmp_path / "input.json").write_text(
        '{"model": {}, "training": {"numb_steps": "x"}}'
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run_python(
        "-m", "deepmd_ema", "check", "input.json", cwd=tmp_path, env=environ
    )
    assert result.returncode == 2
    assert "numb_steps" in result.stderr
    assert "torch" not in result.stderr
    result = run_python("-m", "deepmd_ema", "show", "x.pt", cwd=tmp_path, env=environ)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "dp-ema: this needs torch, which is not installed. pip install torch"
    )


@pytest.mark.parametrize(
    "words",
    [["check", "input.json"], ["doc"], ["show", "model.ckpt.pt"], ["plot", "."]],
)
def test_a_command_without_a_log_refuses_a_file_for_it(words, capsys):
    """The file was not written, without a message."""
    for place in (0, len(words)):
        assert cli.main([*words[:place], "-l", "a.log", *words[place:]]) == 2
        reported = (
            f"dp-ema: -l a.log: {words[0]} keeps no log. Its output is kept by `dp-ema {words[0]} "
            "... > FILE`.\n"
        )
        assert capsys.readouterr().err == reported


# ---- a tiny run through the commands

STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like, water_like_valid):
    folder = tmp_path_factory.mktemp("run")
    config = tiny_input(
        [water_like],
        [water_like_valid],
        num_steps=STEPS,
        training__enable_ema=True,
        training__ema_decay=0.8,
        training__save_freq=6,
        validating__full_validation=True,
        validating__ema_full_validation=True,
        validating__validation_freq=4,
        validating__full_val_start=0,
        validating__validation_metric="F:RMSE",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "input.json").write_text(json.dumps(config))
        assert cli.main(["train", "input.json", "--device", "cpu", "-v", "ERROR"]) == 0
    return folder


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_the_best_file_gives_its_logged_metric_again_to_the_last_bit(
    run, water_like_valid, weights
):
    payload = checkpoint.load(run / "model.ckpt.pt")
    value, step = payload["best"][weights]["records"][0]
    suffix = "" if weights == "live" else "_ema"
    found = measure(run / f"best{suffix}.ckpt-{step}.t-1.pt", [water_like_valid]).total
    assert found.metric("F:RMSE") == value


@pytest.mark.parametrize("use_average", [False, True])
def test_the_log_the_test_and_the_frozen_file_say_the_same(
    run, water_like_valid, tmp_path, monkeypatch, use_average
):
    monkeypatch.chdir(run)
    words = [
        "freeze",
        "-o",
        str(tmp_path / "m.dp"),
        *(["--use-ema"] if use_average else []),
    ]
    assert cli.main(words) == 0
    inside = measure(
        run / "model.ckpt.pt", [water_like_valid], use_average=use_average
    ).total.summary()
    frozen = measure(tmp_path / "m.dp", [water_like_valid]).total.summary()
    assert str(inside) == str(frozen)
    log = Curve(run / ("val_ema.log" if use_average else "val.log"))
    assert log.steps[-1] == STEPS
    np.testing.assert_allclose(
        log.columns["F_RMSE(meV/Å)"][-1], 1000 * inside["rmse_f"], rtol=1e-4
    )


def shell(line, folder, **environ):
    """Run ``dp-ema`` with the words and redirections of ``line`` in a shell."""
    return subprocess.run(
        ["sh", "-c", f'"$0" -m deepmd_ema {line}', sys.executable],
        cwd=folder,
        capture_output=True,
        timeout=100,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("words", ["test -m model.ckpt.pt -s {}", "doc"])
def test_a_full_disk_under_the_results_is_reported(run, water_like_valid, words):
    done = shell(f"{words.format(water_like_valid)} > /dev/full", run)
    assert done.returncode == 2
    assert re.fullmatch(
        rb"dp-ema: .*No space left on device.*Make room on the disk.*\n", done.stderr
    )


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full"])
def test_a_run_continues_without_its_terminal(run, tmp_path, streams):
    (tmp_path / "input.json").write_text((run / "input.json").read_text())
    done = shell(f"train input.json --device cpu {streams}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert checkpoint.load(tmp_path / "model.ckpt.pt")["step"] == STEPS
    for file in (
        "lcurve.out",
        "out.json",
    ):  # nothing else was written into the files that took their numbers
        assert (tmp_path / file).read_bytes() == (run / file).read_bytes()


def test_an_error_without_a_terminal_has_its_exit_code(tmp_path):
    assert shell("train nothing.json 2>/dev/full", tmp_path).returncode == 2
    assert shell("train nothing.json 2>&-", tmp_path).returncode == 2
