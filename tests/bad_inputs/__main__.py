"""Tries bad inputs and prints for each family how they were answered: ``python tests/bad_inputs --family text``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]  # instead of this folder

from bad_inputs.case import sample  # noqa: E402
from bad_inputs.families import all_cases, known  # noqa: E402
from bad_inputs.judge import RIGHT, VERDICTS, Judge  # noqa: E402


def main() -> int:
    """Return 0 if every case but those known to fail was answered right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", help="only these")
    parser.add_argument("--name", help="only cases with this in their name")
    parser.add_argument("--sample", type=int, metavar="N", help="about N cases, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print every answer")
    parser.add_argument("--list", action="store_true", help="print the cases and do not try them")
    args = parser.parse_args()
    cases = [c for c in all_cases() if not args.family or c.family in args.family]
    cases = [c for c in cases if not args.name or args.name in c.name]
    cases = cases if args.sample is None else sample(cases, args.sample, args.seed)
    if args.list:
        print("\n".join(case.title for case in cases))
        return 0
    counts, unknown, began = {case.family: Counter() for case in cases}, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bad_inputs") as scratch:
        judge = Judge(Path(scratch))
        for case in cases:
            verdict, answer = judge.try_out(case)
            counts[case.family][verdict] += 1
            if verdict != RIGHT or args.show:
                row = known(case)
                unknown += verdict != RIGHT and not row
                print(f"\n{verdict.upper()}: {case.title}{f' [known: {row}]' if row else ''}")
                print(
                    f"    dp-ema {case.shell or ' '.join(case.words)}: exit code {answer.code}, {answer.seconds:.1f} s"
                )
                print(f"    expected: {case.expected} {list(case.says) or ''}")
                print("\n".join(f"    | {line[:200]}" for line in (answer.err or answer.out).splitlines()[-6:]))
                print("".join(f"    lost or half written: {name}\n" for name in answer.lost), end="")
                print("".join(f"    not as of a good input: {name}\n" for name in answer.lacks), end="", flush=True)
    print("\n" + "  ".join(f"{name:>16}" for name in ("family", "cases", *VERDICTS)))
    for family, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        numbers = (sum(count.values()), *(count[v] for v in VERDICTS))
        print("  ".join([f"{family:>16}", *(f"{n:>16}" for n in numbers)]))
    print(f"{time.monotonic() - began:.0f} s; {unknown} failures that are not known")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
