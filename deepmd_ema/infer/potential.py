"""The Python interface: energies, forces and virials of structures given as arrays."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import (
    APARAM,
    ATOM_ENERGY,
    ENERGY,
    FORCE,
    FPARAM,
    LABELS,
    POLAR,
    VIRIAL,
)
from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.loader import atoms_at_once
from deepmd_ema.data.sampler import batch_edges
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import UserError, did_you_mean
from deepmd_ema.geometry import KeptPairs, find_pairs
from deepmd_ema.infer.compiled import CompiledModel
from deepmd_ema.infer.kept_slots import MovingFrame
from deepmd_ema.infer.load import LoadedModel, load_model, without_modes
from deepmd_ema.model.descriptor.env_statistics import has_equal_slots
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.model.tabulated import tabulate

if TYPE_CHECKING:
    from deepmd_ema.infer.images import Images

logger = logging.getLogger(__name__)

LONE_ATOM = (
    "atom %s has no neighbor within %g angstrom: the model gives it a constant energy and no "
    "force. Has it left the others, or are positions or cell in another unit? This is reported "
    "once."
)

Rows: TypeAlias = "NDArray[np.float64] | list[None]"  # one per frame
SAME_PLACE = 1e-3  # angstrom; two atoms this close leave no direction between them
_THREADS_OF = os.getpid()  # the process in which torch may have started threads
_ROUNDING = 1e-6  # of a distance that was found twice
# a frame of more atoms whose pairs are kept is evaluated alone on a CPU: keeping its slots as well
# is worth more than sharing a batch (water, se_e2_a: 1.2 times at 96 atoms; at 12 atoms a batch of
# 64 frames is 5 times as fast)
MAX_ATOMS_SHARING = 64


@dataclass(frozen=True)
class Prediction:
    """Predictions of a model for F frames of N atoms.

    Attributes:
        energy: (F,), eV.
        force: (F, N, 3), eV/angstrom.
        virial: (F, 9), eV, row major; minus the stress times the volume.
        atom_energy: (F, N), eV.
    """

    energy: NDArray[np.float64]
    force: NDArray[np.float64]
    virial: NDArray[np.float64]
    atom_energy: NDArray[np.float64]


@dataclass(frozen=True)
class QuantityPrediction:
    """Predictions of a model of another quantity than energies, also as attributes of its name:
    ``.dipole``.

    Attributes:
        name: ``dipole``, ``polarizability``, ``dos``, or that of the property.
        value: (F, ...), that of the frames: (F, 3), (F, 3, 3) or (F, W).
        atom_value: (F, N, ...), those of the atoms, also called ``atom_`` and the name.
    """

    name: str
    value: NDArray[np.float64]
    atom_value: NDArray[np.float64]

    def __getattr__(self, name: str) -> NDArray[np.float64]:
        """Return the values by their name.

        Raises:
            AttributeError: for what the model does not predict.
        """
        if name.startswith("__") or name.removeprefix("atom_") != self.name:
            raise AttributeError(
                f"{name}: this model predicts {self.__dict__.get('name')} and nothing else"
            )
        return self.atom_value if name.startswith("atom_") else self.value


class Potential:
    """A trained model that evaluates structures.

    It can be copied and pickled. Several threads may use it, each with ``kept`` pairs of its own.

    Args:
        path: a ``.pt`` checkpoint, the folder of a run, a frozen ``.dp``, ``.yaml`` or ``.pt2``, or
            a model already loaded. A ``.pt2`` is machine code, which runs when it is loaded: only
            from whom you trust.
        device: ``cpu``, ``cuda``, ``cuda:1``; CUDA when there is one if not given.
        head: which model of a file that holds several.

    Attributes:
        device: of the model.
        predicts_energies: whether the model predicts energies, not another quantity.
    """

    def __init__(
        self, path: str | Path | LoadedModel, device: str | None = None, head: str | None = None
    ) -> None:
        loaded = path if isinstance(path, LoadedModel) else load_model(path, head=head)
        self.info = loaded.info
        self.config = loaded.config
        self._loaded = loaded
        with without_modes():
            self._model, self.device = loaded.on(device)
        predicted = self.config.fitting_net.labels
        self.predicts_energies = ENERGY in predicted
        self._names: tuple[str, ...] = (
            (ENERGY, FORCE, VIRIAL, ATOM_ENERGY) if self.predicts_energies else predicted
        )
        self._layout = self._model.layout
        # a neighbor that has changed its slot then has another energy
        self._keeps_slots = MovingFrame.serves(self._layout) and has_equal_slots(self._model)
        if isinstance(self._model, EnergyModel):
            tabulate(self._model)
        self._warned: set[str] = set()
        self._images: Images | None = None  # of the last frame
        # several calculators may share a potential, as those of the images of a band
        self._moving: WeakKeyDictionary[KeptPairs, MovingFrame] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments of a copy, without kept pairs and images and without compiled
        code.
        """
        return type(self), (self._loaded, str(self.device))

    @property
    def type_map(self) -> tuple[str, ...]:
        """Names of the elements; a type is a place in it."""
        return tuple(self._model.type_map)

    @property
    def num_conditions(self) -> dict[str, int]:
        """Number of values of ``fparam`` per frame and of ``aparam`` per atom; 0 if the model takes
        none.
        """
        return {
            FPARAM: self.config.fitting_net.numb_fparam,
            APARAM: self.config.fitting_net.numb_aparam,
        }

    @property
    def default_fparam(self) -> Sequence[float] | None:
        """Frame parameters of frames that are evaluated without."""
        return self.config.fitting_net.default_fparam

    @property
    def rcut(self) -> float:
        """Cutoff radius, angstrom."""
        return self._layout.rcut

    def evaluate(
        self,
        coord: ArrayLike,
        types: Sequence[int] | Sequence[str] | ArrayLike,
        box: ArrayLike | None = None,
        fparam: ArrayLike | None = None,
        aparam: ArrayLike | None = None,
        kept: KeptPairs | None = None,
    ) -> Any:
        """Return energies, forces, virials and atomic energies of F frames of N atoms, a
        :class:`Prediction`.

        Of a model of dipoles, polarizabilities, properties or densities of states a
        :class:`QuantityPrediction`.

        Args:
            coord: (F, N, 3), (F, 3N), or (N, 3) for one frame; angstrom.
            types: (N,) or (F, N): places in ``type_map``, or element symbols.
            box: cell vectors as rows, angstrom: (F, 3, 3) or (F, 9), or (3, 3) or (9,) for all
                frames; None: open.
            fparam: frame parameters, (F, P) or (P,) for all frames.
            aparam: atomic parameters, (F, N, Q) or (F, N Q), or (N, Q) for all frames.
            kept: neighbor pairs that are kept from frame to frame and from call to call; None: each
                frame is searched.

        Raises:
            UserError: if an array has another shape, a number is not finite, a type is unknown, or
                the model has no energy for a frame, as for two atoms in one place.
        """
        frames = _frames(self, coord, types, box, fparam, aparam)
        count, natoms = len(frames), np.shape(types)[-1]
        # pairs that are kept are those of the frame before
        together = [frames] if kept is None else [[frame] for frame in frames]
        found = [self._arrays(some, None if kept is None else [kept]) for some in together]
        if not self.predicts_energies:
            name, of_atom = self.config.fitting_net.labels
            shape = (3, 3) if name == POLAR else LABELS[name].shape
            values = (np.concatenate([part[one] for part in found]) for one in (name, of_atom))
            whole, atoms = (
                of.reshape(*sizes, *shape) for of, sizes in zip(values, ((count,), (count, natoms)))
            )
            return QuantityPrediction(name.partition("[")[0], whole, atoms)
        shapes = {
            ENERGY: (count,),
            FORCE: (count, natoms, 3),
            VIRIAL: (count, 9),
            ATOM_ENERGY: (count, natoms),
        }
        return Prediction(
            *(
                np.concatenate([np.zeros(0), *(part[name] for part in found)]).reshape(shape)
                for name, shape in shapes.items()
            )
        )

    def evaluate_systems(
        self,
        systems: Sequence[
            tuple[ArrayLike, Sequence[int] | Sequence[str] | ArrayLike, ArrayLike | None]
        ],
        kept: Sequence[KeptPairs] | None = None,
    ) -> list[Prediction]:
        """Return energies, forces, virials and atomic energies of S systems of any sizes, which
        share batches.

        Args:
            systems: positions (N, 3) in angstrom, types (N,) as for :meth:`evaluate`, and cell (3,
                3) or None of each.
            kept: neighbor pairs of each system, or of more, that are kept from call to call; None:
                all are searched.

        Raises:
            UserError: as :meth:`evaluate`, and of a model that does not predict energies.
        """
        self._loaded.require_energies("evaluate_systems")
        rows = (_frames(self, *system, None, None) for system in systems)
        frames = [replace(frame, source=("arrays", k)) for k, (frame,) in enumerate(rows)]
        if kept is not None and len(kept) < len(frames):
            raise UserError(
                f"kept: pairs of {len(kept)} systems, expected those of {len(frames)} or more."
            )
        found = self._arrays(frames, kept)
        ends = np.cumsum([0, *(frame.num_atoms for frame in frames)])
        return [
            Prediction(
                found[ENERGY][k : k + 1],
                found[FORCE][3 * begin : 3 * end].reshape(1, -1, 3),
                found[VIRIAL][9 * k : 9 * k + 9].reshape(1, 9),
                found[ATOM_ENERGY][begin:end].reshape(1, -1),
            )
            for k, (begin, end) in enumerate(pairwise(ends))
        ]

    def _arrays(
        self, frames: Sequence[Frame], kept: Sequence[KeptPairs] | None
    ) -> dict[str, NDArray[np.float64]]:
        """Return the numbers of all frames, one after the other."""
        _refrain_from_lost_threads()
        with without_modes(self.device):
            parts = self._parts(frames, [None] * len(frames) if kept is None else kept)
        names = self._names
        found = {
            name: np.concatenate([np.zeros(0), *(part[name].ravel() for part in parts)])
            for name in names
        }
        if not all(np.isfinite(value).all() for value in found.values()):
            _refuse_without_energy(frames, self)
        has_force = FORCE in found and LONE_ATOM not in self._warned
        if has_force and (lone := _lone_atom(frames, found[FORCE].reshape(-1, 3), self)):
            self._warn(LONE_ATOM, lone, self.rcut)
        return found

    def _parts(
        self, frames: Sequence[Frame], kept: Sequence[KeptPairs | None]
    ) -> list[dict[str, Any]]:
        """Return the arrays of one batch after the other."""
        if isinstance(self._model, CompiledModel):
            return [self._run(self._model, frame, pairs) for frame, pairs in zip(frames, kept)]
        parts = []
        rows = list(zip(frames, kept))
        limit = atoms_at_once(self.device)
        # on a CPU a large frame whose pairs are kept is evaluated alone
        most_shared = MAX_ATOMS_SHARING if self.device.type == "cpu" else math.inf
        sizes = [
            limit if pairs is not None and f.num_atoms > most_shared else f.num_atoms
            for f, pairs in rows
        ]
        for begin, end in pairwise(batch_edges(np.array(sizes), limit)):
            group = rows[begin:end]
            placed, (first, first_pairs) = None, group[0]
            if len(group) == 1 and first_pairs is not None and self._keeps_slots:
                placed = self._placed(first, first_pairs)
            if placed is None:
                found = [
                    (frame, find_pairs if pairs is None else pairs.find) for frame, pairs in group
                ]
                paired = [pair_frame(frame, self._layout, find) for frame, find in found]
                most = np.max([frame.most for frame in paired], axis=0).tolist()
                placed = collate(paired, self._layout), most, min(frame.nearest for frame in paired)
            batch, most, nearest = placed
            self._warn_once(most, nearest)
            batch = batch.to(self.device)
            outputs = {
                name: value for name, value in self._model(batch).items() if name in self._names
            }
            outputs |= {
                name: batch.in_file_order(outputs[name])
                for name in self._names
                if LABELS[name].per_atom
            }
            parts.append(
                {name: of.detach().to("cpu", torch.float64).numpy() for name, of in outputs.items()}
            )
        return parts

    def _placed(self, frame: Frame, kept: KeptPairs) -> tuple[Batch, list[int], float] | None:
        """Return a frame by pairs that are kept, see :meth:`MovingFrame.at`."""
        pairs = kept.reaching(frame.coord, frame.box, self.rcut)
        moving = self._moving.get(kept)
        if moving is None or not moving.holds(frame, pairs):
            moving = self._moving[kept] = MovingFrame(frame, pairs, self._layout)
        return moving.at(frame)

    def _run(
        self, model: CompiledModel, frame: Frame, kept: KeptPairs | None
    ) -> dict[str, NDArray[np.float64]]:
        from deepmd_ema.infer.images import Images

        where = frame.coord, frame.box, self.rcut
        pairs = find_pairs(*where) if kept is None else kept.reaching(*where)
        images = self._images
        if images is None or not images.hold(frame, pairs):
            close = (self.info.min_nbor_dist or 0.0) + (0.0 if kept is None else kept.skin)
            images = self._images = Images(frame, pairs, self._layout, close, self.device)
        self._warn_once(list(images.most(frame.coord)), images.nearest(frame.coord))
        given = {FPARAM: None if frame.fparam is None else frame.fparam[None], APARAM: frame.aparam}
        conditions = {
            name: torch.tensor(v, device=self.device) for name, v in given.items() if v is not None
        }
        atype, nlist, mapping = images.tensors
        found = model.frame(images.coord(frame.coord), atype, nlist, mapping, conditions)
        return {name: value.to("cpu").numpy() for name, value in found.items()}

    def _warn_once(self, most: list[int], nearest: float) -> None:
        """Log what the model was not made for: neighbors that it drops, and atoms nearer than it
        was trained on.
        """
        kept = list(self._layout.sel)
        if any(map(gt, most, kept)):
            self._warn(
                "an atom has up to %s neighbors within %g angstrom, and the model keeps %s (sel): "
                "the farthest are dropped, which makes the energy jump. Train with a larger sel. "
                "This is reported once.",
                most,
                self.rcut,
                kept,
            )
        trained = self.info.min_nbor_dist or 0.0
        if trained < self.rcut and nearest < trained * (1 - _ROUNDING):
            self._warn(
                "two atoms are %.3f angstrom apart, and the nearest pair of the training data "
                "%.3f: predictions for such frames are extrapolations. This is reported once.",
                nearest,
                trained,
            )

    def _warn(self, text: str, *values: Any) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)


def describe_short_pair(
    frame: Frame, model: nn.Module, type_map: Sequence[str], rcut: float
) -> str | None:
    """Describe the shortest pair of a frame if a model has no energy for it, else return None.

    Args:
        frame: atoms are numbered as in its file.
        model: may have tables of pair energies.
        type_map: names of the elements.
        rcut: cutoff radius of the model, angstrom.
    """
    tables = [part for part in model.modules() if isinstance(part, PairTable)]
    first = max((table.first for table in tables), default=0.0)
    pairs = find_pairs(frame.coord, frame.box, rcut)
    if not pairs.nearest < max(first, SAME_PLACE):
        return None
    distance = np.linalg.norm(pairs.vector(frame.coord, frame.box), axis=1)
    one, other = (
        frame.describe_atom(side[distance.argmin()], type_map) for side in (pairs.i, pairs.j)
    )
    who = f"atoms {one} and {other} are" if one != other else f"atom {one} and an image of it are"
    if pairs.nearest < first:
        last = max(table.rcut for table in tables)
        why = f"the table of pair energies of the model covers {first:g} to {last:g} angstrom"
    else:
        why = "the model has no direction between them"
    return f"{who} {pairs.nearest:.4g} angstrom apart, and {why}. Move them apart."


def _refrain_from_lost_threads() -> None:
    """Let torch compute with one thread in a process that forked: it would wait for the threads of
    its parent.
    """
    if os.getpid() != _THREADS_OF and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning(
            "this process was forked from another that uses torch, whose threads it does not "
            "have: torch computes with one thread here. Start processes with "
            "multiprocessing.set_start_method('spawn') to have more."
        )


def _refuse_without_energy(frames: Sequence[Frame], potential: Potential) -> None:
    """Raise UserError for frames that have no finite energies and forces; one of them spoils a
    batch.
    """
    for frame in frames:
        short = describe_short_pair(
            frame, potential._loaded.model, potential.type_map, potential.rcut
        )
        if short is not None:
            raise UserError(f"frame {frame.source[1]} (from 0): {short}")
    raise UserError(
        f"{potential.info.path}: the model gives no finite energies and forces. Does it hold nan, "
        "or are these frames far from what it was trained on?"
    )


def _lone_atom(
    frames: Sequence[Frame], force: NDArray[np.float64], potential: Potential
) -> str | None:
    """Return an atom among others that has no neighbor; they are searched only if some atom has no
    force (N, 3).
    """
    still = np.logical_not(force.any(axis=1))
    ends = np.cumsum([0, *(frame.num_atoms for frame in frames)])
    for frame, (begin, end) in zip(frames, pairwise(ends)) if still.any() else ():
        if frame.num_atoms > 1 and still[begin:end].any():
            lone = np.setdiff1d(
                np.arange(frame.num_atoms), find_pairs(frame.coord, frame.box, potential.rcut).i
            )
            if len(lone):
                return frame.describe_atom(int(lone[0]), potential.type_map)
    return None


def _frames(
    potential: Potential, coord: Any, types: Any, box: Any, fparam: Any, aparam: Any
) -> list[Frame]:
    kinds = _type_numbers(types, potential.type_map)
    natoms = kinds.shape[-1]
    coords, of_frame = _numbers("coord", coord), ((natoms, 3), (3 * natoms,))
    if coords.shape not in of_frame and coords.shape[1:] not in of_frame:
        known = f"(F, {natoms}, 3), (F, {3 * natoms}) or ({natoms}, 3)"
        raise UserError(f"coord: shape {coords.shape}, expected {known} for {natoms} atoms.")
    coords = coords.reshape(-1, natoms, 3)
    count = len(coords)
    if kinds.ndim == 2 and len(kinds) != count:
        raise UserError(f"types: shape {kinds.shape}, expected ({natoms},) or ({count}, {natoms}).")
    kinds = np.broadcast_to(kinds, (count, natoms))
    boxes = _boxes(box, count)
    fitting = potential.config.fitting_net
    default = fitting.default_fparam or None  # an empty list is none
    per_frame = _parameters(
        "fparam", default if fparam is None else fparam, count, (fitting.numb_fparam,)
    )
    per_atom = _parameters("aparam", aparam, count, (natoms, fitting.numb_aparam))
    rows, order = zip(coords, kinds, boxes, per_frame, per_atom), np.arange(natoms)
    return [
        Frame(x, kind, cell, fparam=frame, aparam=atoms, source=("arrays", k), file_index=order)
        for k, (x, kind, cell, frame, atoms) in enumerate(rows)
    ]


def _type_numbers(types: Any, type_map: Sequence[str]) -> NDArray[np.int64]:
    found = np.asarray(types)
    if found.ndim not in (1, 2) or found.shape[-1] == 0:
        raise UserError(
            f"types: shape {found.shape}, expected (N,) or (F, N) with at least one atom."
        )
    if found.dtype.kind in "US":
        place = {name: k for k, name in enumerate(type_map)}
        unknown = sorted(set(found.ravel().tolist()) - set(place))
        if unknown:
            raise UserError(
                f"types: the element {unknown[0]!r} is not in the model. "
                f"{did_you_mean(unknown[0], type_map)}"
            )
        return np.vectorize(place.__getitem__, otypes=[np.int64])(found.astype(str))
    if found.dtype.kind not in "iu":
        raise UserError(
            f"types: values of kind {found.dtype}, expected whole numbers or element symbols."
        )
    if found.min() < 0 or found.max() >= len(type_map):
        bad = found.min() if found.min() < 0 else found.max()
        why = " Leave virtual atoms out." if bad == -1 else ""
        raise UserError(f"types: {bad} is no place in type_map {list(type_map)} (from 0).{why}")
    return found.astype(np.int64)


def _boxes(box: Any, count: int) -> Rows:
    if box is None:
        return [None] * count
    boxes = _rows("box", box, count, (3, 3), f"({count}, 3, 3), ({count}, 9), (3, 3), (9,) or None")
    flat = np.flatnonzero(np.abs(np.linalg.det(boxes)) < 1e-6)
    if len(flat):
        raise UserError(
            f"box: frame {flat[0]} has a cell without volume. Give None for an open system."
        )
    return boxes


def _parameters(name: str, value: Any, count: int, shape: tuple[int, ...]) -> Rows:
    """Return (F, *shape) parameters, or F times None when the model takes none."""
    if shape[-1] == 0:
        if value is not None:
            raise UserError(f"{name}: given, but this model takes none. Leave it out.")
        return [None] * count
    if value is None:
        raise UserError(
            f"{name}: this model needs {' x '.join(map(str, shape))} numbers per frame."
        )
    return _rows(name, value, count, shape, f"{(count, *shape)} or {shape}")


def _rows(
    name: str, value: Any, count: int, shape: tuple[int, ...], expected: str
) -> NDArray[np.float64]:
    """Return (F, *shape) numbers that are given for each frame or once for all of them, in shapes
    ``expected``.
    """
    found = _numbers(name, value)
    for given in (shape, (math.prod(shape),)):
        if found.shape in (given, (count, *given)):
            return np.broadcast_to(found.reshape(-1, *shape), (count, *shape))
    raise UserError(f"{name}: shape {found.shape}, expected {expected}.")


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: expected an array of numbers ({error}).") from error
    if not np.isfinite(found).all():
        raise UserError(
            f"{name}: {np.argwhere(~np.isfinite(found))[0].tolist()} is not a finite number."
        )
    return found
