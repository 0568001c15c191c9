"""Options: every option of an input with values of wrong types and sizes, misspelled, given twice, or missing."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path

from bad_inputs.case import ACCEPTED, EITHER, TRAIN, Case
from deepmd_ema.config.fields import Option, options
from deepmd_ema.config.schema.run import SingleTaskRun

# option -> a value that is allowed and far from what anybody means
EXTREME = {
    "training.disp_freq": 10**17, "training.save_freq": 10**17, "training.max_ckpt_keep": 10**17,
    "training.training_data.batch_size": 10**12, "training.validation_data.numb_btch": 1000,
    "training.training_data.min_pair_dist": 1e300, "training.gradient_max_norm": 1e-300, "training.seed": 10**17,
    "learning_rate.start_lr": 1e300, "learning_rate.stop_lr": 0, "learning_rate.decay_steps": 10**17,
    "model.descriptor.rcut": 1e-3, "model.descriptor.rcut_smth": 0, "model.descriptor.axis_neuron": 1,
    "model.descriptor.sel": [50_000, 50_000], "model.fitting_net.neuron": [100_000, 100_000],
    "model.descriptor.neuron": [100_000], "model.fitting_net.rcond": 1e300, "model.data_stat_nbatch": 10**17,
    "model.data_stat_protect": 1e300, "model.descriptor.env_protection": 1e300, "loss.start_pref_f": 1e300,
    "loss.start_pref_e": 1e-300, "validating.validation_freq": 10**17, "validating.max_best_ckpt": 10**17,
    "training.ema_decay": 0, "training.ema_ckpt_keep": 10**17, "optimizer.weight_decay": 1e300,
    "optimizer.adam_beta1": 0, "training.numb_steps": 1, "model.type_map": ["O", "H", *(f"X{n}" for n in range(300))],
    "model.fitting_net.default_fparam": [], "training.training_data.batch_size ": "auto:1000000000000",
    "training.training_data.batch_size  ": "filter:1", "training.training_data.auto_prob": "prob_sys_size;0:1:1e300",
    "training.training_data.sys_probs": [1.0], "training.training_data.rglob_patterns": ["*"],
    "training.tensorboard_log_dir": "x" * 300, "training.disp_file": "x" * 300, "training.save_ckpt": "x" * 300,
    "training.stat_file": "x" * 300, "validating.full_val_file": "x" * 300, "training.save_dir": "a/" * 200 + "b",
    "model.descriptor.activation_function": "silut:1e300", "model.descriptor.exclude_types": [[0, 1]] * 1000,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for path, option in _options(SingleTaskRun, ()):
        for name, value in _wrong_values(option):
            says = [path[-1]] if path[-1] != "type" else []
            yield Case("options", f"{'.'.join(path)} = {name}", prepare=_put(path, value), says=says)
        if len(path) > 1 and len(option.name) > 4 and path[-1] != "_":
            typo = (*path[:-1], f"{option.name[:-2]}{option.name[-1]}{option.name[-2]}")
            if typo != path:
                yield Case("options", f"{'.'.join(path)} misspelled", prepare=_put(typo, 1), says=[typo[-1]])
    for path in (("model",), ("learning_rate",), ("training",), ("model", "type_map"), ("model", "descriptor"),
                 ("training", "training_data"), ("training", "training_data", "systems")):  # fmt: skip
        yield Case("options", f"{'.'.join(path)} missing", prepare=_drop(path), says=[path[-1]])
    for path, value in EXTREME.items():
        yield Case(
            "options", f"{path} = {str(value)[:30]}, trained", TRAIN, _put(path.strip().split("."), value), EITHER
        )
    yield Case("options", "a good input", TRAIN, expected=ACCEPTED)


def _options(section: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Option]]:
    """Yield options of the sections that the input of a case has, with their paths."""
    for option in options(section):
        here = (*path, option.name)
        yield here, option
        if option.sections and not option.many:
            yield from _options(option.sections[0], here)


def _wrong_values(option: Option) -> Iterator[tuple[str, object]]:
    """Yield values that an option can never have."""
    kinds = [typing.get_origin(kind) or kind for kind in option.types]
    if option.sections:
        yield from (("a number", 3), ("a text", "x"), *(() if option.many else (("a list", [1, 2]),)))
        return
    if dict not in kinds:
        yield "a section", {"a": 1}
    if str not in kinds and list not in kinds:
        yield from (("a text", "many"), ("a list", [1]))
    if int in kinds or float in kinds:
        yield from (("true", True),) if bool not in kinds else ()
        if int in kinds:
            yield "a number of 30 digits", 10**30
    if str in kinds and not option.choices:
        yield "a text with a NUL", "a\0b"
    if option.choices:
        yield "an unknown word", "whatever"
    if not option.nullable:
        yield "null", None


def _put(path, value):
    def put() -> None:
        config = json.loads(Path("input.json").read_text())
        place = config
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                place = {}
        place[path[-1]] = value
        Path("input.json").write_text(json.dumps(config, indent=1))

    return put


def _drop(path):
    def drop() -> None:
        config = json.loads(Path("input.json").read_text())
        place = config
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        Path("input.json").write_text(json.dumps(config))

    return drop
