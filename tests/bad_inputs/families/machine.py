"""The machine: closed and full streams, full disks, other languages, little memory, launchers that say nonsense."""

from __future__ import annotations

from collections.abc import Iterator

from bad_inputs.case import ACCEPTED, CHECK, CHECK_OPTIONS, EITHER, RUN, TINY, TRAIN, Case

ENVIRONMENTS = {
    "LOCAL_RANK=x": ["LOCAL_RANK"], "RANK=-1 WORLD_SIZE=2": ["RANK"], "WORLD_SIZE=0": ["WORLD_SIZE"], "WORLD_SIZE=1e3": ["WORLD_SIZE"], "LOCAL_RANK=": ["LOCAL_RANK"],
    f"LOCAL_RANK={'9' * 5000}": ["LOCAL_RANK"], f"WORLD_SIZE={10**30} RANK=0": ["WORLD_SIZE"], "WORLD_SIZE=2": ["RANK"],
    "LOCAL_RANK=²": ["LOCAL_RANK"], "LOCAL_RANK=①": ["LOCAL_RANK"], "LOCAL_RANK=٣": ["LOCAL_RANK"], "WORLD_SIZE=2 RANK=2": ["RANK = 2"],
    "WORLD_SIZE=1 RANK=0 MASTER_PORT=x": ["MASTER_PORT"], "WORLD_SIZE=1 RANK=0 MASTER_PORT=0": ["MASTER_PORT"],
    "WORLD_SIZE=1 RANK=0 MASTER_PORT=99999": ["MASTER_PORT"], "WORLD_SIZE=1 RANK=0 MASTER_PORT=²": ["MASTER_PORT"],
    "SLURM_PROCID=x MASTER_ADDR=localhost MASTER_PORT=1": ["SLURM_PROCID"],
    "SLURM_PROCID=0 SLURM_NTASKS=x MASTER_ADDR=localhost MASTER_PORT=1": ["SLURM_NTASKS"],
}  # fmt: skip
HARMLESS = ("HOME=/nowhere", "HOME=", "TMPDIR=/nowhere", "LC_ALL=nonsense", "COLUMNS=1", "COLUMNS=x", "TERM=", "LANG=", "OMP_NUM_THREADS=x",
            "MPLBACKEND=nonsense", "MPLCONFIGDIR=/proc/x", "LOCAL_WORLD_SIZE=x", "MASTER_PORT=x", "SLURM_PROCID=x", "PYTHONIOENCODING=ascii")  # fmt: skip
# what a shell does -> what must be answered
TRAINING = "$DP train input.json --device cpu -v WARNING"
SHELL: dict[str, tuple[str, str, str]] = {
    "check, stdout closed": ("$DP check input.json >&-", TINY, EITHER),
    "check, stderr closed": ("$DP check input.json 2>&-", TINY, ACCEPTED),
    "check, all streams closed": ("$DP check input.json <&- >&- 2>&-", TINY, EITHER),
    "check, stdout full": ("$DP check input.json > /dev/full", TINY, "refused"),
    "check, stdout is a pipe that is closed": ("$DP check input.json | head -c 1 > /dev/null; exit 0", TINY, ACCEPTED),
    "train, stdout closed": (f"{TRAINING} >&-", TINY, ACCEPTED),
    "train, stderr closed": (f"{TRAINING} 2>&-", TINY, ACCEPTED),
    "train, stderr full": (f"{TRAINING} 2> /dev/full", TINY, EITHER),
    "train, log on a full disk": (f"{TRAINING} -l /dev/full", TINY, EITHER),
    "test, stdout full": ("$DP test -m model.ckpt.pt -s valid > /dev/full", RUN, "refused"),
    "test, in the language C": ("LC_ALL=C $DP test -m model.ckpt.pt -s valid", RUN, ACCEPTED),
    "test, in ASCII": (
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii $DP test -m model.ckpt.pt -s valid",
        RUN,
        ACCEPTED,
    ),
    "train, in ASCII": (f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {TRAINING}", TINY, ACCEPTED),
    "doc, in ASCII": ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii $DP doc", TINY, ACCEPTED),
    "doc, stdout full": ("$DP doc > /dev/full", TINY, "refused"),
    "help, stdout full": ("$DP --help > /dev/full", TINY, EITHER),
    "version, stdout closed": ("$DP --version >&-", TINY, EITHER),
    "train, files of at most 4 kB": (f"ulimit -f 4; {TRAINING}", TINY, "refused"),
    "freeze, files of at most 1 kB": ("ulimit -f 1; $DP freeze -o x.dp", RUN, "refused"),
    "train, few open files": (f"ulimit -n 24; {TRAINING}", TINY, EITHER),
    "check, few open files": ("ulimit -n 12; $DP check input.json", TINY, EITHER),
    "the folder is gone": ('mkdir gone; cd gone; rmdir "$PWD"; $DP check input.json', TINY, "refused"),
}


def cases() -> Iterator[Case]:
    for line, says in ENVIRONMENTS.items():
        env = dict(pair.split("=", 1) for pair in line.split(" "))
        yield Case("machine", line[:60], CHECK_OPTIONS, says=says, env=env)
    for line in HARMLESS:
        yield Case("machine", f"harmless: {line}", CHECK, expected=ACCEPTED, env=dict([line.split("=", 1)]))
    for name, (line, begins, expected) in SHELL.items():
        yield Case("machine", name, shell=line, begins=begins, expected=expected, seconds=60)
    for megabytes in (0, 8, 32, 128):
        yield Case("machine", f"check with {megabytes} MB", CHECK, expected=EITHER, memory=megabytes << 20)
        yield Case("machine", f"train with {megabytes} MB", TRAIN, expected=EITHER, memory=megabytes << 20)
        yield Case("machine", f"test with {megabytes} MB", ("test", "-m", "model.ckpt.pt", "-s", "valid"), expected=EITHER,
                   memory=megabytes << 20, begins=RUN)  # fmt: skip
        yield Case(
            "machine",
            f"plot with {megabytes} MB",
            ("plot", "val.log"),
            expected=EITHER,
            memory=megabytes << 20,
            begins=RUN,
        )
