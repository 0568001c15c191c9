"""Kill a run that saves every step at random moments, restart it each time, compare its end with an unbroken run's.

The run is a small model on made-up data, with averages, full validation of both sets of weights and best files, so
that a step is mostly writing. Most kills come within a few steps after the run has begun to move; the others while it
starts: imports, data, reading the checkpoint, cutting the logs. A kill before the first checkpoint starts it anew.

    python benchmarks/kill_restart.py --kills 30 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, RUNS, environment, machine, programs, publish, today

sys.path.insert(0, str(ROOT / "tests"))

WHILE_STARTING = 0.2  # share of kills at a moment before the run moves
STEPS_AHEAD = 5  # a kill inside the run comes at most so many steps after the first one
STEPS_PER_KILL = 9  # length of the run, so that it does not end before the last kill
POLL_S = 0.001
PATIENCE_S = 120
LINK = "model.ckpt.pt"
TABLES = ("lcurve.out", "val.log", "val_ema.log")


@dataclass
class Story:
    """History of the run that was killed.

    Attributes:
        moments: when each kill came: ``inside`` the run, or while ``starting``.
        half_written: kills that left a half-written file behind, which shows that they hit a write.
        split_pairs: kills between the links of the averaged and of the live file of one step.
        restarts: starts with --restart.
        anew: starts without, because there was no checkpoint yet.
        lost: steps that had to be taken again, by kill.
    """

    moments: Counter[str] = field(default_factory=Counter)
    half_written: int = 0
    split_pairs: int = 0
    restarts: int = 0
    anew: int = 0
    lost: list[int] = field(default_factory=list)


class Run:
    """One training folder and the process that trains in it."""

    def __init__(self, folder: Path, command: tuple[str, ...], env: dict[str, str]) -> None:
        self.folder, self._command, self._env = folder, command, env
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start or restart the training; return whether it continues from a checkpoint."""
        again = (self.folder / LINK).exists()
        words = ["train", "input.json", *(["--restart", LINK] if again else [])]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen([*self._command, *words], cwd=self.folder, env=self._env, stdout=log,
                                             stderr=log)  # fmt: skip
        return again

    def finish(self) -> None:
        """Wait for the end, which must be a good one."""
        assert self._process is not None
        self._process.wait()
        self._expect(0)

    def wait_for_movement(self) -> bool:
        """Wait until a new row is in the learning curve; return False if the run has ended before."""
        before, end = self.newest_row(), time.monotonic() + PATIENCE_S
        while self.is_alive():
            if self.newest_row() > before:
                return True
            if time.monotonic() > end:
                raise SystemExit(f"{self.folder}: no step within {PATIENCE_S} s")
            time.sleep(POLL_S)
        return False

    def wait(self, seconds: float, most_steps: int) -> None:
        """Wait, but not for more than ``most_steps`` steps: the machine may have become faster."""
        last, end = self.newest_row() + most_steps, time.monotonic() + seconds
        while time.monotonic() < end and self.newest_row() < last:
            time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> bool:
        """Send SIGKILL; return False if the run had ended by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        if self._process.wait() == 0:
            return False
        self._expect(-signal.SIGKILL)
        return True

    def newest_row(self) -> int:
        """Return the step of the last whole row of the learning curve, 0 without one; it may shrink at a restart."""
        try:
            text = (self.folder / "lcurve.out").read_text()
        except FileNotFoundError:
            return 0
        rows = [line for line in text.split("\n")[:-1] if not line.startswith("#")]
        return int(rows[-1].split()[0]) if rows else 0

    def linked_step(self, link: str = LINK) -> int:
        """Return the step of the file that a link names, 0 without a link."""
        path = self.folder / link
        return int(os.readlink(path).rpartition("-")[2].removesuffix(".pt")) if path.is_symlink() else 0

    def _expect(self, code: int) -> None:
        assert self._process is not None
        if self._process.returncode != code:
            log = (self.folder.parent / f"{self.folder.name}.log").read_text()
            raise SystemExit(f"{self.folder}: exit code {self._process.returncode}, expected {code}:\n{log[-3000:]}")


def main() -> None:
    """Measure, print, and leave with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--descriptor", default="se_e2_a", help="of tests/toy_models.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the run computes")
    parser.add_argument("--work", type=Path, default=RUNS / "kill_restart", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    found, env = programs(None), environment(1, args.device)
    num_steps = STEPS_PER_KILL * args.kills + 10
    began = time.perf_counter()
    whole, parts = (Run(make_folder(args.work / name, num_steps, args.descriptor), found["ours"].command, env)
                    for name in ("whole", "parts"))  # fmt: skip
    whole.start()
    whole.wait_for_movement()
    first, moved = whole.newest_row(), time.perf_counter()
    whole.finish()
    step_s = (time.perf_counter() - moved) / (num_steps - first)
    story = torment(parts, args.kills, random.Random(args.seed), moved - began, step_s)
    different = differences(whole.folder, parts.folder)
    lines = [f"# {args.kills} kills of a run of {num_steps} steps that saves every step, {today()}", "",
             machine(found, 1, args.device), "",
             *describe(story, step_s, time.perf_counter() - began), "", *verdict(different, num_steps)]  # fmt: skip
    publish("\n".join(lines), args.output)
    raise SystemExit(1 if different else 0)


def make_folder(folder: Path, num_steps: int, descriptor: str) -> Path:
    """Return a fresh folder with data and an ``input.json``; the paths in it are relative, so that inputs are equal."""
    from helpers import tiny_input, write_system

    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
    folder.mkdir(parents=True)
    write_system(folder / "data", frames=24, natoms=12, seed=1, sets=2)
    write_system(folder / "valid", frames=8, natoms=12, seed=2)
    config = tiny_input(["data"], ["valid"], num_steps=num_steps, training__disp_freq=1, training__save_freq=1,
                        training__disp_avg=True, training__max_ckpt_keep=3, training__enable_ema=True,
                        training__ema_decay=0.95, training__ema_ckpt_keep=2, learning_rate__start_lr=3e-3,
                        validating__full_validation=True, validating__ema_full_validation=True,
                        validating__validation_freq=2, validating__full_val_start=0, validating__max_best_ckpt=3,
                        validating__validation_metric="F:RMSE")  # fmt: skip
    if descriptor != "se_e2_a":
        from toy_models import SECTIONS

        config["model"]["descriptor"] = dict(SECTIONS[descriptor])
    (folder / "input.json").write_text(json.dumps(config, indent=2))
    return folder


def torment(run: Run, kills: int, moments: random.Random, start_s: float, step_s: float) -> Story:
    """Kill and restart ``run`` so often, then let it end.

    Args:
        run: not started yet.
        kills: number of kills.
        moments: draws the moments.
        start_s: seconds that a start takes until the run moves.
        step_s: seconds of a step with its writes.
    """
    story = Story()
    while sum(story.moments.values()) < kills:
        if run.start():
            story.restarts += 1
        else:
            story.anew += 1
        moment = "starting" if moments.random() < WHILE_STARTING else "inside"
        if moment == "starting":
            time.sleep(moments.uniform(0, start_s))
        elif run.wait_for_movement():
            run.wait(moments.uniform(0, STEPS_AHEAD * step_s), STEPS_AHEAD)
        if not run.kill():
            raise SystemExit("the run has ended before the last kill: raise STEPS_PER_KILL")
        story.moments[moment] += 1
        story.half_written += any(run.folder.glob("*.part*"))
        story.split_pairs += run.linked_step() != run.linked_step("model_ema.ckpt.pt")
        story.lost.append(run.newest_row() - run.linked_step())
    story.restarts += run.start()
    run.finish()
    return story


def differences(whole: Path, parts: Path) -> list[str]:
    """Return in what two runs have ended differently: files, bytes of tables, tensors and numbers of checkpoints."""
    import torch

    found = []
    names, others = ({p.name for p in folder.iterdir() if p.is_file()} for folder in (whole, parts))
    if names != others:
        found.append(f"files: only unbroken {sorted(names - others)}, only killed {sorted(others - names)}")
    found += [name for name in TABLES if (whole / name).read_bytes() != (parts / name).read_bytes()]
    for name in sorted(n for n in names & others if n.endswith(".pt")):
        a, b = (torch.load(folder / name, weights_only=True) for folder in (whole, parts))
        found += [f"{name}: {place}" for place in _unequal(a, b, "")]
    return found


def describe(story: Story, step_s: float, wall_s: float) -> list[str]:
    """Return a description of the kills of the run."""
    inside, starting = story.moments["inside"], story.moments["starting"]
    return [
        f"- {inside} kills inside the run, {starting} while it started; {story.half_written} left a half-written file, "
        f"{story.split_pairs} fell between the links of the averaged and the live file",
        f"- {story.restarts} restarts, {story.anew} starts anew (no checkpoint yet), all of which worked",
        f"- {1000 * step_s:.0f} ms per step with its writes, at most {max(story.lost)} step taken again after a kill; "
        f"{wall_s:.0f} s in all",
    ]


def verdict(different: list[str], num_steps: int) -> list[str]:
    """Return one line when all is equal, else what is not."""
    if different:
        return [f"DIFFERENT after step {num_steps}:", *(f"- {line}" for line in different[:20])]
    return [f"After step {num_steps}, weights, averages, moments, streams and best records are bitwise equal to the "
            f"unbroken run's, {', '.join(TABLES)} byte for byte, and the same files are there."]  # fmt: skip


def _unequal(a, b, place: str) -> list[str]:
    import torch

    if type(a) is not type(b):
        return [place]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [place]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [place]
        return [p for key in a for p in _unequal(a[key], b[key], f"{place}.{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [place]
        return [p for i, (x, y) in enumerate(zip(a, b)) for p in _unequal(x, y, f"{place}[{i}]")]
    return [] if a == b else [place]


if __name__ == "__main__":
    main()
