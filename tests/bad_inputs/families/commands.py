"""Commands: options that are unknown, miss their value, exclude each other, or have a value that makes no sense."""

from __future__ import annotations

from collections.abc import Iterator

from bad_inputs.case import ACCEPTED, RUN, Case, write

MODEL = "test -m model.ckpt.pt -s valid"
WRONG = [
    "trian input.json", "freez", "--nothing", "check", "show", "posthoc", "plot", "change-bias", "test -m", "train --restart",
    "train input.json more", "train input.json --restrt x", "check input.json --config", "freeze -k", "show model.ckpt.pt more", "doc a b",
    "doc no.such", "doc model.no_such", "-v LOUD check input.json", "check input.json -v", "check input.json -v 9",
    "train input.json --device gpu", "train input.json --device cuda:99", "train input.json --device ''", "train input.json --device meta",
    "train input.json --restart a --init-model b", "train input.json --restart ''", "train input.json --init-model ''",
    "train input.json --restart data", "train input.json --restart input.json", "train input.json --init-model data",
    "train input.json --restart model_ema.ckpt.pt", "train input.json --init-model nowhere.pt", "train input.json --restart .. ",
    f"{MODEL} -n -5", f"{MODEL} -n x", f"{MODEL} -n 1.5", f"{MODEL} -n ²", f"{MODEL} -n {'9' * 5000}", f"{MODEL} --average nobody",
    f"{MODEL} --use-ema --average ''", f"{MODEL} -d no/where", f"{MODEL} -d ''", f"{MODEL} --plot x.nope", f"{MODEL} --plot no/where.png",
    f"{MODEL} -f list.txt", f"{MODEL} --valid-data input.json", f"{MODEL} --device gpu", "test -m model.ckpt.pt -s", "test -m nowhere -s valid",
    "test -m model.ckpt.pt -s nowhere", "test -m model.ckpt.pt -f nowhere", "test -m model.ckpt.pt --valid-data nowhere.json",
    "test -m frozen.dp --use-ema -s valid", "test -m val.log -s valid", "test -s valid -m ''", "test -m model.ckpt.pt -s ''",
    "freeze --average nobody", "freeze -c nowhere", "freeze -c data", "freeze -o model.pth", "freeze -o ''", "freeze -o no/where.dp",
    "freeze -c frozen.dp --use-ema", "freeze -c input.json", "freeze -o .", "freeze -o /", "show nowhere", "show data", "show input.json",
    "show --config input.json", "plot nowhere", "plot data", "plot input.json", "plot val.log -o x.nope", "plot val.log -o ''", "plot ''",
    "plot val.log -o no/where.png", "plot model.ckpt.pt", "change-bias model.ckpt.pt -b", "change-bias model.ckpt.pt -b x",
    "change-bias model.ckpt.pt -b 1", "change-bias model.ckpt.pt -b 1 2 3", "change-bias model.ckpt.pt -b nan 1",
    "change-bias model.ckpt.pt -b inf 1", "change-bias model.ckpt.pt -b 1 2 -s valid", "change-bias model.ckpt.pt -b 1 2 -m set",
    "change-bias model.ckpt.pt -s nowhere", "change-bias model.ckpt.pt -s valid -m other", "change-bias model.ckpt.pt -s valid -n -1",
    "change-bias nowhere -b 1 2", "change-bias input.json -b 1 2", "change-bias model.ckpt.pt -b 1 2 -o no/where.pt", "posthoc nowhere",
    "posthoc input.json", "posthoc data", "posthoc . --sigma-rel", "posthoc . --sigma-rel x", "posthoc . --sigma-rel -1",
    "posthoc . --sigma-rel 0.2:0.1", "posthoc . --sigma-rel nan", "posthoc . --sigma-rel 0.1:0.2:0", "posthoc . --step x", "posthoc . --step 7",
    "posthoc . --metric G:RMSE", "posthoc . --sigma-rel 0.1:0.2:999999999999", "finetune input.json", "convert-backend a b", "compress",
    "train input.json --finetune x", "train input.json -t x", "freeze --head water", "test --shuffle-test",
    "train input.json -l ''", "train input.json -o ''", "check no/where.json", "check .",
    "model-devi", "model-devi -m model.ckpt.pt -s valid", "model-devi -m model.ckpt.pt nowhere -s valid", "model-devi -m model.ckpt.pt val.log -s valid",
    "model-devi -m model.ckpt.pt model_ema.ckpt.pt -s nowhere", "model-devi -m model.ckpt.pt frozen.dp -s valid -f x",
    "model-devi -m model.ckpt.pt frozen.dp -s valid -f -3", "model-devi -m model.ckpt.pt frozen.dp -s valid --relative nan",
    "model-devi -m model.ckpt.pt frozen.dp -s valid --relative_v 0", "model-devi -m model.ckpt.pt frozen.dp -s valid -o no/where",
    "model-devi -m model.ckpt.pt frozen.dp -s valid -o frozen.dp", "model-devi -m model.ckpt.pt frozen.dp -s valid -o input.json",
    "model-devi -m model.ckpt.pt frozen.dp -s valid --use-ema", "model-devi -m model.ckpt.pt -s valid --average nobody ema",
    "model-devi -m frozen.dp -s valid --sample-layer", "model-devi -m model_ema.ckpt.pt -s valid --average live",
    "model-devi -m model.ckpt.pt '' -s valid", "neighbor-stat", "neighbor-stat -s valid", "neighbor-stat -s nowhere -r 6", "neighbor-stat -s valid -r x",
    "neighbor-stat -s valid -r 0", "neighbor-stat -s valid -r -6", "neighbor-stat -s valid -r inf", "neighbor-stat -s valid -r 1e9", "neighbor-stat -s valid -r 6 -t He",
    "neighbor-stat -s input.json -r 6", "neighbor-stat -s valid -r 6 -l log", "train input.json -l data", "check input.json extra.json", "train input.yaml", "train input.json --device cpu:x",
]  # fmt: skip
GOOD = ["--version", "--help", "train --help", "train", "train -o x", "doc", "doc --json-schema", "doc ema", "check input.json --config-only", "show frozen.dp",
        "show model.ckpt.pt --config", "plot lcurve.out val.log val_ema.log", f"{MODEL} -n 0", f"{MODEL} -n 1000000", f"{MODEL} --use-ema",
        "freeze -o x", "model-devi -m model.ckpt.pt frozen.dp -s valid", "neighbor-stat -s valid -r 6", "freeze --use-ema", "change-bias model.ckpt.pt -b 1 2", "change-bias model.ckpt.pt -s valid"]  # fmt: skip
LISTS = {
    "empty": "",
    "only comments": "# x\n\n",
    "NUL": "va\0lid\n",
    "no UTF-8": b"\xff\xfe",
    "nowhere": "nowhere\n",
    "300 letters": "x" * 300,
}


def cases() -> Iterator[Case]:
    for line in WRONG:
        words = [word.strip("'") for word in line.split(" ") if word]
        yield Case("commands", line[:80], words, begins=RUN)
    for line in GOOD:
        yield Case("commands", f"good: {line}", line.split(), expected=ACCEPTED, begins=RUN)
    for name, content in LISTS.items():
        yield Case(
            "commands",
            f"a list of systems: {name}",
            ("test", "-m", "model.ckpt.pt", "-f", "list.txt"),
            write("list.txt", content),
            begins=RUN,
        )
    yield Case(
        "commands", "no command", shell='$DP > help; test $? = 2 && grep -q "usage: dp-ema" help', expected=ACCEPTED
    )
    yield Case("commands", "a word of 100,000 letters", ["x" * 100_000], begins=RUN)
    yield Case("commands", "a letter that is half a pair", ["show", "\udc80.pt"], begins=RUN)
    yield Case("commands", "terminal codes", ["show", "\x1b[2J\x1b[31m.pt"], begins=RUN)
    yield Case("commands", "no snapshots", ["posthoc", "."], begins=RUN)
