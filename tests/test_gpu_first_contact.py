"""The page of the first contact with a GPU is written whatever its parts do."""

import re
import time
from pathlib import Path

import pytest
from gpu_first_contact import ROOT, Part, parts_of, run_parts

WAITS = "import time; time.sleep(600)"
# starts a process in a session of its own, as launchers of ranks do
HANGS = f"import subprocess as s, sys; p = s.Popen([sys.executable, '-c', {WAITS!r}], start_new_session=True); "
HANGS += "print(p.pid, flush=True); p.wait()"


def python(name, code, limit=30.0):
    return Part(name, f"content of {name}", ("-c", code), limit)


def test_parts_follow_one_that_fails_and_one_that_does_not_end_and_the_page_is_written_each_time(tmp_path):
    page = tmp_path / "page.md"
    parts = [
        python("device", "import sys; print('measuring\\n# Versions\\n- torch'); print('a note', file=sys.stderr)"),
        python("raises", "print('begun'); raise ValueError('7 GiB')"),
        python("hangs", HANGS, limit=3.0),
        python("none", "print('s\\n2 skipped in 0.1s')"),
        python("reads", f"print(open({str(page)!r}).read())"),
    ]
    start = time.monotonic()
    run_parts(parts, page)
    assert time.monotonic() - start < 60
    states = ["passed", "failed: exit code 1", "failed: no end after 3 s", "skipped", "passed"]
    assert [part.state for part in parts] == states
    rank = Path(f"/proc/{int(parts[2].output)}/stat")
    assert not rank.exists() or rank.read_text().split()[2] == "Z"  # not yet reaped by its new parent
    assert "| reads | content of reads | running | 0 |" in parts[-1].output
    assert "ValueError: 7 GiB" in parts[-1].output
    text = page.read_text()
    assert text.index("- torch") < text.index("| device | content of device | passed |") < text.index("begun")
    assert not {"measuring", "a note"} & set(text.splitlines())
    last = text.splitlines()[-1]
    assert last.startswith("Failed: raises: `python -c ")
    assert "; hangs: `python -c " in last
    assert (tmp_path / "page.logs" / "device.err").read_text() == "a note\n"


@pytest.mark.parametrize("part", parts_of("peer", "work"), ids=lambda part: part.name)
def test_a_part_names_files_and_tests_that_exist(part):
    files = [word for word in part.words if word.endswith(".py")]
    names = re.findall(r"^def (test_\w+)", "".join((ROOT / file).read_text() for file in files), re.MULTILINE)
    assert files
    if part.words[-2] == "-k":
        assert all(any(word in name for name in names) for word in re.findall(r"\w{4,}|pt2", part.words[-1]))
