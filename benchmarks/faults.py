"""What happens to a run on two processes when something goes wrong on one of them, as a table.

Each fault is put on a small run, under ``torchrun`` or on processes that were started by hand with the environment of a
launcher. A row says how long after the fault the last process had ended, with which exit codes, what was said, what
stands on the disk, and whether two processes go on from there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import common

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the command line sets it; read when torch is loaded
sys.path.insert(0, str(common.ROOT / "tests"))

LIMIT_S = 90
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        name: what goes wrong, for the table.
        how: what a rank does, by its name in tests/rank_faults.py.
        who: the ranks that do it.
        send: a signal that is sent from outside once the first checkpoint stands.
        hand: whether the processes are started by hand, else under torchrun.
        changes: of the input.
        environ: set for every process.
        taken: whether the port of the meeting is in use.
    """

    name: str
    how: str = ""
    who: tuple[int, ...] = (1,)
    send: signal.Signals | None = None
    hand: bool = True
    changes: dict = field(default_factory=dict)
    environ: dict = field(default_factory=dict)
    taken: bool = False


FAULTS = (
    Fault("exception in rank 1", "fail", hand=False),
    Fault("exception in rank 1", "fail"),
    Fault("exception in rank 0", "fail", (0,)),
    Fault("kill -9 of rank 1", "die", hand=False),
    *(Fault("kill -9 of rank 1", "die", changes={"training__zero_stage": stage}) for stage in range(4)),
    Fault("kill -9 of rank 0", "die", (0,), hand=False),
    Fault("kill -9 of rank 0", "die", (0,)),
    Fault("kill -9 of rank 1 in a validation", "die_in_validation"),
    Fault("kill -9 of rank 1 at the start", "die_at_start"),
    Fault("data that rank 1 cannot open", "lose_folder_at_start", hand=False),
    Fault("data that rank 1 cannot open", "lose_folder_at_start"),
    Fault("data that rank 1 cannot read any more", "lose_file"),
    Fault("frames of rank 1 become not finite", "spoil_frame"),
    Fault("disk of rank 0 is full", "fill_disk", (0,)),
    Fault("SIGTERM to rank 1", "ask_to_stop", hand=False),
    Fault("SIGTERM to rank 1", "ask_to_stop", changes={"training__zero_stage": 3}),
    Fault("SIGTERM to rank 1 in a validation", "ask_in_validation"),
    Fault("SIGTERM to torchrun", send=signal.SIGTERM, hand=False),
    Fault("Ctrl-C at the terminal", send=signal.SIGINT, hand=False),
    Fault("Ctrl-C at the terminal", send=signal.SIGINT),
    Fault("wrong option in the input", changes={"training__zero_stage": 4}, hand=False),
    Fault("wrong option in the input", changes={"training__zero_stage": 4}),
    Fault("no such system", changes={"training__training_data__systems": ["nowhere"]}),
    Fault("input.json missing on rank 1", "lose_input"),
    Fault("MASTER_ADDR not set", environ={"MASTER_ADDR": ""}),
    Fault("MASTER_PORT in use", taken=True),
    Fault("a rank that never comes (2 s here, 300 s else)", "be_quick", (0, 1), environ={"WORLD_SIZE": "3"}),
    Fault("RANK = 0 twice (2 s here, 300 s else)", "be_quick", (0, 1), environ={"RANK": "0"}),
)


def main() -> None:
    """Run every fault and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--work", type=Path, default=common.RUNS / "faults", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args, words = parser.parse_known_args()
    if args.fault is not None:
        from rank_faults import be_a_rank

        raise SystemExit(be_a_rank(args.fault if os.environ["RANK"] in args.who.split(",") else "", words))
    rows = [row(fault, args.work) for fault in FAULTS if args.only in fault.name]
    header = ["fault", "zero_stage", "started by", "to the end", "exit", "said", "on the disk", "goes on"]
    common.publish("\n".join([*head(), common.table(header, rows)]), args.output)
    raise SystemExit(any("NO" in line[-1] or "hangs" in line[4] for line in rows))


def head() -> list[str]:
    """Return what stands above the table."""
    from rank_faults import AT_STEP, LAST, SAVE_EVERY

    return [
        f"# A fault on one process, and the others ({common.today()})", "",
        f"`python benchmarks/faults.py`; {os.cpu_count()} cores, gloo, 2 processes; {LAST} steps, a checkpoint every "
        f"{SAVE_EVERY}, faults after step {AT_STEP}. Times are from the fault, or from the start where the run does "
        "not come so far. Exit codes are those of the ranks, or that of torchrun (whose own report, not shown, names "
        "the rank that ended first). Others were computing on the machine.", "",
    ]  # fmt: skip


def row(fault: Fault, work: Path) -> list[str]:
    """Return what a fault did."""
    from rank_faults import STAMP, last_words, make_run

    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    endless = {"training__numb_steps": 10**6} if fault.send is not None else {}
    make_run(folder, **{**fault.changes, **endless})
    began = time.time()
    codes = run_by_hand(fault, folder) if fault.hand else run_with_launcher(fault, folder)
    stamp = folder / STAMP
    took = time.time() - (stamp.stat().st_mtime if stamp.exists() else began)
    # torchrun ends with a traceback of its own
    said = [line for line in last_words(folder) if fault.hand or not line.startswith("Traceback")]
    files = sorted(p.name for p in folder.glob("model.ckpt-*.pt"))
    half = [p.name for p in folder.glob("*.part*")]
    done = [
        fault.name, str(fault.changes.get("training__zero_stage", 0)), "hand" if fault.hand else "torchrun",
        f"{took:.1f} s", " ".join("hangs" if code is None else str(code) for code in codes),
        "<br>".join(line.strip().replace("|", "\\|").replace(str(folder), ".") for line in said),
        ", ".join(files + half) or "no checkpoint", go_on(folder) if files else "",
    ]  # fmt: skip
    if done[-1] == "NO":
        print((folder / "said.txt").read_text()[-3000:])
    print(" | ".join(done), flush=True)
    return done


def run_by_hand(fault: Fault, folder: Path) -> list[int | None]:
    """Start two processes with the environment of a launcher; return their exit codes."""
    from parallel_runs import launcher_environment
    from rank_faults import start_rank, wait_for

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not fault.taken:
            server.close()
        pids = []
        for rank in (0,) if fault.taken else (0, 1):
            environ = launcher_environment(rank, 2, port) | fault.environ
            pids.append(start_rank(folder, environ, fault.how if rank in fault.who else ""))
        if fault.send is not None:
            wait_until_it_moves(folder)
            for pid in pids:
                os.kill(pid, fault.send)
        return wait_for(pids, LIMIT_S)


def run_with_launcher(fault: Fault, folder: Path) -> list[int | None]:
    """Start two processes under torchrun; return its exit code."""
    who = ",".join(map(str, fault.who))
    words = [
        str(Path(__file__).resolve()),
        "--fault",
        fault.how,
        "--who",
        who,
        "train",
        "input.json",
        "--device",
        "cpu",
    ]
    with (folder / "said.txt").open("ab") as out:
        launcher = subprocess.Popen(
            [*LAUNCHER, *words], cwd=folder, env=common.environment(1, "cpu"), stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    if fault.send == signal.SIGINT:
        wait_until_it_moves(folder)
        for pid in (launcher.pid, *children(launcher.pid)):  # as the terminal does
            os.kill(pid, fault.send)
    elif fault.send is not None:
        wait_until_it_moves(folder)
        launcher.send_signal(fault.send)
    try:
        return [launcher.wait(LIMIT_S)]
    except subprocess.TimeoutExpired:
        launcher.kill()
        return [None]


def wait_until_it_moves(folder: Path) -> None:
    """Wait for the first checkpoint, and note the time."""
    from rank_faults import STAMP

    end = time.monotonic() + LIMIT_S
    while not (folder / "model.ckpt.pt").exists():
        if time.monotonic() > end:
            raise SystemExit((folder / "said.txt").read_text())
        time.sleep(0.01)
    (folder / STAMP).touch()


def children(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started."""
    return [int(k) for k in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def go_on(folder: Path) -> str:
    """Return whether two processes go on from the newest checkpoint."""
    import json

    from parallel_runs import free_port, launcher_environment
    from rank_faults import start_rank, wait_for

    step = int(os.readlink(folder / "model.ckpt.pt").split("-")[-1].removesuffix(".pt"))
    values = json.loads((folder / "input.json").read_text())
    values["training"]["numb_steps"] = last = step + 5
    (folder / "input.json").write_text(json.dumps(values))
    port = free_port()
    words = ("train", "input.json", "--device", "cpu", "--restart", "model.ckpt.pt", "--allow-config-change")
    pids = [start_rank(folder, launcher_environment(rank, 2, port), "", words) for rank in range(2)]
    codes = wait_for(pids, LIMIT_S)
    return f"yes, from {step}" if codes == [0, 0] and (folder / f"model.ckpt-{last}.pt").exists() else "NO"


if __name__ == "__main__":
    main()
