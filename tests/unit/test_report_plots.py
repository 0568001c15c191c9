"""Learning curves and parity plots: what is read, what is drawn, what is refused."""

import json

import numpy as np
import pytest
from helpers import tiny_input

from deepmd_ema.errors import UserError
from deepmd_ema.report.curves import Curve, curve_files
from deepmd_ema.report.plots import plot_curves, plot_parity

LCURVE_TEXT = """\
# step       rmse_val    rmse_trn    rmse_e_val  rmse_e_trn    rmse_f_val  rmse_f_trn   lr      
# If there is no available reference data, rmse_*_{val,trn} will print nan
      1      2.55e+01    2.48e+01      5.86e-02    6.36e-02      8.07e-01    7.84e-01    1.0e-03
    100      1.55e+01    1.48e+01      2.86e-02    3.36e-02      5.07e-01    4.84e-01    8.0e-04
"""  # noqa: W291
VAL_TEXT = """\
# step E_MAE(meV/atom) E_RMSE(meV/atom) F_MAE(meV/Å) F_RMSE(meV/Å) S_MAE(meV/Å³) S_RMSE(meV/Å³)
# E uses per-atom energy, F uses component-wise force errors
  50       44.621           44.740         608.14       817.46          nan           nan      
# saved best checkpoint: best.ckpt-50.t-1.pt (E:MAE = 44.621 meV/atom)
 100       40.621           41.740         508.14       717.46          nan           nan      
"""  # noqa: W291
PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lcurve.out").write_text(LCURVE_TEXT)
    (folder / "val.log").write_text(VAL_TEXT, encoding="utf-8")
    (folder / "val_ema.log").write_text(
        VAL_TEXT.replace("best.ckpt", "best_ema.ckpt"), encoding="utf-8"
    )
    return folder


def test_files_of_tasks_know_their_task_and_weights(tmp_path):
    """By the names of tasks: ice_ih_ema could be an average of ice."""
    (tmp_path / "out.json").write_text(
        json.dumps({"model": {"model_dict": {"ice": {}, "ice_ih": {}}}})
    )
    rows = LCURVE_TEXT.splitlines()
    names = [
        f"{name}_{task}" for task in ("ice", "ice_ih") for name in rows[0].split()[2:-1]
    ]
    values = [
        [*row.split()[:-1], *row.split()[1:-1], row.split()[-1]] for row in rows[2:]
    ]
    lines = [f"# step {' '.join(names)} lr", *(" ".join(row) for row in values)]
    (tmp_path / "lcurve.out").write_text("\n".join(lines) + "\n")
    expected = {"ice": ("ice", "live"), "ice_ih": ("ice_ih", "live"), "ice_ema": ("ice", "ema"),
                "ice_ih_ema": ("ice_ih", "ema")}  # fmt: skip
    for name, of in expected.items():
        path = tmp_path / f"val_{name}.log"
        path.write_text(
            VAL_TEXT.replace("best.ckpt", f"best_{name}.ckpt"), encoding="utf-8"
        )
        assert (Curve(path).task, Curve(path).weights) == of
    (whole,) = Curve(tmp_path / "val_ice.log").of_tasks()
    assert whole.task == "ice"
    first, second = Curve(tmp_path / "lcurve.out").of_tasks()
    assert (first.task, second.task) == ("ice", "ice_ih")
    assert {"rmse_e_val", "rmse_f_trn", "lr"} <= set(first.columns)
    assert first.columns.keys() == second.columns.keys()


def test_a_header_and_steps_that_a_restart_wrote_again_count_once(run):
    """DeePMD-kit's pt backend writes the header again and repeats the steps after the restored
    one.
    """
    header, rows = LCURVE_TEXT.splitlines()[:2], LCURVE_TEXT.splitlines()[2:]
    again = [
        rows[1].replace("2.86e-02", "9.99e-02"),
        rows[1].replace("    100", "    200"),
    ]
    path = run / "lcurve.out"
    path.write_text("\n".join([*header, *rows, *header, *again]) + "\n")
    curve = Curve(path)
    assert curve.steps.tolist() == [1, 100, 200]
    assert curve.columns["rmse_e_val"].tolist() == [0.0586, 0.0999, 0.0286]


def test_rows_are_read_under_the_header_before_them(tmp_path):
    """The columns of a run change where a restart has other data or another metric."""
    path = tmp_path / "lcurve.out"
    path.write_text(
        "# step rmse_e_trn lr\n1 10 0.3\n2 20 0.2\n"
        "# step rmse_e_val rmse_e_trn lr\n3 31 30 0.1\n"
        "# step rmse_e_trn lr\n4 40 0.05\n"
    )
    columns = Curve(path).columns
    assert columns["rmse_e_trn"].tolist() == [10, 20, 30, 40]
    np.testing.assert_array_equal(columns["rmse_e_val"], [np.nan, np.nan, 31, np.nan])
    assert columns["lr"].tolist() == [0.3, 0.2, 0.1, 0.05]


@pytest.mark.parametrize(("text", "message"), [
    ("", "no header line"), (LCURVE_TEXT.split("      1 ")[0], "no rows yet"),
    (LCURVE_TEXT + "  200  1.0\n", "line 5: 2 numbers, expected 8"),
    ("# step rmse_trn lr\nnan 1 1\n", "line 2: step nan, expected a whole number"),
    ("# step rmse_trn lr\n1.5 1 1\n", "line 2: step 1.5, expected a whole number"),
])  # fmt: skip
def test_a_file_that_is_no_curve_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "lcurve.out"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Curve(path)


def test_before_the_first_full_validation_the_learning_curve_is_drawn_and_what_is_missing_is_said(
    run, tmp_path, caplog
):
    config = tiny_input(["a"], ["b"], training__enable_ema=True)
    validated = {"full_validation": True, "ema_full_validation": True}
    (run / "out.json").write_text(json.dumps(config | {"validating": validated}))
    (run / "val.log").write_text(VAL_TEXT.partition("  50 ")[0], encoding="utf-8")
    (run / "val_ema.log").unlink()
    for number, files in enumerate(
        ([run], [run / name for name in ("lcurve.out", "val.log", "val_ema.log")])
    ):
        assert plot_curves(files, tmp_path / f"{number}.png").read_bytes()[:4] == PNG
        assert (
            f"not drawn: {run / 'val.log'}: has a header but no rows yet" in caplog.text
        )
        assert (
            f"not drawn: {run / 'val_ema.log'}: cannot be read: No such file"
            in caplog.text
        )
        caplog.clear()
    (run / "val.log").write_text("other")
    with pytest.raises(UserError, match=r"val.log: has no header line"):
        plot_curves([run], tmp_path / "x.png")


def test_the_folder_of_a_run_is_drawn_with_all_its_curves(run, tmp_path):
    assert [path.name for path in curve_files(run)] == [
        "lcurve.out",
        "val.log",
        "val_ema.log",
    ]
    config = tiny_input(
        ["a"], ["b"], training__disp_file="rows.out", training__enable_ema=True
    )
    (run / "out.json").write_text(
        json.dumps(config | {"validating": {"full_validation": True}})
    )
    (run / "rows.out").write_text(LCURVE_TEXT)
    assert [path.name for path in curve_files(run)] == ["rows.out", "val.log"]
    assert plot_curves([run], tmp_path / "all.png").read_bytes()[:4] == PNG
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UserError,
        match=r"empty: no lcurve.out or val.log in this folder. Give the folder of a run",
    ):
        plot_curves([tmp_path / "empty"], tmp_path / "x.png")


@pytest.mark.filterwarnings("error")
def test_a_validation_that_does_not_change_is_drawn_without_a_warning(run, tmp_path):
    rows = VAL_TEXT.splitlines(keepends=True)
    (run / "val.log").write_text("".join([*rows[:3], rows[2].replace("50", "99", 1)]))
    (run / "val_ema.log").unlink()
    assert plot_curves([run / "val.log"], tmp_path / "x.png").read_bytes()[:4] == PNG


def test_nothing_of_a_figure_lies_beyond_its_edges(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    seen, save = [], figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *a, **k: (seen.append(self), save(self, *a, **k)),
    )
    runs = [tmp_path / f"a_run_with_a_long_name_{n}" / "of_water" for n in range(3)]
    for folder in runs:
        folder.mkdir(parents=True)
        (folder / "lcurve.out").write_text(LCURVE_TEXT)
        for name in ("", "_half_life_of_300_steps", "_equal_weights_from_epoch_2"):
            (folder / f"val{name}.log").write_text(
                VAL_TEXT.replace("best.ckpt", f"best{name}.ckpt"), encoding="utf-8"
            )
    for drawn in (runs, runs[:1]):
        plot_curves(drawn, tmp_path / "x.png")
    label = 10000.0 * np.random.default_rng(0).normal(size=400) - 7000000.0
    pairs = dict.fromkeys(("Energy", "Force", "Virial"), (label, label + 3, "eV/atom"))
    title = (
        f"{'a_file_with_a_long_name' * 3}.pt: averaged weights (slow) of step 2,000,000: decay "
        "0.9999; 4,000 frames"
    )
    plot_parity(pairs, tmp_path / "x.png", title)
    for drawn in seen:
        box, (width, height) = drawn.get_tightbbox(), drawn.get_size_inches()
        slack = 0.02  # inches
        assert min(box.x0, box.y0) > -slack
        assert box.x1 < width + slack
        assert box.y1 < height + slack
    assert len(seen) == 3


def test_curves_without_a_finite_error_are_refused(here, tmp_path):
    (tmp_path / "lcurve.out").write_text("# step rmse_trn lr\n1 nan nan\n2 inf inf\n")
    with pytest.raises(
        UserError,
        match=r"lcurve\.out: nothing to draw, no number of an error is finite",
    ):
        plot_curves(["lcurve.out"], "curves.png")
    assert not (tmp_path / "curves.png").exists()
