"""Print the times, model deviations and selected frames of each iteration of a run of DP-GEN.

usage: python summary.py RUN
"""

import re
import sys
from datetime import datetime
from pathlib import Path

import numpy as np

run = Path(sys.argv[1])
# lines such as "2026-11-23 09:00:00,000 - INFO : -------------------------iter.000000 task
# 01---..."
stamp = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ - INFO : -+iter\.(\d{6}) task (\d\d)"
)
began = [
    (datetime.fromisoformat(found[1]), int(found[2]), int(found[3]))
    for line in (run / "dpgen.log").read_text().splitlines()
    if (found := stamp.match(line))
]
ends = [when for when, *_ in began[1:]] + [None]
names = {1: "training", 4: "molecular dynamics", 7: "labels"}
for iteration in sorted({number for _, number, _ in began}):
    folder = run / f"iter.{iteration:06d}"
    print(f"iteration {iteration}")
    for (when, number, task), end in zip(began, ends, strict=True):
        if number == iteration and task in names and end is not None:
            print(f"  {names[task]:20s} {(end - when).total_seconds():6.0f} s")
    for path in sorted(folder.glob("01.model_devi/task.*/model_devi.out")):
        rows = np.loadtxt(path)
        print(
            f"  {path.parent.name}: {len(rows)} frames, largest deviation of forces (eV/angstrom): "
            f"median {np.median(rows[:, 4]):.3f}, maximum {rows[:, 4].max():.3f}"
        )
    for kind in ("accurate", "candidate", "failed"):
        counts = [
            len(p.read_text().split()) // 2 for p in folder.glob(f"02.fp/*{kind}*.out")
        ]
        print(f"  {kind:10s} {sum(counts)}")
    print(f"  labelled   {len(list(folder.glob('02.fp/task.*/frame.traj')))}")
    for path in sorted(folder.glob("00.train/00*/lcurve.out"))[:4]:
        rows = [row for row in path.read_text().splitlines() if row[:1] != "#"]
        header = path.read_text().splitlines()[0].lstrip("# ").split()
        print(
            f"  {path.parent.name}: rmse_f_trn {rows[-1].split()[header.index('rmse_f_trn')]} "
            "eV/angstrom"
        )
