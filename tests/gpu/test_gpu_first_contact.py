"""The first contact with a GPU keeps the results that it has, whatever its parts do, and continues
with the others.
"""

import re
import shlex
import time
from pathlib import Path

import gpu_archive
import gpu_page
import pytest
from gpu_first_contact import ROOT, Part, parts_of, run_parts
from gpu_results import FILE_NAME, Results

WAITS = "import time; time.sleep(600)"
# starts a process in a session of its own, as launchers of ranks do
HANGS = (
    f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {WAITS!r}], "
    "start_new_session=True); "
)
HANGS += "print(p.pid, flush=True); p.wait()"
# adds a row, and then what follows the first time
ROW = (
    "import sys; sys.path.insert(0, 'tests'); from gpu_results import Results; from pathlib "
    "import Path; "
)
ROW += (
    "results = Results(sys.argv[-1], 'growth'); results.add([{name!r}, 'float32', 192], ms=1.0, "
    "memory=2e9, "
)
ROW += (
    "bytes_per_atom=3e3, way='eager'); first = not Path({mark!r}).exists(); "
    "Path({mark!r}).touch()\n"
)


def python(name, code, limit=30.0, **how):
    return Part(name, f"content of {name}", ("-c", code), limit, **how)


def states(folder):
    rows = Results(folder / FILE_NAME).rows().values()
    return {
        row["key"][0]: row.get("error", "") for row in rows if row["part"] == "parts"
    }


def test_parts_that_failed_or_hung_leave_their_rows_and_run_again_in_a_second_call(
    tmp_path,
):
    def part(name, then, limit=30.0):
        code = ROW.format(name=name, mark=str(tmp_path / name)) + f"if first: {then}"
        return python(name, code, limit, adds_rows=True)

    parts = [
        part("raises", "raise ValueError('7 GiB')"),
        part("hangs", WAITS, 4.0),
        part("ends", "pass"),
    ]
    run_parts(parts, tmp_path, minutes=1)
    assert states(tmp_path) == {
        "raises": "exit code 1",
        "hangs": "no end after 4 s",
        "ends": "",
    }
    page = (tmp_path / "page.md").read_text()
    for name in ("raises", "hangs", "ends"):
        assert f"| {name} | float32 | 192 | 1 | 2.00 | 3.0 | eager |" in page
    assert "ValueError: 7 GiB" in (tmp_path / "log.txt").read_text()
    ended = (tmp_path / FILE_NAME).read_text().count('"ends"')

    run_parts(parts, tmp_path, minutes=1)
    assert states(tmp_path) == {"raises": "", "hangs": "", "ends": ""}
    assert (tmp_path / FILE_NAME).read_text().count(
        '"ends"'
    ) == ended  # it was not run again


def test_a_part_is_killed_with_all_that_it_has_started(tmp_path):
    run_parts([python("hangs", HANGS, limit=3.0)], tmp_path, minutes=1)
    (pid,) = re.findall(r"^(\d+)$", (tmp_path / "log.txt").read_text(), re.MULTILINE)
    rank = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 30
    # on a busy machine a signal takes its time, and its new parent may not have reaped it yet
    while (
        rank.exists()
        and rank.read_text().split()[2] != "Z"
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not rank.exists() or rank.read_text().split()[2] == "Z"


def test_parts_beside_others_run_at_once_and_the_last_one_ends_them(tmp_path):
    parts = [
        python(str(number), "import time; time.sleep(4)", beside=number < 3)
        for number in range(4)
    ]
    start = time.monotonic()
    run_parts(parts, tmp_path, minutes=1)
    assert time.monotonic() - start < 12
    assert states(tmp_path) == dict.fromkeys("0123", "")


def test_no_part_is_started_without_time_left(tmp_path):
    run_parts([python("late", "pass")], tmp_path, minutes=0.05)
    assert states(tmp_path) == {}


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    results = Results(tmp_path / FILE_NAME, "growth")
    results.add(["a"], ms=1.0)
    with results.file.open("a") as file:
        file.write('{"part": "growth", "ke')
    results.add(["b"], error="full")
    assert list(results.rows()) == [("growth", "a"), ("growth", "b")]
    assert results.has(["a"])
    assert not results.has(["b"])


def test_the_page_has_the_ratio_of_the_fastest_ways_and_the_errors_of_others(tmp_path):
    results = Results(tmp_path / FILE_NAME, "speed")
    for way, ms in {"eager": 8.0, "graphs": 2.0, "pt": 20.0, "pt_expt": 9.0}.items():
        results.add(
            ["dpa3", "float32", 8, way], ms=ms, turns=[ms], memory=5e8, machine="card"
        )
    results.add(
        ["dpa3", "float32", 8, "compiled"],
        error="first\nRuntimeError: no | compiler",
        machine="card",
    )
    gpu_page.write(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| dpa3 | float32 | 8 | 8 | 2 |  |  | 20 |  | 9 |  | 4.50 |" in page
    assert "- dpa3, 8 frames, compiled: RuntimeError: no / compiler" in page


@pytest.mark.parametrize("part", parts_of("python", "work"), ids=lambda part: part.name)
def test_a_part_names_files_and_tests_that_exist(part):
    files = [word for word in part.words if word.endswith(".py")]
    names = re.findall(
        r"^def (test_\w+)",
        "".join((ROOT / file).read_text() for file in files),
        re.MULTILINE,
    )
    assert files
    if part.words[-2] == "-k":
        assert all(
            any(word in name for name in names)
            for word in re.findall(r"\w{4,}|pt2", part.words[-1])
        )


def test_the_archive_leaves_torch_to_the_machine():
    names = [re.split("[=<>~]", line)[0] for line in gpu_archive.requirements()]
    assert "dargs" in names
    assert "torch" not in names


def test_the_command_of_a_part_repeats_it(tmp_path):
    run_parts([python("prints", "print('seven')")], tmp_path, minutes=1)
    row = Results(tmp_path / FILE_NAME).rows()["parts", "prints"]
    assert shlex.split(row["command"])[1:] == ["-c", "print('seven')"]
