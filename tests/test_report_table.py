"""Tables as text: alignment, units, what is missing."""

from deepmd_ema.report.table import Column, Table, facts, render


def test_numbers_stand_right_text_left_and_units_below_the_names():
    columns = [Column("element"), Column("F RMSE", "meV/Å", ".1f"), Column("where")]
    table = Table("forces by element", columns, [("O", 12.34, "set.000"), ("H", 5, "a")])
    assert render(table, "# ") == [
        "forces by element",
        "# element  F RMSE  where",
        "#           meV/Å",
        "# O          12.3  set.000",
        "# H           5.0  a",
    ]


def test_what_is_missing_or_nan_is_a_dash_and_text_is_as_it_is():
    table = Table("", [Column("x", "", ".2g")], [(None,), (float("nan"),), ("0.12*",)])
    assert render(table) == ["    x", "    -", "    -", "0.12*"]


def test_a_number_that_no_column_holds_is_written_with_its_exponent():
    assert render(Table("", [Column("E", "", ".3f")], [(8.3e28,), (-5.0,)])) == ["      E", "8.3e+28", " -5.000"]


def test_facts_have_no_head_and_leave_out_what_has_no_text():
    assert render(facts("file.pt", [("weights", "live"), ("bias", ""), ("best", "F")]), "  ") == [
        "file.pt", "  weights  live", "  best     F",
    ]  # fmt: skip
