"""Frozen models: ``.dp`` and ``.yaml`` files with parts that are missing or of another kind, and damaged bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py  # noqa: TID253
import yaml

from bad_inputs.case import ACCEPTED, EITHER, REFUSED, RUN, TRAIN, Case

USES = {"show": "show {}", "test": "test -m {} -s valid", "change-bias": "change-bias {} -b 1 2"}
# parts of the tree, by keys and places in lists
PARTS = ["model", "model_def_script", "software", "version", "@variables.min_nbor_dist", "dp_ema", "dp_ema.average", "model.type", "model.type_map", "model.descriptor",
         "model.fitting", "model.@variables", "model.descriptor.type", "model.descriptor.sel", "model.descriptor.rcut",
         "model.descriptor.embeddings", "model.descriptor.embeddings.networks", "model.descriptor.embeddings.networks.0",
         "model.descriptor.@variables", "model.descriptor.@variables.davg", "model.descriptor.neuron", "model.fitting.nets",
         "model.fitting.nets.networks", "model.fitting.nets.networks.0", "model.fitting.nets.networks.0.layers",
         "model.fitting.nets.networks.0.layers.0", "model.fitting.nets.networks.0.layers.0.@variables",
         "model.fitting.nets.networks.0.layers.0.@variables.w", "model.fitting.nets.networks.0.layers.0.activation_function",
         "model.fitting.@variables", "model.fitting.neuron", "model.fitting.type", "model.fitting.numb_fparam"]  # fmt: skip
VALUES: dict[str, Any] = {
    "None": None,
    "a text": "x",
    "-1": -1,
    "a huge number": 10**30,
    "a list": [1, "x"],
    "a section": {"x": 1},
}
# what only says something of the model, so that any value will do; and what a file without a digest, as DeePMD-kit's are, may lack
FACTS = ("software", "version")
OPTIONAL = (
    "model_def_script",
    "@variables.min_nbor_dist",
    "dp_ema",
    "dp_ema.average",
    "model.type",
    "model.fitting.numb_fparam",
)
ALLOWED = [("model_def_script", "None"), ("model_def_script", "a section"), ("@variables.min_nbor_dist", "None"),
           ("dp_ema", "None"), ("dp_ema", "a section"),
           ("dp_ema.average", "a section")]  # fmt: skip
TEXTS = {"empty": "", "a list": "[1]", "a text": "x", "50,000 deep": "[" * 50_000, "sections 50,000 deep": "{a: " * 50_000,
         "code": "!!python/object/apply:os.system ['touch broken']", "a control character": "a: \x01", "an anchor in itself": "&a [*a]",
         "a bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{q}: &{q} [{','.join(['*' + p] * 9)}]\n" for p, q in zip("abcdefgh", "bcdefghi")),
         "an array without numbers": "a: {'@variables': {b: {'@is_variable': true}}}",
         "an array of a strange kind": "a: {'@variables': {b: {'@is_variable': true, dtype: rubbish, value: [1]}}}",
         "!!bool x": "a: !!bool x", "!!timestamp x": "a: !!timestamp x"}  # fmt: skip


def cases() -> Iterator[Case]:
    for number, part in enumerate(PARTS):
        for what in ("gone", *VALUES):
            for file in ("frozen.dp", "frozen.yaml"):
                use = list(USES)[(number + len(what)) % 3]
                with_digest = (number + (file == "frozen.dp")) % 2 == 0
                good = part in FACTS or (part in OPTIONAL and what == "gone") or (part, what) in ALLOWED
                yield Case(
                    "frozen models",
                    f"{use}, {file}{' without its digest' * (not with_digest)}, {part} is {what}",
                    USES[use].format(file).split(),
                    _tampered(file, part, what, with_digest),
                    ACCEPTED if good and not with_digest else REFUSED,
                    same=use == "test",
                    begins=RUN,
                )
    for name, text in TEXTS.items():
        for use in ("show", "test"):
            yield Case(
                "frozen models",
                f"{use}, YAML, {name}",
                USES[use].format("other.yaml").split(),
                _write(text),
                begins=RUN,
                says=["other.yaml"],
            )
    for part in (0, 0.01, 0.3, 0.6, 0.9, 0.99):
        for file in ("frozen.dp", "frozen.yaml"):
            # the end of a .yaml file is what it says of its weights
            yield Case("frozen models", f"{file} cut off at {part:g}", USES["test"].format(file).split(), _cut(file, part), begins=RUN,
                       says=[], expected=REFUSED if part < 0.9 else EITHER, same=True)  # fmt: skip
    for number in range(12):
        yield Case(
            "frozen models",
            f"bytes of a .dp changed, {number}",
            ("test", "-m", "frozen.dp", "-s", "valid"),
            _spoiled(number),
            EITHER,
            same=True,
            begins=RUN,
        )
    for name, make in _attributes().items():
        yield Case(
            "frozen models", f"the JSON in a .dp is {name}", ("show", "frozen.dp"), make, begins=RUN, says=["frozen.dp"]
        )
    for words in (
        (*TRAIN, "--restart", "frozen.dp"),
        ("posthoc", "frozen.dp"),
        ("plot", "frozen.dp"),
    ):
        yield Case("frozen models", f"given to {' '.join(words[:1] + words[-2:-1])}", words, begins=RUN)
    words = (*TRAIN, "--init-model", "frozen.dp")
    yield Case(
        "frozen models", "given to --init-model", words, expected=ACCEPTED, makes=["model.ckpt-4.pt"], begins=RUN
    )


def _tampered(file: str, part: str, what: str, with_digest: bool) -> Callable[[], None]:
    def change(tree: Any) -> None:
        *above, last = part.split(".")
        for key in above:
            if isinstance(tree, list) and key.isdigit() and int(key) < len(tree):
                tree = tree[int(key)]
            elif isinstance(tree, dict) and key in tree:
                tree = tree[key]
            else:
                return
        if isinstance(tree, list) and last.isdigit() and int(last) < len(tree):
            last = int(last)
        elif not isinstance(tree, dict):
            return
        if what == "gone":
            tree.pop(last, None) if isinstance(tree, dict) else tree.pop(last)
        else:
            tree[last] = VALUES[what]

    def lose_digest(tree: Any) -> None:
        """Make the file one of DeePMD-kit, which writes no digest; of ours one without it is refused."""
        del tree["digest"]
        tree["software"] = "deepmd-kit"

    def tamper() -> None:
        if file.endswith(".dp"):
            with h5py.File(file, "r+") as opened:
                tree = json.loads(opened.attrs["json"])
                if not with_digest:
                    lose_digest(tree)
                change(tree)
                opened.attrs["json"] = json.dumps(tree)
        else:
            tree = yaml.load(Path(file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            if not with_digest:
                lose_digest(tree)
            change(tree)
            Path(file).write_text(yaml.safe_dump(tree))

    return tamper


def _write(text: str) -> Callable[[], object]:
    return lambda: Path("other.yaml").write_text(text)


def _cut(file: str, part: float) -> Callable[[], object]:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[: int(part * Path(file).stat().st_size)])


def _spoiled(number: int) -> Callable[[], None]:
    def spoil() -> None:
        content = bytearray(Path("frozen.dp").read_bytes())
        for k in range(1 + number):
            content[(number * 7919 + k * 104729) % (len(content) if number % 2 else 4096)] ^= 1 << k % 8
        Path("frozen.dp").write_bytes(bytes(content))

    return spoil


def _attributes() -> dict[str, Callable[[], None]]:
    def put(value: Any) -> Callable[[], None]:
        def change() -> None:
            with h5py.File("frozen.dp", "r+") as opened:
                del opened.attrs["json"]
                if value is not None:
                    opened.attrs["json"] = value

        return change

    return {"gone": put(None), "a number": put(3), "no JSON": put("{"), "a list": put("[]"), "deep": put("[" * 20_000 + "]" * 20_000),
            "an empty section": put("{}"), "a name of no array": put('{"@variables": {"a": "/nowhere"}}'),
            "a name of the top": put('{"@variables": {"a": "/"}}'), "an array of numbers": put([1.0, 2.0])}  # fmt: skip
