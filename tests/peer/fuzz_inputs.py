"""Random inputs: are there mistakes exactly where dargs refuses, and what does the schema of
DeePMD-kit say of them.

usage: python tests/peer/fuzz_inputs.py [--examples FOLDER] [--number 20000] [--seed 1] [--peer DIR]

Every input of `examples`, `configs` and FOLDER (such as `examples` of DeePMD-kit) is changed in one
to three places, as in `tests/unit/test_argcheck.py`. With ``--peer`` the schema of DeePMD-kit
judges the same inputs, after the same changes of older spellings; what only one of the two accepts
is counted by the option, and an input of each is shown.
"""

import argparse
import copy
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the tests

from mutated_inputs import FILES, ROOT, judged, mutated

SHOWN = 5  # differences of each kind
# runs in the environment of DeePMD-kit: a line of JSON in, a line with the message out; empty where
# it accepts
PEER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from deepmd.utils.argcheck import normalize
from deepmd.utils.compat import update_deepmd_input
for line in sys.stdin:
    values = json.loads(line)
    try:
        values = update_deepmd_input(values, warning=False)
        normalize(values, multi_task="model_dict" in values["model"])
        answer = ""
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    sys.stderr.write(json.dumps(answer[:300]) + "\\n")
"""


def readable(file: Path) -> bool:
    """Whether a file is an input: an object with a section ``model``."""
    values = json.loads(file.read_text())
    return isinstance(values, dict) and isinstance(values.get("model"), dict)


def main() -> None:
    """Judge the inputs and print the numbers and the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=Path, help="folder with more inputs")
    parser.add_argument("--number", type=int, default=20_000, help="inputs")
    parser.add_argument("--seed", type=int, default=1, help="of the changes")
    parser.add_argument(
        "--peer", metavar="DIR", help="virtual environment of DeePMD-kit"
    )
    args = parser.parse_args()
    files = [*FILES, *sorted(args.examples.rglob("*.json"))] if args.examples else FILES
    inputs = {file: json.loads(file.read_text()) for file in files if readable(file)}
    rng, names, counts, wrong, every = (
        random.Random(args.seed),
        list(inputs),
        Counter(),
        [],
        [],
    )
    for number in range(args.number):
        file = names[number % len(names)]
        values = inputs[file] if number < len(names) else mutated(inputs[file], rng)
        try:
            is_accepted, mistakes = judged(copy.deepcopy(values))
        except Exception as error:
            wrong.append((file, values, f"{type(error).__name__}: {error}"))
            continue
        counts["accepted" if is_accepted else "refused"] += 1
        every.append((values, is_accepted, str(mistakes[0]) if mistakes else ""))
        if is_accepted == bool(mistakes):
            wrong.append(
                (
                    file,
                    values,
                    f"dargs accepts: {is_accepted}; mistakes: {list(map(str, mistakes))}",
                )
            )
    print(
        f"{args.number:,} inputs made of {len(inputs)} files, seed {args.seed}: {dict(counts)}, "
        f"wrong: {len(wrong)}"
    )
    for file, values, text in wrong[:SHOWN]:
        print(
            f"- {file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}: {text}\n  "
            f"{json.dumps(values)}"
        )
    if args.peer:
        compare(args.peer, every)
    raise SystemExit(bool(wrong))


def compare(peer: str, every: list) -> None:
    """Print the number of inputs on which both schemas agree, and the messages of the others."""
    lines = "".join(json.dumps(values) + "\n" for values, *_ in every)
    done = subprocess.run(
        [f"{peer}/bin/python", "-c", PEER],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [
        json.loads(line) for line in done.stderr.splitlines() if line.startswith('"')
    ]
    if len(answers) != len(every):
        raise SystemExit(
            f"{peer}: {len(answers)} answers to {len(every)} inputs: {done.stderr[-500:]}"
        )
    both = Counter(
        (is_accepted, not answer) for (_, is_accepted, _), answer in zip(every, answers)
    )
    print(
        f"DeePMD-kit: both accept {both[True, True]:,}, both refuse {both[False, False]:,}, only "
        f"dp-ema refuses {both[False, True]:,}, only DeePMD-kit refuses {both[True, False]:,}"
    )
    for accepted_here, title in (
        (False, "only dp-ema refuses"),
        (True, "only DeePMD-kit refuses"),
    ):
        texts = Counter()
        for (_, is_accepted, mistake), answer in zip(every, answers):
            if is_accepted is accepted_here and bool(answer) is accepted_here:
                texts[(answer or mistake).replace("\n", " ")[:160]] += 1
        print(
            f"{title}:",
            *(f"  {count:5d}  {text}" for text, count in texts.most_common(40)),
            sep="\n",
        )


if __name__ == "__main__":
    main()
