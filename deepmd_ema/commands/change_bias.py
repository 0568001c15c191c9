"""`dp-ema change-bias`: another output bias in a model file, fitted to data or as given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.file import name_of_weights
from deepmd_ema.config import choose_head
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.outputs import GATHERED_SUFFIX
from deepmd_ema.data.loader import atoms_at_once, sequential_batches
from deepmd_ema.distributed.tensors import prefix_of
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import UserError
from deepmd_ema.files import MODEL_FILE, check_output
from deepmd_ema.infer.evaluate import first_frames, open_labelled
from deepmd_ema.infer.load import FROZEN_SUFFIXES, LoadedModel, ModelFile, load_models
from deepmd_ema.interop import dp
from deepmd_ema.model.model_set import ModelSet, unnested
from deepmd_ema.model.output_bias import (
    BiasFit,
    FrameEnergies,
    change_bias,
    energies_of,
    fixed_elements,
    set_bias,
)
from deepmd_ema.report.table import Column, Table, render
from deepmd_ema.text import counted, first_few
from deepmd_ema.utils import LIVE

Array: TypeAlias = np.ndarray

CHANGE = "change"
SET = "set"
GIVEN = "given"
WRITTEN_SUFFIXES = (".dp", ".yaml", ".yml")


@dataclass(frozen=True)
class BiasRequest:
    """Source of a new bias: a fit to ``systems``, or ``values``.

    Attributes:
        mode: ``change`` adds what makes the mean residual per atom zero, ``set`` takes the fit of
            the labels alone.
        systems: systems, or folders searched for systems.
        num_frames: frames of each system, from its first; 0 takes all.
        values: eV, one per element of the model, instead of a fit.
        source: of the data, as the record in the file names it; by default the systems.
    """

    mode: str = CHANGE
    systems: Sequence[str] = ()
    num_frames: int = 0
    values: Sequence[float] | None = None
    source: str = ""


@dataclass(frozen=True, eq=False)
class ChangedBias:
    """A model file with another bias.

    Attributes:
        path: the file that was written.
        source: all models of the file as they were.
        head: name of the model that has another bias.
        record: mode, frames and source of the change, as the file has them.
        before: (T,) eV.
        after: (T,) eV.
        frames: with labels and the predictions of the model as it was, or None without data.
        undetermined: elements whose energies the compositions do not determine separately.
    """

    path: Path
    source: ModelFile
    head: str
    record: Mapping[str, Any]
    before: Array
    after: Array
    frames: FrameEnergies | None = None
    undetermined: tuple[str, ...] = ()

    @property
    def loaded(self) -> LoadedModel:
        """The model as it was."""
        return self.source.models[self.head]

    def residuals(self) -> tuple[Array, Array]:
        """Return label minus prediction per atom (F,), eV, before and after the change."""
        frames = self.frames
        assert frames is not None, "values were given: nothing was evaluated"
        # a change of the bias changes energies by it alone: nothing is evaluated again
        before = frames.residual()
        after = frames.residual(self.after - self.before)
        return before / frames.num_atoms, after / frames.num_atoms

    def text(self) -> str:
        """Return the bias before and after, and what it does to the residuals."""
        info = self.loaded.info
        lines = [
            f"{info.path}: {info.describe()}",
            f"output bias: {describe_record(self.record)}",
        ]
        lines += render(self.table(), "# ")
        if self.undetermined:
            what = "values" if self.record["mode"] == SET else "changes"
            lines.append(
                f"the energies of {', '.join(self.undetermined)} cannot be determined separately "
                f"from these compositions; equal {what} are used"
            )
        if self.frames is not None:
            before, after = self.residuals()
            lines.append("label minus prediction, meV/atom:")
            mean = f"{_in_mev(before.mean())} before, {_in_mev(after.mean())} after"
            lines.append(f"  mean {mean}")
            old_rmse = np.sqrt(np.mean(before**2))
            new_rmse = np.sqrt(np.mean(after**2))
            lines.append(
                f"  RMSE {_in_mev(old_rmse)} before, {_in_mev(new_rmse)} after"
            )
        lines.append(f"wrote {self.path}")
        unchanged = [name for name in self.source.models if name != self.head]
        if unchanged:
            verb = "stay as they are" if len(unchanged) > 1 else "stays as it is"
            lines[-1] += f", in which {', '.join(unchanged)} {verb}"
        return "\n".join(lines)

    def table(self) -> Table:
        """Return the bias of each element before and after."""
        config = self.loaded.config
        rows = []
        for t, name in enumerate(config.type_map):
            remark = ""
            # elements whose bias a fit does not decide, and why
            if self.frames is not None:
                if t in config.atom_exclude_types:
                    remark = "has no energy of its own (atom_exclude_types)"
                elif name in fixed_elements(config):
                    remark = "given by the config of the model"
                elif not self.frames.counts[:, t].any():
                    remark = "not in the data"
            change = (
                round(self.after[t] - self.before[t], 6) + 0.0
            )  # + 0.0 turns -0.0 into 0.0
            rows.append((name, self.before[t], self.after[t], change, remark))
        numbers = (
            Column("before", "eV", ".6f"),
            Column("after", "eV", ".6f"),
            Column("change", "eV", "+.6f"),
        )
        return Table("", (Column("element"), *numbers, Column()), rows)


def write_changed(
    model: str | Path,
    request: BiasRequest,
    output: str | Path | None = None,
    use_average: bool = False,
    average: str | None = None,
    head: str | None = None,
    device: str | None = None,
) -> ChangedBias:
    """Write a model file with another output bias; everything else in it stays, other models too.

    A checkpoint (``.pt``) becomes a file of kind ``weights``: the live weights or one average,
    without what a restart needs. A ``.dp`` or ``.yaml`` file becomes one of that format.

    Args:
        model: a checkpoint of any kind, the folder of a run, or a ``.dp`` or ``.yaml`` file.
        request: source of the bias.
        output: the file to write; if not given ``<stem>_updated<suffix>`` beside the model, where
            the stem of a checkpoint names weights and step.
        use_average: takes the averaged weights of a training checkpoint.
        average: which average, when there are several; implies ``use_average``.
        head: which model of a file that holds several.
        device: ``cpu``, ``cuda``; CUDA when there is one if not given.

    Raises:
        UserError: if the model or the data cannot be read, no frame has an energy, the values are
            not one per element, or the file cannot be written.
    """
    file = load_models(model, use_average=use_average, average=average)
    head = choose_head(
        {name: each.config.model_branch_alias for name, each in file.models.items()},
        head,
        str(model),
    )
    loaded = file.models[head]
    loaded.require_energies("change-bias")
    path = _target(loaded, model, output)
    before = loaded.model.out_bias.view(-1).numpy().copy()
    type_map = loaded.config.type_map
    if request.values is not None:
        if len(request.values) != len(type_map):
            raise UserError(
                f"-b: {counted(len(request.values), 'value')}, expected one for each of the "
                f"{len(type_map)} elements of the model, in this order: {' '.join(type_map)}."
            )
        if bad := [
            f"{name} {value}"
            for name, value in zip(type_map, request.values)
            if not np.isfinite(value)
        ]:
            raise UserError(f"-b: {', '.join(bad)}: expected finite energies in eV.")
        after = np.array(request.values, float)
        record: dict[str, Any] = {"mode": GIVEN, "source": "values given"}
        done = ChangedBias(path, file, head, record, before, after)
        _write(done, None)
        return done
    # energies alone decide: neither forces nor virials depend on the bias
    systems = open_labelled(request.systems, loaded.config, (ENERGY,))
    names = list(map(str, request.systems))
    where = select_device(device)
    network = loaded.model.to(where)
    batches = sequential_batches(
        systems,
        network.layout,
        None,
        atoms_at_once(where),
        labels=(ENERGY,),
        frames=first_frames(systems, request.num_frames),
    )
    frames = energies_of(network, loaded.config, batches)
    if not len(frames):
        raise UserError(
            f"no frame of {', '.join(names)} has an energy to fit the bias to."
        )
    # `set` forgets the bias of the model; `change` adds to it what the residuals call for
    fit: BiasFit = (
        set_bias(frames) if request.mode == SET else change_bias(frames, before)
    )
    record = {
        "mode": request.mode,
        "frames": len(frames),
        "source": request.source or first_few(names, 3),
    }
    done = ChangedBias(
        path, file, head, record, before, fit.bias, frames, fit.undetermined
    )
    _write(done, fit.std)
    return done


def describe_record(record: Mapping[str, Any]) -> str:
    """Return one line of what ``dp-ema change-bias`` has recorded in a file."""
    if record["mode"] == GIVEN:
        return "set to values given"
    how = "moved by a fit of label minus prediction"
    if record["mode"] == SET:
        how = "set to a fit of the labels"
    return f"{how}, {record['frames']:,} frames of {record['source']}"


def _in_mev(energy: float) -> str:
    return f"{round(1000 * energy, 6) + 0.0:.6g}"  # + 0.0 turns -0.0 into 0.0


def _write(done: ChangedBias, std: Array | None) -> None:
    """Write the file; ``std`` (T,) is the spread of the output, None to keep that of the model."""
    info = done.loaded.info
    # a frozen file is copied with another bias: everything else in it stays
    if info.path.suffix.lower() in FROZEN_SUFFIXES:
        dp.rewrite_bias(
            info.path, done.path, done.after, std, {"bias": dict(done.record)}
        )
        return
    models = done.source.models
    weights = ModelSet({name: each.model for name, each in models.items()}).state_dict()
    bias = f"{prefix_of(done.head)}out_bias"
    weights[bias] = torch.from_numpy(done.after).view_as(weights[bias])
    if std is not None:
        spread = f"{prefix_of(done.head)}out_std"
        weights[spread] = torch.from_numpy(std).view_as(weights[spread])
    distances = unnested(
        {name: each.info.min_nbor_dist for name, each in models.items()}
    )
    head = checkpoint.payload_head(
        "weights", info.weights, info.step, done.source.config, distances
    )
    average = {"average": dict(info.average)} if info.average else {}
    # changes of the other models, which the file had already
    records = {name: each.info.bias for name, each in models.items() if each.info.bias}
    records[done.head] = dict(done.record)
    payload = {**head, "bias": unnested(records), **average, "model": weights}
    checkpoint.save(done.path, payload, option="-o")


def _target(loaded: LoadedModel, model: str | Path, output: str | Path | None) -> Path:
    """Return the file to write, once it is clear that it may be written."""
    source = loaded.info.path
    frozen = source.suffix.lower() in FROZEN_SUFFIXES
    if frozen and source.suffix.lower() not in WRITTEN_SUFFIXES:
        raise UserError(
            f"{model}: change-bias writes .pt, .dp and .yaml. Change the file that this one was "
            "made of."
        )
    if output is not None:
        path = Path(output)
    elif frozen:
        path = source.with_name(f"{source.stem}_updated{source.suffix}")
    else:
        # the name has weights and step, which that of a link to the newest file does not have
        weights = loaded.info.weights if loaded.info.kind == "training" else LIVE
        name = name_of_weights(source.resolve().name, weights, loaded.info.step)
        path = source.with_name(f"{Path(name).stem}_updated{GATHERED_SUFFIX}")
    suffixes = WRITTEN_SUFFIXES if frozen else (GATHERED_SUFFIX,)
    if path.suffix.lower() not in suffixes:
        more = "" if frozen else " `dp-ema freeze` makes a .dp file of it."
        expected = f"expected a name that ends in {' or '.join(suffixes)}"
        raise UserError(f"-o {path}: {expected}, as {source} does.{more}")
    if not frozen:
        checkpoint.refuse_to_replace(path, "-o")
    check_output(path, "-o", MODEL_FILE if frozen else None, [source])
    return path
