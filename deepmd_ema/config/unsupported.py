"""Options of DeePMD-kit 3.2.0 that are not here, and removed ones, which are refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepmd_ema.config.messages import (
    NOT_AVAILABLE,
    Names,
    Place,
    Values,
    dotted,
    of_one_task,
    show,
)


@dataclass(frozen=True)
class Unavailable:
    """An option of DeePMD-kit, or of an earlier version, that is not here.

    Attributes:
        no_op_values: values without effect (its default in DeePMD-kit); they are accepted and
            dropped. None: every value, because the option only informs.
        instead: remedy, or an empty string.
        reason: reason why it is not here.
    """

    no_op_values: tuple[Any, ...] | None = (None,)
    instead: str = ""
    reason: str = NOT_AVAILABLE

    def is_no_op(self, value: Any) -> bool:
        """Whether the value has no effect (true is not 1 here)."""
        # 1 == True in Python, but 1 is not the value of a switch
        return self.no_op_values is None or any(
            value == h and isinstance(value, bool) == isinstance(h, bool)
            for h in self.no_op_values
        )


_OFF = Unavailable((None, False))
_EMPTY = Unavailable((None, {}, []))
_IN_DESCRIPTOR = (
    "DeePMD-kit's torch backend refuses it too: the embedding of elements is part of the "
    "descriptor (tebd_dim). Remove it."
)
_DPLR = "Train on energies and forces without the long-range part, and remove it."
_GENERALIZED = (
    "Generalized forces are not trained on. Remove it to train on energies and forces."
)

# section -> key -> entry
UNAVAILABLE: dict[str, dict[str, Unavailable]] = {
    "": {
        "nvnmd": Unavailable(
            (None, {}),
            "Only DeePMD-kit's TensorFlow backend has it, for special hardware.",
        )
    },
    "model": {
        "shared_dict": Unavailable(
            (None, {}),
            "Parts of one model do not share weights here; give each its sections.",
        ),
        "srtab_add_bias": Unavailable((None, True)),
        "compress": _EMPTY,
        "spin": Unavailable(
            (None, {}, []),
            "Models of magnetic spins are not here. Without this section another model is "
            "trained, whose energies do not depend on spins: train this one with DeePMD-kit.",
        ),
        "modifier": Unavailable((None, {}), _DPLR),
        "type_embedding": Unavailable((None, {}), _IN_DESCRIPTOR),
        "info": Unavailable(no_op_values=None),
        "lora": Unavailable(
            (None,),
            "All weights are trained: remove it, and start from a checkpoint by --finetune.",
        ),
    },
    "loss": {
        **dict.fromkeys(
            ("start_pref_gf", "limit_pref_gf"), Unavailable((None, 0), _GENERALIZED)
        ),
        "numb_generalized_coord": Unavailable((None, 0), _GENERALIZED),
        "enable_atom_ener_coeff": _OFF,
    },
    "training": {
        **dict.fromkeys(("profiling", "enable_profiler"), _OFF),
        "profiling_file": Unavailable((None, "timeline.json")),
        "acc_freq": Unavailable((None, 1)),
        "neighbor_graph_method": Unavailable((None, "auto")),
    },
}
# the same for options of earlier versions of dp-ema; those of a checkpoint are left out
REMOVED: dict[str, dict[str, Unavailable]] = {
    "training": {
        "solve_last_layer": Unavailable(
            (None, False),
            "Remove it; an average (enable_ema) has errors as low.",
            "was removed, since virials got worse and dynamics failed more often",
        )
    },
    "validating": {
        "physics": Unavailable(
            (None,),
            "Remove it, and run `dp-ema test --physics` after training.",
            "was removed",
        )
    },
}
_METRIC_INSTEAD = "F:RMSE"
REMOVED_METRICS = dict.fromkeys(
    ("P:DRIFT", "P:SPREAD", "P:FAILURE", "P:EXTREMA", "P:LIMITS"),
    f"Use {_METRIC_INSTEAD} or another error, and `dp-ema test --physics` after training.",
)

# Section -> values of its `type`, aliases included. A type may be here as a model and not as a part
# of one: the registries of the sections differ.
UNAVAILABLE_TYPES: dict[str, Names] = {
    "model": ("frozen", "pairtab", "pairwise_dprc"),
    "model.models": (
        "dpa4",
        "DPA4",
        "SeZM",
        "sezm",
        "frozen",
        "linear_ener",
        "pairwise_dprc",
        "inner_potential",
    ),
    "model.descriptor": (
        "loc_frame",
        "se_a_tpe",
        "se_a_ebd",
        "se_a_ebd_v2",
        "se_a_tpe_v2",
        "se_a_mask",
        "dpa4c",
        "DPA4C",
    ),
    "model.fitting_net": ("population",),
    "loss": ("dens", "ener_spin", "population"),
}

# remedies for some of them
_TENSORFLOW = "Only DeePMD-kit's TensorFlow backend has it"
_EMBEDDED = (
    f"{_TENSORFLOW}: se_atten_v2 distinguishes elements by an embedding as well."
)
INSTEAD_OF_TYPES: dict[str, str] = {
    **dict.fromkeys(("se_a_ebd", "se_a_ebd_v2", "se_a_tpe", "se_a_tpe_v2"), _EMBEDDED),
    **dict.fromkeys(("loc_frame", "se_a_mask", "pairwise_dprc"), f"{_TENSORFLOW}."),
    "pairtab": (
        "A table alone has nothing to train, and DeePMD-kit's torch backend does not take it "
        "either. Use it as a part of a linear_ener model, or as use_srtab of a standard one for "
        "short distances."
    ),
    "frozen": (
        "A frozen model has nothing to train, and a part of DeePMD-kit's torch backend cannot be "
        "one. Give the "
        'whole model, and its weights by --init-model; "trainable": false keeps a part as it is.'
    ),
    "population": "Populations of atoms are not here: train this one with DeePMD-kit.",
    "ener_spin": (
        "It is the loss of models of magnetic spins, which are not here: train this one with "
        "DeePMD-kit."
    ),
    "dens": (
        "It denoises structures beside training. The loss ener trains the same model without that."
    ),
    "linear_ener": "DeePMD-kit's torch backend refuses it too. Put its parts here, with weights.",
}


def unavailable_key(section: Place, key: str) -> Unavailable | None:
    """Return the entry of a key that dp-ema does not support, or no longer; None for any other."""
    path = _of_standard(section)
    return UNAVAILABLE.get(path, {}).get(key) or REMOVED.get(path, {}).get(key)


def without_removed(values: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Return the config of a checkpoint without removed options, and notes.

    There is a note for each one that had an effect.
    """
    config = dict(values)
    notes = []
    for name, removed in REMOVED.items():
        section = values.get(name)
        if isinstance(section, Mapping):
            config[name] = {
                key: value for key, value in section.items() if key not in removed
            }
            notes += [
                f"{name}.{key} = {show(section[key])} in the checkpoint: the option "
                f"{removed[key].reason}"
                for key in section.keys() & removed.keys()
                if not removed[key].is_no_op(section[key])
            ]
    # an error of predictions in place of a removed metric
    for *outer, key in (
        ("validating", "validation_metric"),
        ("validating", "early_stop", "metric"),
    ):
        owner: Any = config
        for name in outer:
            if isinstance(section := owner.get(name), Mapping):
                # sections are copied on the way, because those of the caller must not change
                owner[name] = owner = dict(section)
        if (metric := owner.get(key)) in REMOVED_METRICS:
            place = dotted((*outer, key))
            notes.append(
                f"{place} = {show(metric)} in the checkpoint: was removed, {_METRIC_INSTEAD} is "
                "taken"
            )
            owner[key] = _METRIC_INSTEAD
    return config, notes


def unavailable_type(section: Place, name: Any) -> str | None:
    """Return the remedy for a ``type`` that dp-ema does not support; None for any other one.

    Args:
        section: path of the section; a part of a hybrid descriptor is a descriptor.
        name: its ``type``.
    """
    is_part = (
        re.fullmatch(r"model\.models\[\d+\]", of_one_task(dotted(section))) is not None
    )
    path = (
        "model.models"
        if is_part
        else re.sub(r"\.list\[\d+\]\Z", "", _of_standard(section))
    )
    return (
        INSTEAD_OF_TYPES.get(name, "")
        if name in UNAVAILABLE_TYPES.get(path, ())
        else None
    )


def _of_standard(path: Place) -> str:
    """Return a path in dots as it is in a standard model of one task.

    Parts of a sum of models have the same sections as such a model.
    """
    return re.sub(r"\Amodel\.models\[\d+\]", "model", of_one_task(dotted(path)))
