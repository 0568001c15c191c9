"""What is in a model file, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict, config_summary, model_config_from_dict
from deepmd_ema.errors import ConfigError
from deepmd_ema.infer.change_bias import record_in_words
from deepmd_ema.infer.load import FROZEN_SUFFIXES, LIVE, facts_of_average, load_model
from deepmd_ema.labels import METRICS
from deepmd_ema.report.table import facts
from deepmd_ema.report.text import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from deepmd_ema.config import ModelConfig

KINDS = {
    "training": "training checkpoint",
    "average": "averaged weights",
    "best": "best weights",
    "snapshot": "snapshot of an average",
    "weights": "weights",
    "frozen": "frozen model",
}
_IN_MODEL_ROWS = ("elements", "descriptor", "fitting")


def describe(path: str | Path, whole_config: bool = False) -> str:
    """Return what is in a checkpoint or a frozen file, or its whole config as JSON.

    Raises:
        CheckpointError: if the file is missing, damaged or not a model.
    """
    if Path(path).suffix.lower() in FROZEN_SUFFIXES:
        about = _frozen(Path(path))
    else:
        real = checkpoint.resolve(path)
        about = _checkpoint(real, checkpoint.load(real))
    if whole_config:
        return json.dumps(about["config"], indent=4)
    size = Path(about["path"]).stat().st_size / 1e6
    title = f"{about['path']}: {KINDS[about['kind']]} of {about['version']}, {size:.2f} MB"
    rows = [*about["rows"], *about["parts"], *_sizes(about["tensors"]), *about["more"]]
    rows += [*_run_rows(about["config"]), ("config", "--config prints all of it")]
    return "\n".join(render(facts(title, rows), "  "))


def _checkpoint(path: Path, payload: Mapping[str, Any]) -> dict[str, Any]:
    weights, average = payload["weights"], payload.get("average", {})
    own = "live" if weights == LIVE else f"average {weights}: {_average(average)}"
    profiles = payload.get("averages", {}).get("profiles", {})
    return {
        "path": path,
        "kind": payload["kind"],
        "version": f"dp-ema {payload['version']}",
        "config": payload["config"],
        "parts": _parts_of(payload["config"]["model"]),
        "tensors": payload["model"],
        "rows": [
            ("weights", f"{own}, step {payload['step']:,}"),
            *(("average", f"{name}: {_average(state)} (freeze it with {_option(name, profiles)})")
              for name, state in profiles.items()),
            *_bias(payload.get("bias", {}), payload.get("refitted_bias", {})),
        ],
        "more": [
            *_distance(payload.get("min_nbor_dist")),
            *(("best", text) for text in _best(payload.get("best", {}))),
            *([("restart", "possible: optimizer state and positions in the data are here")]
              if payload["kind"] == "training" else []),
        ],
    }  # fmt: skip


def _frozen(path: Path) -> dict[str, Any]:
    loaded = load_model(path)
    info = loaded.info
    return {
        "path": path,
        "kind": info.kind,
        "version": info.version,
        "config": info.config,
        "parts": _parts(loaded.config),
        "tensors": loaded.model.state_dict(),
        "rows": [("weights", info.in_words()), *_bias(info.bias)],
        "more": _distance(info.min_nbor_dist),
    }


def _parts(model: ModelConfig) -> list[tuple[str, str]]:
    return [
        ("elements", " ".join(model.type_map)),
        ("descriptor", model.descriptor.summary()),
        ("fitting", model.fitting_net.summary()),
    ]


def _parts_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    try:
        return _parts(model_config_from_dict(model))
    except ConfigError:  # of another version: at least the elements
        return [("elements", " ".join(model.get("type_map", [])))]


def _sizes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    numbers = sum(t.numel() for t in tensors.values())
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    yield "sizes", f"{numbers:,} numbers in {len(tensors)} tensors, {size / 1e6:.2f} MB, {' and '.join(kinds)}"


def _run_rows(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how the run was set up, in a few lines; nothing when the file holds a model section only."""
    if "training" not in config:
        return []
    try:
        lines = config_summary(config_from_dict(config))
    except ConfigError:  # of another version: the model section was enough
        return []
    rows = [line.split("  ", 1) for line in lines]
    return [(name, text.strip()) for name, text in rows if name not in _IN_MODEL_ROWS]


def _option(name: str, profiles: Mapping[str, Any]) -> str:
    return "--use-ema" if len(profiles) == 1 else f"--average {name}"


def _average(state: Mapping[str, Any]) -> str:
    words = {
        "decay": "decay {:g}",
        "sigma_rel": "sigma_rel {:.4g}",
        "gamma": "gamma {:.4g}",
        "updates": "{:,} updates",
        "snapshots": "made of {:,} snapshots",
        "mean_age": "mean age {:.1f} steps",
        "residual": "residual {:.2%}",
    }
    known = facts_of_average({**state, "updates": max(0, state["updates"])} if "updates" in state else state)
    return ", ".join(["equal weights"] * (state.get("type") == "swa") + [words[n].format(v) for n, v in known.items()])


def _bias(record: Mapping[str, Any], refitted: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    if record:
        yield "bias", record_in_words(record)
    names = ", ".join(refitted)
    if names:
        yield "bias", f"fitted again after training, for {names}; a restart goes on from the one before"


def _best(best: Mapping[str, Any]) -> Iterator[str]:
    for weights, state in best.items():
        if state["records"]:
            metric, (value, step) = state["metric"], state["records"][0]
            quantity = METRICS[metric[0].upper()]
            shown = f"{quantity.display_factor * value:.4g} {quantity.display_unit}"
            yield f"{weights} {metric} {shown} at step {step:,}"


def _distance(distance: float | None) -> list[tuple[str, str]]:
    return [("nearest pair", f"{distance:.4f} angstrom in the training data")] if distance else []
