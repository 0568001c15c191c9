"""The Python interface: energies, forces and virials of structures given as arrays."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

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
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs, find_pairs
from deepmd_ema.infer.compiled import CompiledModel
from deepmd_ema.infer.kept_slots import FilledSlots, MovingFrame
from deepmd_ema.infer.load import LoadedModel, load_model, without_modes
from deepmd_ema.model.descriptor.env_statistics import has_equal_slots
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.model.tabulated import tabulate
from deepmd_ema.text import did_you_mean

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
_ROUNDING = 1e-6  # relative; the shortest distance of a training frame itself is no extrapolation
# A frame of more atoms whose pairs are kept is evaluated alone on a CPU: its slots are kept as
# well, which saves more than a shared batch (water, se_e2_a: 1.2 times as fast at 96 atoms; at 12
# atoms a batch of 64 frames is 5 times as fast).
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
    """Predictions of a model of another quantity than energies.

    They are also attributes of the name of the quantity, such as ``.dipole`` and ``.atom_dipole``.

    Attributes:
        name: ``dipole``, ``polarizability``, ``dos``, or the name of the property.
        value: (F, ...), of the frames: (F, 3), (F, 3, 3) or (F, W).
        atom_value: (F, N, ...), of the atoms.
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
        self,
        path: str | Path | LoadedModel,
        device: str | None = None,
        head: str | None = None,
    ) -> None:
        loaded = path if isinstance(path, LoadedModel) else load_model(path, head=head)
        self.info = loaded.info
        self.config = loaded.config
        self._loaded = loaded
        # tensors made in inference mode cannot take part in gradients, and forces are gradients
        with without_modes():
            self._model, self.device = loaded.on(device)
        predicted = self.config.fitting_net.labels
        self.predicts_energies = ENERGY in predicted
        self._names: tuple[str, ...] = (
            (ENERGY, FORCE, VIRIAL, ATOM_ENERGY)
            if self.predicts_energies
            else predicted
        )
        self._layout = self._model.layout
        # Slots that are kept are not sorted by distance any more when atoms have moved. Where
        # statistics differ from slot to slot, this would change the energy.
        self._keeps_slots = MovingFrame.serves(self._layout) and has_equal_slots(
            self._model
        )
        if isinstance(
            self._model, EnergyModel
        ):  # compiled code has no networks to tabulate
            tabulate(self._model)
        self._warned: set[str] = (
            set()
        )  # texts of warnings, each of which is logged once
        self._images: Images | None = None  # of the last frame
        # Several calculators may share a potential, as those of the images of a band, each with
        # pairs of its own. An entry is removed with its pairs.
        self._moving: WeakKeyDictionary[KeptPairs, MovingFrame] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments of a copy; it has no pairs, images and compiled code yet."""
        return type(self), (self._loaded, str(self.device))

    @property
    def type_map(self) -> tuple[str, ...]:
        """Names of the elements; a type is a place in it."""
        return tuple(self._model.type_map)

    @property
    def num_conditions(self) -> dict[str, int]:
        """Number of values of ``fparam`` per frame and ``aparam`` per atom; 0 if there are none."""
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
        """Return a :class:`Prediction` of F frames of N atoms.

        A model of dipoles, polarizabilities, properties or densities of states returns a
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
        count = len(frames)
        natoms = np.shape(types)[-1]
        # frames that share pairs are evaluated one after the other: the pairs of each are those of
        # the frame before, unless atoms have moved too far
        if kept is None:
            parts = [self._arrays(frames, None)]
        else:
            parts = [self._arrays([frame], [kept]) for frame in frames]
        if not self.predicts_energies:
            name, atom_name = self.config.fitting_net.labels
            shape = (3, 3) if name == POLAR else LABELS[name].shape
            value = np.concatenate([part[name] for part in parts])
            atom_value = np.concatenate([part[atom_name] for part in parts])
            return QuantityPrediction(
                name.partition("[")[0],
                value.reshape(count, *shape),
                atom_value.reshape(count, natoms, *shape),
            )
        # in the order of the attributes of a Prediction
        shapes = {
            ENERGY: (count,),
            FORCE: (count, natoms, 3),
            VIRIAL: (count, 9),
            ATOM_ENERGY: (count, natoms),
        }
        values = []
        for name, shape in shapes.items():
            # the empty array: there may be no frames
            flat = np.concatenate([np.zeros(0), *(part[name] for part in parts)])
            values.append(flat.reshape(shape))
        return Prediction(*values)

    def evaluate_systems(
        self,
        systems: Sequence[
            tuple[
                ArrayLike, Sequence[int] | Sequence[str] | ArrayLike, ArrayLike | None
            ]
        ],
        kept: Sequence[KeptPairs] | None = None,
    ) -> list[Prediction]:
        """Return a prediction for each of S systems of any sizes, which share batches.

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
        frames = [
            replace(frame, source=("arrays", k)) for k, (frame,) in enumerate(rows)
        ]
        if kept is not None and len(kept) < len(frames):
            raise UserError(
                f"kept: pairs of {len(kept)} systems, expected those of {len(frames)} or more."
            )
        values = self._arrays(frames, kept)
        # first atom of each system, and the end of the last one
        ends = np.cumsum([0, *(frame.num_atoms for frame in frames)])
        return [
            Prediction(
                values[ENERGY][k : k + 1],
                values[FORCE][3 * begin : 3 * end].reshape(1, -1, 3),
                values[VIRIAL][9 * k : 9 * k + 9].reshape(1, 9),
                values[ATOM_ENERGY][begin:end].reshape(1, -1),
            )
            for k, (begin, end) in enumerate(pairwise(ends))
        ]

    def _arrays(
        self, frames: Sequence[Frame], histories: Sequence[KeptPairs] | None
    ) -> dict[str, NDArray[np.float64]]:
        """Return the numbers of all frames, one after the other; histories have pairs of each."""
        _refrain_from_lost_threads()
        with without_modes(self.device):
            parts = self._parts(
                frames, [None] * len(frames) if histories is None else histories
            )
        values = {
            name: np.concatenate([np.zeros(0), *(part[name].ravel() for part in parts)])
            for name in self._names
        }
        # the cause is searched only here, so that other calls take no time for it
        if not all(np.isfinite(value).all() for value in values.values()):
            _refuse_without_energy(frames, self)
        has_force = FORCE in values and LONE_ATOM not in self._warned
        if has_force and (
            lone := _lone_atom(frames, values[FORCE].reshape(-1, 3), self)
        ):
            self._warn(LONE_ATOM, lone, self.rcut)
        return values

    def _parts(
        self, frames: Sequence[Frame], histories: Sequence[KeptPairs | None]
    ) -> list[dict[str, Any]]:
        """Return the arrays of one batch after the other."""
        # compiled code takes one frame, by images of its atoms in place of shifts
        if isinstance(self._model, CompiledModel):
            return [self._run(self._model, *row) for row in zip(frames, histories)]
        parts = []
        rows = list(zip(frames, histories))
        limit = atoms_at_once(self.device)
        # a frame that counts as a full batch is alone in it
        most_shared = MAX_ATOMS_SHARING if self.device.type == "cpu" else math.inf
        sizes = [
            limit
            if history is not None and frame.num_atoms > most_shared
            else frame.num_atoms
            for frame, history in rows
        ]
        for begin, end in pairwise(batch_edges(np.array(sizes), limit)):
            group = rows[begin:end]
            first, first_history = group[0]
            placed = None
            if len(group) == 1 and first_history is not None and self._keeps_slots:
                placed = self._placed(first, first_history)
            # the general way, also where an atom has more neighbors than slots: they are sorted
            # here, and the farthest are dropped
            if placed is None:
                paired = [
                    pair_frame(
                        frame,
                        self._layout,
                        find_pairs if history is None else history.find,
                    )
                    for frame, history in group
                ]
                most = np.max([frame.most for frame in paired], axis=0).tolist()
                nearest = min(frame.nearest for frame in paired)
                placed = FilledSlots(collate(paired, self._layout), most, nearest)
            self._warn_once(placed.most, placed.nearest)
            batch = placed.batch.to(self.device)
            outputs = {
                name: value
                for name, value in self._model(batch).items()
                if name in self._names
            }
            # atoms of a batch are sorted by type
            for name in self._names:
                if LABELS[name].per_atom:
                    outputs[name] = batch.in_file_order(outputs[name])
            parts.append(
                {
                    name: value.detach().to("cpu", torch.float64).numpy()
                    for name, value in outputs.items()
                }
            )
        return parts

    def _placed(self, frame: Frame, history: KeptPairs) -> FilledSlots | None:
        """Return a frame by the pairs of an earlier one, see :meth:`MovingFrame.at`."""
        pairs = history.reaching(frame.coord, frame.box, self.rcut)
        moving = self._moving.get(history)
        if moving is None or not moving.holds(frame, pairs):
            moving = self._moving[history] = MovingFrame(frame, pairs, self._layout)
        return moving.at(frame)

    def _run(
        self, model: CompiledModel, frame: Frame, history: KeptPairs | None
    ) -> dict[str, NDArray[np.float64]]:
        """Return the arrays of one frame, by compiled code."""
        from deepmd_ema.infer.images import Images

        geometry = frame.coord, frame.box, self.rcut
        pairs = (
            find_pairs(*geometry) if history is None else history.reaching(*geometry)
        )
        images = self._images
        if images is None or not images.hold(frame, pairs):
            # pairs up to this distance may come nearer than any of the training data while the
            # pairs hold: two atoms approach by at most the skin
            close = (self.info.min_nbor_dist or 0.0) + (
                0.0 if history is None else history.skin
            )
            images = self._images = Images(
                frame, pairs, self._layout, close, self.device
            )
        self._warn_once(list(images.most(frame.coord)), images.nearest(frame.coord))
        # (1, P) of the frame, (N, Q) of its atoms
        conditions = {}
        if frame.fparam is not None:
            conditions[FPARAM] = torch.tensor(frame.fparam[None], device=self.device)
        if frame.aparam is not None:
            conditions[APARAM] = torch.tensor(frame.aparam, device=self.device)
        atype, nlist, mapping = images.tensors
        outputs = model.frame(
            images.coord(frame.coord), atype, nlist, mapping, conditions
        )
        return {name: value.to("cpu").numpy() for name, value in outputs.items()}

    def _warn_once(self, most: list[int], nearest: float) -> None:
        """Log that neighbors are dropped, or atoms are nearer than any of the training data.

        Args:
            most: per section, the most neighbors of an atom inside the cutoff.
            nearest: shortest distance of two atoms, angstrom.
        """
        if text := self._layout.describe_dropped(most):
            self._warn("%s This is reported once.", text)
        trained = self.info.min_nbor_dist or 0.0  # unknown in old files
        # it is beyond the cutoff if the training data have no pairs
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
    # a table of pair energies has no value below its first distance
    tables = [part for part in model.modules() if isinstance(part, PairTable)]
    first = max((table.first for table in tables), default=0.0)
    pairs = find_pairs(frame.coord, frame.box, rcut)
    if not pairs.nearest < max(first, SAME_PLACE):
        return None
    distance = np.linalg.norm(pairs.vector(frame.coord, frame.box), axis=1)
    shortest = distance.argmin()
    atom = frame.describe_atom(pairs.i[shortest], type_map)
    neighbor = frame.describe_atom(pairs.j[shortest], type_map)
    who = f"atom {atom} and an image of it are"
    if atom != neighbor:
        who = f"atoms {atom} and {neighbor} are"
    if pairs.nearest < first:
        last = max(table.rcut for table in tables)
        why = f"the table of pair energies of the model covers {first:g} to {last:g} angstrom"
    else:
        why = "the model has no direction between them"
    return f"{who} {pairs.nearest:.4g} angstrom apart, and {why}. Move them apart."


def _refrain_from_lost_threads() -> None:
    """Let torch compute with one thread in a process that was forked.

    It would wait forever for the threads of its parent.
    """
    if os.getpid() != _THREADS_OF and torch.get_num_threads() > 1:
        torch.set_num_threads(1)
        logger.warning(
            "this process was forked from another that uses torch, whose threads it does not "
            "have: torch computes with one thread here. Start processes with "
            "multiprocessing.set_start_method('spawn') to have more."
        )


def _refuse_without_energy(frames: Sequence[Frame], potential: Potential) -> None:
    """Raise UserError for frames that have no finite energies and forces.

    One frame spoils a batch: the frame with atoms in one place is searched.
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
    """Return an atom of a frame of several that has no neighbor, or None.

    Args:
        frames: to be searched.
        force: (A, 3) of the atoms of all frames; neighbors are searched only where one is zero, as
            each step of molecular dynamics comes here.
        potential: model with cutoff and elements.
    """
    still = np.logical_not(force.any(axis=1))
    ends = np.cumsum([0, *(frame.num_atoms for frame in frames)])
    for frame, (begin, end) in zip(frames, pairwise(ends)) if still.any() else ():
        if frame.num_atoms > 1 and still[begin:end].any():
            pairs = find_pairs(frame.coord, frame.box, potential.rcut)
            lone = np.setdiff1d(np.arange(frame.num_atoms), pairs.i)
            if len(lone):
                return frame.describe_atom(int(lone[0]), potential.type_map)
    return None


def _frames(
    potential: Potential, coord: Any, types: Any, box: Any, fparam: Any, aparam: Any
) -> list[Frame]:
    """Return arrays as frames; arguments are those of :meth:`Potential.evaluate`."""
    kinds = _type_numbers(types, potential.type_map)
    natoms = kinds.shape[-1]
    coords = _numbers("coord", coord)
    frame_shapes = ((natoms, 3), (3 * natoms,))
    # one frame without the axis of frames, or several with it
    if coords.shape not in frame_shapes and coords.shape[1:] not in frame_shapes:
        expected = f"(F, {natoms}, 3), (F, {3 * natoms}) or ({natoms}, 3)"
        raise UserError(
            f"coord: shape {coords.shape}, expected {expected} for {natoms} atoms."
        )
    coords = coords.reshape(-1, natoms, 3)
    count = len(coords)
    if kinds.ndim == 2 and len(kinds) != count:
        raise UserError(
            f"types: shape {kinds.shape}, expected ({natoms},) or ({count}, {natoms})."
        )
    kinds = np.broadcast_to(kinds, (count, natoms))
    boxes = _boxes(box, count)
    fitting = potential.config.fitting_net
    if fparam is None:
        fparam = fitting.default_fparam or None  # an empty list is none
    frame_rows = _parameters("fparam", fparam, count, (fitting.numb_fparam,))
    atom_rows = _parameters("aparam", aparam, count, (natoms, fitting.numb_aparam))
    order = np.arange(natoms)
    return [
        Frame(
            coords[k],
            kinds[k],
            boxes[k],
            fparam=frame_rows[k],
            aparam=atom_rows[k],
            source=("arrays", k),
            file_index=order,
        )
        for k in range(count)
    ]


def _type_numbers(types: Any, type_map: Sequence[str]) -> NDArray[np.int64]:
    """Return types, (N,) or (F, N), as places in ``type_map``."""
    array = np.asarray(types)
    if array.ndim not in (1, 2) or array.shape[-1] == 0:
        raise UserError(
            f"types: shape {array.shape}, expected (N,) or (F, N) with at least one atom."
        )
    if array.dtype.kind in "US":
        place = {name: k for k, name in enumerate(type_map)}
        unknown = sorted(set(array.ravel().tolist()) - set(place))
        if unknown:
            raise UserError(
                f"types: the element {unknown[0]!r} is not in the model. "
                f"{did_you_mean(unknown[0], type_map)}"
            )
        return np.vectorize(place.__getitem__, otypes=[np.int64])(array.astype(str))
    if array.dtype.kind not in "iu":
        raise UserError(
            f"types: values of kind {array.dtype}, expected whole numbers or element symbols."
        )
    # -1 is a virtual atom, which fills up frames in mixed data of DeePMD-kit
    if array.min() < 0 or array.max() >= len(type_map):
        bad = array.min() if array.min() < 0 else array.max()
        why = " Leave virtual atoms out." if bad == -1 else ""
        raise UserError(
            f"types: {bad} is no place in type_map {list(type_map)} (from 0).{why}"
        )
    return array.astype(np.int64)


def _boxes(box: Any, count: int) -> Rows:
    if box is None:
        return [None] * count
    boxes = _rows(
        "box",
        box,
        count,
        (3, 3),
        f"({count}, 3, 3), ({count}, 9), (3, 3), (9,) or None",
    )
    flat = np.flatnonzero(np.abs(np.linalg.det(boxes)) < 1e-6)  # angstrom^3
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
    """Return (F, *shape) numbers that are given for each frame, or once for all frames.

    Args:
        name: of the argument.
        value: numbers.
        count: F.
        shape: of one frame; it may also be flat.
        expected: shapes, as text.
    """
    array = _numbers(name, value)
    for frame_shape in (shape, (math.prod(shape),)):
        if array.shape in (frame_shape, (count, *frame_shape)):
            return np.broadcast_to(array.reshape(-1, *shape), (count, *shape))
    raise UserError(f"{name}: shape {array.shape}, expected {expected}.")


def _numbers(name: str, value: Any) -> NDArray[np.float64]:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: expected an array of numbers ({error}).") from error
    if not np.isfinite(array).all():
        raise UserError(
            f"{name}: {np.argwhere(~np.isfinite(array))[0].tolist()} is not a finite number."
        )
    return array
