"""Which laws of tests/test_laws.py does every descriptor obey, and every other way in which one is computed?

    python benchmarks/laws.py --output benchmarks/results/$(date +%F)-laws.md

The page is made of a report of pytest: of a run of its own, or of one that ``--report`` names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from common import ROOT, environment, machine, programs, publish, table, today

LAWS = ROOT / "tests" / "test_laws.py"

sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Run the tests unless their report is given, and print the page; exit code 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="of pytest --junitxml, instead of a run")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = args.report or Path(folder) / "laws.xml"
        if args.report is None:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                str(LAWS),
                f"--junitxml={report}",
            ]
            subprocess.run(command, cwd=ROOT, env=environment(1, "cpu"), check=False)
        kept, broken = counted(report)
    publish(page(kept, broken), args.output)
    raise SystemExit(1 if broken else 0)


def counted(report: Path) -> tuple[Counter, Counter]:
    """Return how many cases of each (law, model) were kept and broken."""
    kept: Counter = Counter()
    broken: Counter = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        law, _, case_id = case.get("name", "").rstrip("]").partition("[")
        found = [model for model in models() if model in case_id.split("-")]
        if case.get("classname", "").endswith("test_laws") and found:
            failed = case.find("failure") is not None or case.find("error") is not None
            (broken if failed else kept)[law.removeprefix("test_"), found[0]] += 1
    return kept, broken


def models() -> list[str]:
    """Return the registered descriptors and the other ways in which they are computed."""
    from toy_models import SECTIONS, VARIANTS

    return [*sorted(SECTIONS), *VARIANTS]


def page(kept: Counter, broken: Counter) -> str:
    """Return the table: rows are models, columns are laws by number, with the list of laws below."""
    laws = list(dict.fromkeys(law for law, _ in [*kept, *broken]))

    def cell(law: str, model: str) -> str:
        bad = broken[law, model]
        return f"**{bad} broken**" if bad else str(kept[law, model] or "")

    rows = [[f"`{model}`", *(cell(law, model) for law in laws)] for model in models()]
    return "\n".join([
        f"# The laws, for every descriptor, {today()}", "",
        f"Number of cases in which a law was kept; {kept.total()} kept, {broken.total()} broken. Empty: not asked. The "
        f"last models are sections of `tests/toy_models.py` with other options (`VARIANTS`).  \nOn "
        f"{machine(programs(None), 1, 'cpu')}.", "",
        table(["model", *map(str, range(1, len(laws) + 1))], rows), "",
        *(f"{number}. {law.replace('_', ' ')}" for number, law in enumerate(laws, 1)),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
