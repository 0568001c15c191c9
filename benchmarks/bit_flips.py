"""One bit of a file of weights is changed: is it ever read as other weights than were written?

Of a training checkpoint, an averaged file and a frozen model of a tiny run, every bit of the directory of the archive
and random bits of the whole file are flipped, one at a time, and the file is loaded as every command loads it. The
process that loads is another one, so that a crash of a reader is counted as well.

    python benchmarks/bit_flips.py --bits 10000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import common

sys.path.insert(0, str(common.ROOT / "tests"))

REFUSED, EQUAL, WRONG, FAULT, DIED = "refused with a message", "loaded, equal", "loaded wrong", "exception", "crash"
OUTCOMES = (REFUSED, EQUAL, WRONG, FAULT, DIED)
LIMIT_S = 60  # for one load
OPTIONS = {
    "type_map": ["O"],
    "num_steps": 4,
    "training__enable_ema": True,
    "training__save_freq": 4,
    "validating__full_validation": True,
    "validating__validation_freq": 2,
    "validating__full_val_start": 0,
}
WITHOUT_DIGEST = "averaged file of 0.1.0"
OLD = common.ROOT / "tests" / "golden" / "checkpoints" / "0.1.0"


def main() -> None:
    """Flip the bits and print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=10_000, help="random bits of each file")
    parser.add_argument("--every", type=int, default=1, help="take every n-th bit of the directory")
    parser.add_argument("--seed", type=int, default=1, help="which bits")
    parser.add_argument("--work", type=Path, default=common.RUNS / "bit-flips", help="folder of the files")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    began, draw, rows, totals = time.perf_counter(), random.Random(args.seed), [], Counter()
    for name, path in write_files(args.work).items():
        data = path.read_bytes()
        begin = 8 * directory_of(data) if path.suffix == ".pt" else None
        parts = {"every bit of its directory": range(begin, 8 * len(data), args.every)} if begin is not None else {}
        if name != WITHOUT_DIGEST:
            parts[f"{args.bits:,} random bits"] = draw.sample(range(8 * len(data)), min(args.bits, 8 * len(data)))
        for part, bits in parts.items():
            counts = flip_each(path, bits)
            totals += counts
            rows.append([name, f"{len(data):,}", part, f"{len(bits):,}", *(f"{counts[o]:,}" for o in OUTCOMES)])
            print(" | ".join(rows[-1]), flush=True)
    header = ["file", "bytes", "flipped", "loads", *OUTCOMES]
    words = [
        f"# One flipped bit in a file of weights ({common.today()})", "",
        f"`python benchmarks/bit_flips.py --bits {args.bits} --seed {args.seed}`; one bit at a time, in another "
        f"process; {sum(totals.values()):,} loads in {time.perf_counter() - began:.0f} s. Equal: every tensor and fact "
        "that the file gave are those that were written; the bit stands where nothing reads (dates, padding). The file "
        "of 0.1.0 has no digest.", "",
    ]  # fmt: skip
    common.publish("\n".join([*words, common.table(header, rows)]), args.output)
    raise SystemExit(any(totals[o] for o in (WRONG, FAULT, DIED)))


def write_files(work: Path) -> dict[str, Path]:
    """Train a tiny model, freeze it, and return its files by what they are."""
    import json

    from helpers import tiny_input, write_system

    from deepmd_ema import cli

    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    write_system("data", frames=4, seed=1, elements=("O",))
    Path("input.json").write_text(json.dumps(tiny_input(["data"], ["data"], **OPTIONS)))
    for words in (["train", "input.json", "--device", "cpu"], ["freeze", "--use-ema", "-o", "average.dp"]):
        if cli.main(words):
            raise SystemExit(f"dp-ema {' '.join(words)} failed")
    shutil.copy(OLD / "model_ema.ckpt-4.pt", "old.pt")
    names = {"training checkpoint": "model.ckpt-4.pt", "averaged file": "model_ema.ckpt-4.pt",
             "frozen model (.dp)": "average.dp", WITHOUT_DIGEST: "old.pt"}  # fmt: skip
    return {what: (work / name).resolve() for what, name in names.items()}


def directory_of(data: bytes) -> int:
    """Return where the directory of an archive begins."""
    end = data.rindex(b"PK\x05\x06")
    return int.from_bytes(data[end + 16 : end + 20], "little")


def flip_each(path: Path, bits) -> Counter[str]:
    """Return how often each outcome came."""
    context = multiprocessing.get_context("fork" if os.name == "posix" else None)
    counts, waiting = Counter(), list(bits)
    while waiting:
        mine, theirs = context.Pipe(duplex=False)
        reader = context.Process(target=load_flipped, args=(path, waiting, theirs))
        reader.start()
        theirs.close()
        while waiting and mine.poll(LIMIT_S):
            try:
                outcome = mine.recv()
            except EOFError:
                break
            counts[outcome[0]] += 1
            if outcome[0] in (WRONG, FAULT):
                print(f"  {path.name}, bit {waiting[0]}: {outcome[0]} {outcome[1]}", flush=True)
            del waiting[0]
        reader.kill()
        reader.join()
        if waiting:  # it has died, or hangs, with this bit
            counts[DIED] += 1
            print(f"  {path.name}, bit {waiting[0]}: {DIED}", flush=True)
            del waiting[0]
    return counts


def load_flipped(path: Path, bits, connection) -> None:
    """Flip each bit, load the file, and send what came of it; a process of its own."""
    from deepmd_ema.errors import UserError

    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else path.parent
    copy = memory / f"{os.getpid()}-{path.name}"
    data = bytearray(path.read_bytes())
    expected = content(path)
    try:
        for bit in bits:
            data[bit // 8] ^= 1 << bit % 8
            copy.write_bytes(data)
            data[bit // 8] ^= 1 << bit % 8
            try:
                outcome = (EQUAL if content(copy) == expected else WRONG), ""
            except UserError:
                outcome = REFUSED, ""
            except Exception as error:  # what the command line would call a bug
                outcome = FAULT, repr(error)
            connection.send(outcome)
    finally:
        copy.unlink(missing_ok=True)


def content(path: Path) -> str:
    """Return a digest of all that a file gives to those who load it."""
    from deepmd_ema import checkpoint
    from deepmd_ema.infer.load import load_model
    from deepmd_ema.tensors import content_digest

    if path.suffix == ".pt":
        return content_digest(checkpoint.load(path))
    loaded = load_model(path)
    info = {name: fact for name, fact in vars(loaded.info).items() if name != "path"}
    return content_digest([dict(loaded.model.state_dict()), repr(loaded.config), info])


if __name__ == "__main__":
    main()
