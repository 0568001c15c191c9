"""Which inputs of DeePMD-kit dp-ema takes unchanged, which it refuses and why; a markdown table on stdout.

With ``--peer DIR`` DeePMD-kit itself reads the same inputs, and every option of an accepted one is compared: an option
that is accepted here and means something else there would be ``different``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmd_ema.config import RunConfig, load_config
from deepmd_ema.config.fields import plain
from deepmd_ema.errors import ConfigError

# runs with the Python of the peer: one line of JSON per input, its options with defaults or why it is refused
PEER_READS = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from deepmd.pt.utils.multi_task import preprocess_shared_params
from deepmd.utils.argcheck import normalize
from deepmd.utils.compat import update_deepmd_input
for name in sys.argv[1:]:
    try:
        values = update_deepmd_input(json.load(open(name)), warning=False, dump=None)
        many = "model_dict" in values["model"]
        if many:
            values["model"], _ = preprocess_shared_params(values["model"])
        print("READ " + json.dumps([name, normalize(values, multi_task=many), ""]), flush=True)
    except Exception as error:
        print("READ " + json.dumps([name, None, f"{type(error).__name__}: {error}"]), flush=True)
"""
# null draws a seed for each run in both; the rows of a table stand for the name of its file
OTHERWISE = re.compile(r"training\.seed|model\.(models\[\d+\]\.)?(use_srtab|tab_file)")


@dataclass(frozen=True)
class Row:
    """One input: what it asks for, and what becomes of it.

    Attributes:
        name: below the folder.
        kind: descriptor, fitting, loss and kind of model, as DeePMD-kit calls them.
        peer: ``reads``, ``refuses``, or empty if it was not asked.
        verdict: ``accepted``, ``refused`` or ``different``.
        message: the first of a refused one; the options that differ; or notes.
    """

    name: str
    kind: str
    peer: str
    verdict: str
    message: str


def main() -> None:
    """Print the table of all ``*.json`` below a folder that have a section ``training``; run where their tables lie."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=Path, help="environment with DeePMD-kit: its bin/python is run")
    args = parser.parse_args()
    files = sorted(path for path in args.folder.rglob("*.json") if "training" in json.loads(path.read_text()))
    theirs = peer_reads(args.peer, files) if args.peer else {}
    rows = [row(path, args.folder, theirs.get(path)) for path in files]
    print("| input | asks for | DeePMD-kit 3.2.0 | dp-ema | first message, or what differs |")
    print("|---|---|---|---|---|")
    for r in rows:
        print(f"| {r.name} | {r.kind} | {r.peer} | {r.verdict} | {r.message} |")
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in rows).items()))


def peer_reads(peer: Path, files: list[Path]) -> dict[Path, tuple[Any, str]]:
    """Return the options with defaults that DeePMD-kit reads from each file, or None and its message."""
    command = [str(peer / "bin" / "python"), "-c", PEER_READS, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("READ ")]
    return {Path(name): (values, error) for name, values, error in found}


def row(path: Path, folder: Path, theirs: tuple[Any, str] | None) -> Row:
    """Return what becomes of one input."""
    name, kind = str(path.relative_to(folder)), asked_for(json.loads(path.read_text()))
    peer = "" if theirs is None else "refuses" if theirs[0] is None else "reads"
    try:
        config = load_config(path)
    except ConfigError as error:
        return Row(name, kind, peer, "refused", _short(error.problems[0], path))
    if theirs is None or theirs[0] is None:
        return Row(name, kind, peer, "accepted", "" if theirs is None else _short(theirs[1], path))
    differing = list(differences(config, theirs[0]))
    return Row(name, kind, peer, "different" if differing else "accepted", "; ".join(differing))


def asked_for(values: Mapping[str, Any]) -> str:
    """Return descriptor, fitting, loss and kind of model of an input, as DeePMD-kit calls them."""
    model = values.get("model", {})
    if "model_dict" in model:
        return f"multi-task: {', '.join(model['model_dict'])}"
    if "models" in model:
        return f"{model['type']}: " + " + ".join(asked_for({"model": part}) for part in model["models"])
    parts = [model["type"]] if "type" in model else []
    descriptor = model.get("descriptor", {})
    parts += [_type(descriptor, "")] if descriptor else []
    parts += [" + ".join(_type(d, "") for d in descriptor.get("list", ()))] if "list" in descriptor else []
    parts += [f"fitting {_type(model['fitting_net'], 'ener')}"] if "fitting_net" in model else []
    parts += [f"loss {_type(values['loss'], 'ener')}"] if "loss" in values else []
    parts += [key for key in ("type_embedding", "use_srtab", "modifier", "spin", "bridging_method") if key in model]
    return ", ".join(filter(None, parts))


def differences(config: RunConfig, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options that both know and that have another value there."""
    ours = dict(_leaves(plain(config)))  # with shared parts where they are used
    for path, value in _leaves(_as_built(theirs)):
        if path in ours and not OTHERWISE.fullmatch(path) and not _same(ours[path], value):
            yield f"{path}: {ours[path]!r} here, {value!r} there"


def _as_built(section: Any) -> Any:
    """Return options as DeePMD-kit builds them: ``se_e2_r`` has one network per element of a neighbor, always."""
    if isinstance(section, list):
        return [_as_built(part) for part in section]
    if not isinstance(section, Mapping):
        return section
    one_sided = {"type_one_side": True} if section.get("type") in ("se_e2_r", "se_r") else {}
    return {key: _as_built(value) for key, value in section.items()} | one_sided


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, str) and isinstance(theirs, str):
        return ours.lower() == theirs.lower()
    if isinstance(ours, list) and isinstance(theirs, str):
        return ours == [theirs]
    return bool(ours == theirs) or (not ours and not theirs)  # none is null, false, 0 or []


def _leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values):
        for number, value in enumerate(values):
            yield from _leaves(value, f"{path}[{number}]")
    else:
        yield path, values


def _type(section: Mapping[str, Any], default: str) -> str:
    return str(section.get("type", default))


def _short(message: str, path: Path) -> str:
    text = re.sub(r"\s+", " ", message.replace(f"{path}:", "")).replace("|", "\\|").strip()
    return text if len(text) <= 240 else text[:237] + "..."


if __name__ == "__main__":
    main()
