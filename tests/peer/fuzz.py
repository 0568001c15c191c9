"""Random option sets of every descriptor: is an accepted option the same function here and in
DeePMD-kit.

usage: python tests/peer/fuzz.py --peer DIR [--sets 20] [--seed 1] [--kinds NAME ...]

For each set DeePMD-kit makes a model in float64, draws all its numbers at random and writes a
``.dp`` file. Read here, the model gives the same energies, atomic energies, forces and virials of a
molecule with an isolated atom, a small skewed cell and a larger box; written again, every entry of
the file is the same, and DeePMD-kit evaluates it, and its checkpoint written here, to the same
numbers. The options of the file are those that the input says here.

The options are those of the sections' classes: both values of a flag, all choices of a text, and of
a number those in ``VALUES``; some by their other spellings.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peer_side
import torch
from comparing import (
    BOUND,
    common,
    differences,
    other_entries,
    predictions,
    run_peer,
    worst_of,
)

from deepmd_ema.config import model_config_from_dict, to_dict
from deepmd_ema.config.fields import options
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.errors import CheckpointError, ConfigError
from deepmd_ema.interop.deepmd_pt import read_deepmd_pt, write_deepmd_pt
from deepmd_ema.interop.dp import read_dp
from deepmd_ema.model.families.dpa2.section import RepformerConfig, RepinitConfig
from deepmd_ema.model.families.dpa3.section import RepflowConfig
from deepmd_ema.model.families.ener.section import EnerFittingConfig

BY_TYPE = ("se_e2_a", "se_e2_r", "se_e3")
MIXED = ("se_atten", "se_atten_v2", "se_e3_tebd", "dpa2", "dpa3")
KINDS = (*BY_TYPE, *MIXED, "hybrid", "zbl")
WRITTEN = {
    "written here": ".dp",
    "as its checkpoint": ".pt",
}  # what the peer reads of dp-ema
COLUMNS = (*peer_side.OUTPUTS, *WRITTEN)

Values = dict[str, Any]
PAIRS = [[[0, 1]], [[1, 1]], [[0, 0], [1, 2]], [[2, 2], [0, 2]], [[1, 0]]]
NEURONS = [[4, 8, 16], [6, 6, 12], [5, 9], [8], [6, 12, 12]]
VALUES: Values = {
    "rcut": [3.4, 3.0],
    "rcut_smth": [0.5, 1.0, 2.5, 0.0],
    "neuron": NEURONS,
    "exclude_types": PAIRS,
    "env_protection": [0.0, 1e-2, 1e-6],
    "tebd_dim": [3, 8, 1],
    "axis_neuron": [2, 4],
    "attn": [4, 8],
    "attn_layer": [0, 1, 2, 3],
    "attn_mask": [False],
    "ln_eps": [None, 1e-3],
    "scaling_factor": [1.0, 2.5],
    "temperature": [0.7, 2.0],
    "lmax": [1],
    "stripped_type_embedding": [None, True],
    "add_chg_spin_ebd": [False],
    "activation_function": [
        "tanh",
        "relu",
        "relu6",
        "softplus",
        "sigmoid",
        "gelu",
        "gelu_tf",
        "silu",
        "silut:3.0",
        "silut",
        "none",
    ],
    "three_body_neuron": [[2, 4, 8], [3, 3], [4]],
    "three_body_rcut": [2.6, 3.0],
    "three_body_rcut_smth": [0.5, 2.0],
    "nlayers": [1, 2, 3],
    "g1_dim": [6, 8, 12],
    "g2_dim": [4, 6],
    "attn1_hidden": [3, 4],
    "attn1_nhead": [1, 2],
    "attn2_hidden": [3, 4],
    "attn2_nhead": [1, 2],
    "update_residual": [0.01, 0.3],
    "n_dim": [8, 12],
    "e_dim": [6, 8],
    "a_dim": [4, 8],
    "e_rcut_smth": [0.5, 2.8],
    "a_rcut": [2.6, 3.0],
    "a_rcut_smth": [0.5, 2.2],
    "a_compress_rate": [0, 1, 2],
    "a_compress_e_rate": [1, 2],
    "n_multi_edge_message": [1, 2],
    "fix_stat_std": [0.3, 0.5, 0.0],
    "sel_reduce_factor": [10.0, 3.0],
    "precision": ["float64"],
}
OF_FITTING: Values = {
    "neuron": [[10, 10], [8, 12, 12], [6]],
    "numb_fparam": [0, 1, 2],
    "numb_aparam": [0, 0, 1, 2],
    "dim_case_embd": [0, 2],
    "default_fparam": [None, [0.3, -0.2]],
    "use_aparam_as_mask": [False],
    "atom_ener": [[], [-3.0, None, 1.5], [0.5, -1.0, 2.0]],
    "rcond": [None, 1e-3],
}
OF_MODEL: Values = {
    "pair_exclude_types": PAIRS,
    "atom_exclude_types": [[2], [0], [0, 1]],
    "data_stat_protect": [0.01, 0.1],
    "preset_out_bias": [{"energy": [-1.0, None, 2.0]}, {"energy": [None, [0.5], None]}],
}


class Draw:
    """Draws sections ``model``, all of one generator."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one(self, values: Any) -> Any:
        """Return one of the values."""
        return values[self.rng.integers(len(values))]

    def often(self, share: float = 0.5) -> bool:
        """Return true in this share of the calls."""
        return bool(self.rng.random() < share)

    def section(
        self, kind: Any, base: Values, more: Values | None = None, share: float = 0.5
    ) -> Values:
        """Return options of a section's class at random over those of ``base``."""
        found, values = dict(base), VALUES | (more or {})
        for option in options(kind):
            choices = (
                values.get(option.name)
                or option.choices
                or [False, True] * (bool in option.types)
            )
            if choices and not option.is_own and self.often(share):
                found[option.name] = self.one(choices)
        return found

    def spelled(self, kind: Any, section: Values) -> Values:
        """Return a section with other spellings of some options and of its type."""
        names = {
            option.name: self.one(option.keys)
            for option in options(kind)
            if self.often(0.4)
        }
        section = {names.get(name, name): value for name, value in section.items()}
        if getattr(kind, "aliases", ()) and "type" in section and self.often(0.3):
            section["type"] = self.one(kind.aliases)
        return section

    def descriptor(
        self, kind: str, cut: bool, extra: int, in_hybrid: bool = False
    ) -> Values:
        """Return a section ``descriptor``; ``cut``: whether it keeps fewer neighbors than there
        are.
        """
        section, base = (
            DESCRIPTORS[kind].section,
            {"type": kind, "precision": "float64"},
        )
        if kind == "dpa2":
            first = {
                "rcut": 3.4,
                "rcut_smth": 0.5,
                "neuron": [4, 8, 16],
                "axis_neuron": 4,
                "nsel": 9 if cut else 60,
                "three_body_sel": 6 if cut else 40,
                "three_body_rcut": 3.0,
            }
            later = {
                "rcut": 2.8,
                "rcut_smth": 0.5,
                "nsel": 6 if cut else 40,
                "g1_dim": 8,
                "g2_dim": 6,
                "nlayers": 2,
                "attn1_hidden": 4,
                "attn2_hidden": 4,
                "update_residual": 0.1,
            }
            base["repinit"] = self.section(
                RepinitConfig, first, {"rcut": [3.4], "rcut_smth": [0.5, 2.5]}
            )
            base["repformer"] = self.section(
                RepformerConfig, later, {"rcut": [2.8], "rcut_smth": [0.5]}
            )
            if base["repinit"]["axis_neuron"] > base["repinit"]["neuron"][-1]:
                base["repinit"]["axis_neuron"] = 2
        elif kind == "dpa3":
            flow = {
                "n_dim": 8,
                "e_dim": 6,
                "a_dim": 4,
                "nlayers": 2,
                "e_rcut": 3.4,
                "e_rcut_smth": 0.5,
                "a_rcut": 2.8,
                "a_rcut_smth": 0.5,
                "e_sel": 9 if cut else 60,
                "a_sel": 6 if cut else 40,
            }
            flow = self.section(RepflowConfig, flow)
            if flow.get("use_dynamic_sel"):
                flow["smooth_edge_update"] = True
            if flow.get("sequential_update"):
                flow |= {"update_style": "res_residual", "update_angle": True}
            if flow.get(
                "use_exp_switch"
            ):  # with a wide switch: a steep one is not small at the cutoff
                flow |= {"e_rcut_smth": 2.8, "a_rcut_smth": 2.2}
            base["repflow"] = self.spelled(RepflowConfig, flow)
        else:
            few = (
                [5, 0, 3] if kind == "se_e2_a" and self.often() else [3, 4, 2]
            )  # none of a type: only se_e2_a there
            sel = (few if cut else [20, 30, 15]) + [5] * extra
            if (
                kind in MIXED
            ):  # DeePMD-kit fails where ``sel`` of one for all elements in a hybrid is a list
                sel = 7 if cut else 60 if in_hybrid or self.often() else [20, 30, 15]
            base |= {"rcut": 3.4, "rcut_smth": 0.5, "neuron": [4, 8, 16], "sel": sel}
        found = self.section(section, base)
        if kind == "se_e2_r":
            found["type_one_side"] = True  # DeePMD-kit's torch backends have no other
        return self.spelled(section, found)

    def fitting(self, extra: int) -> Values:
        """Return a section ``fitting_net``."""
        found = self.section(
            EnerFittingConfig,
            {"neuron": [8, 8], "precision": "float64"},
            OF_FITTING,
            0.4,
        )
        if self.often(0.1):
            found["trainable"] = [self.often() for _ in range(len(found["neuron"]) + 1)]
        if found.pop("default_fparam", None) and found.get("numb_fparam"):
            found["default_fparam"] = [0.3, -0.2][: found["numb_fparam"]]
        if found.get("atom_ener"):
            found["atom_ener"] = found["atom_ener"] + [None] * extra
        return self.spelled(EnerFittingConfig, found)

    def model(self, kind: str, table: str) -> tuple[Values, bool]:
        """Return a section ``model``, and whether it may keep fewer neighbors than there are."""
        extra = (
            0 if kind == "zbl" else self.one([0, 0, 0, 0, 1, 2])
        )  # elements that no frame has; a table has three
        found = {
            name: self.one(values)
            for name, values in OF_MODEL.items()
            if self.often(0.25)
        }
        cut = self.often(0.25) and "pair_exclude_types" not in found
        if "preset_out_bias" in found:
            found["preset_out_bias"] = {
                "energy": found["preset_out_bias"]["energy"] + [3.0] * extra
            }
        if kind == "hybrid":
            parts = [self.one(KINDS[:-2]) for _ in range(self.one([2, 3]))]
            parts = [
                self.descriptor(part, cut, extra, in_hybrid=True) for part in parts
            ]
            found["descriptor"] = {"type": "hybrid", "list": parts}
        else:
            found["descriptor"] = self.descriptor(
                self.one(MIXED) if kind == "zbl" else kind, cut, extra
            )
        if kind == "zbl":
            found |= {
                "use_srtab": table,
                "sw_rmin": self.one([0.6, 0.9]),
                "sw_rmax": self.one([1.8, 2.6]),
            }
        return {
            "type_map": ["O", "H", "Na", "C", "Fe"][: 3 + extra],
            **found,
            "fitting_net": self.fitting(extra),
        }, cut


def main() -> None:
    """Draw the sets, have both programs evaluate them, and print a table and the sets that
    differ.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer", metavar="DIR", required=True, help="virtual environment of DeePMD-kit"
    )
    parser.add_argument("--sets", type=int, default=20, help="option sets of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the choices")
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, choices=KINDS, help="descriptors"
    )
    parser.add_argument(
        "--work", type=Path, default=common.RUNS / "fuzz", help="folder of the models"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for path in args.work.iterdir():
        path.unlink()
    jobs = list(_jobs(args.work, args.kinds, args.sets, args.seed))
    run_peer(args.peer, args.work, jobs)
    for job in jobs:
        job |= {"refused": "", "notes": [], "worst": {}}
        _compare(job)
    again = [
        {
            **job,
            "file": f"{job['out']}.ours{suffix}",
            "out": f"{job['out']}_ours_{suffix[1:]}",
            "name": name,
        }
        for job in jobs
        if job["worst"]
        for name, suffix in WRITTEN.items()
    ]
    run_peer(args.peer, args.work, again)
    for job in again:  # the notes and differences are those of the set
        if answer := _error(job["out"]):
            job["notes"].append(
                f"the peer does not read the file of dp-ema ({job['name']}): {answer}"
            )
            continue
        with np.load(f"{job['out']}.npz") as file:
            reference = Path(job["out"].partition("_ours_")[0] + ".npz")
            job["worst"][job["name"]] = max(worst_of(dict(file), reference).values())
    rows = []
    for kind in args.kinds:
        sets = [job for job in jobs if job["kind"] == kind]
        worst = [
            max((job["worst"].get(key, 0.0) for job in sets), default=0.0)
            for key in COLUMNS
        ]
        counts = [
            len(sets),
            sum(bool(job["refused"]) for job in sets),
            sum(bool(job["worst"]) for job in sets),
        ]
        rows.append([kind, *map(str, counts), *(f"{value:.1e}" for value in worst)])
    print(
        f"# Random options beside DeePMD-kit 3.2.0, {common.today()}, seed {args.seed}, bound "
        f"{BOUND:g}\n"
    )
    print(
        common.table(["kind", "sets", "not in DeePMD-kit", "compared", *COLUMNS], rows),
        end="\n\n",
    )
    for job in jobs:
        job["notes"] += [
            f"{key} differs by {value:.1e}"
            for key, value in job["worst"].items()
            if not value <= BOUND
        ]
        if job["notes"]:
            print(
                f"- {Path(job['out']).name}:",
                *job["notes"],
                f"`{json.dumps(job['input'])}`",
                sep="\n  ",
            )
    if any(job["notes"] for job in jobs):
        raise SystemExit(1)


def _jobs(work: Path, kinds: list[str], sets: int, seed: int) -> Iterator[Values]:
    """Yield the option sets with files of frames."""
    r = 0.3 + 0.02 * np.arange(170)  # pair energies that end at zero beyond all cutoffs
    screened = np.exp(-r / 0.8) / r * np.clip(1 - r / r[-1], 0, None) ** 3
    table = np.column_stack(
        [r, *(charges * screened for charges in (900, 110, 1200, 14, 150, 1700))]
    )
    np.savetxt(work / "table.txt", table, fmt="%.12g")
    _write_systems(work)
    for kind in kinds:
        draw = Draw(np.random.default_rng([seed, KINDS.index(kind)]))
        for number in range(sets):
            section, cut = draw.model(kind, str(work / "table.txt"))
            # in a small cell some neighbors are at the same distance: with cut lists or means by
            # slot anything goes; a pair that is excluded leaves an empty slot there, and its slot
            # to the next one here
            one_mean = "pair_exclude_types" in section or (not cut and draw.often(0.6))
            fitting = section["fitting_net"]
            more = {
                key: fitting[key]
                for key in ("numb_fparam", "numb_aparam", "default_fparam")
                if key in fitting
            }
            yield {
                "kind": kind,
                "input": section,
                "out": str(work / f"{kind}-{number}"),
                "seed": 1000 * seed + number,
                "frames": str(work / ("systems.npz" if one_mean else "untied.npz")),
                "one_mean": one_mean,
                **more,
            }


def _write_systems(work: Path) -> None:
    """Write frames, ``systems.npz``, and those of them without neighbors at the same distance,
    ``untied.npz``.
    """
    rng, arrays = np.random.default_rng(5), {}
    seven = np.array(
        [
            [0.1, 0.1, 0.1],
            [1.0, 0.3, 0.0],
            [-0.2, 1.0, 0.2],
            [2.2, 2.1, 2.0],
            [2.9, 2.7, 2.4],
            [1.6, 2.6, 2.8],
            [3.1, 0.6, 2.8],
        ]
    )
    types, cell = (
        np.array([0, 1, 1, 0, 1, 1, 2]),
        np.array([[4.0, 0, 0, 0.6, 4.3, 0, -0.4, 0.8, 4.2]]),
    )
    lattice = np.stack(
        np.meshgrid(*[np.arange(3) * 2.4] * 3, indexing="ij"), -1
    ).reshape(-1, 3)
    alone = np.vstack([seven, [[9.0, 9.0, 9.0]]])  # no neighbors
    for name, sites, by, kinds, box in (
        ("molecule", np.stack([alone] * 2), 0.08, np.append(types, 1), np.zeros(0)),
        (
            "box",
            lattice[None],
            0.2,
            rng.integers(0, 3, len(lattice)),
            7.2 * np.eye(3).reshape(1, 9),
        ),
        ("cell", np.stack([seven] * 2), 0.08, types, np.repeat(cell, 2, 0)),
    ):
        if name == "cell":
            np.savez(work / "untied.npz", **arrays)
        coord = sites + by * rng.normal(size=sites.shape)
        arrays |= {f"{name}_coord": coord, f"{name}_type": kinds, f"{name}_box": box}
    np.savez(work / "systems.npz", **arrays)


def _error(out: str) -> str:
    """Return the last line of what the peer reported instead of an answer, or an empty string."""
    path = Path(f"{out}.error")
    return path.read_text().strip().splitlines()[-1] if path.exists() else ""


def _compare(job: Values) -> None:
    """Note why a program does not take the set, what its file has otherwise, and the differences by
    output.
    """
    theirs, ours, config = Path(f"{job['out']}.dp"), Path(f"{job['out']}.ours.dp"), None
    job["refused"] = _error(job["out"])
    try:
        config = model_config_from_dict(job["input"])
    except ConfigError as refused:
        job["notes"] += (
            [] if job["refused"] else [f"its input is refused here: {refused}"]
        )
    if not job["refused"]:
        with np.load(f"{job['out']}.npz") as file:
            if not all(np.isfinite(value).all() for value in file.values()):
                job["refused"] = "its energies are not numbers"
    if job["refused"]:
        return
    try:
        read, model, _ = read_dp(theirs)
    except CheckpointError as refused:
        job["notes"].append(f"not read here: {refused}")
        return
    if config is not None:
        if config.use_srtab is not None:  # DeePMD-kit ignores it beside a table
            config = replace(config, preset_out_bias=None)
        job["notes"] += [
            f"option {text}" for text in differences(to_dict(config), to_dict(read), "")
        ]
    job["notes"] += [
        f"file: {text}" for text in other_entries(theirs, ours, read, model)
    ]
    job["worst"] |= worst_of(predictions(theirs, job), Path(f"{job['out']}.npz"))
    checkpoint = ours.with_suffix(".pt")
    write_deepmd_pt(checkpoint, {"": (read, model, {"weights": "live"})})
    _, again, _ = read_deepmd_pt(torch.load(checkpoint, weights_only=True), checkpoint)
    known = again.state_dict()
    if not all(
        torch.equal(value, known[name]) for name, value in model.state_dict().items()
    ):
        job["notes"].append("its tensors are other ones in a checkpoint")


if __name__ == "__main__":
    main()
