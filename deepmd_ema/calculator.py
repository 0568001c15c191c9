"""An ASE calculator; this module, unlike the rest, needs ASE to be installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.labels import FPARAM
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.potential import Potential
from deepmd_ema.text import counted, did_you_mean
from deepmd_ema.utils import keep_freed_memory

try:
    # the class below is a subclass of ASE's: there is no later moment to import it
    from ase.calculators.calculator import Calculator, all_changes
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "deepmd_ema.calculator needs ASE: pip install 'dp-ema[ase]'", name="ase"
    ) from error

if TYPE_CHECKING:
    from ase import Atoms

# arrays that ASE compares
_WATCHED = ("positions", "numbers", "initial_charges", "initial_magmoms")
_MEMORY_KEPT = 512 << 20  # bytes that are not given back between steps


class DP(Calculator):
    """Energies (eV), forces (eV/angstrom) and stress (eV/angstrom^3) of a trained model in ASE.

    Of a model of another quantity it has only this property: ``dipole``, ``polarizability``,
    ``dos``, or its name.

    It can be copied and pickled. Several threads may share one, which then computes for one of them
    at a time.

    A model that takes frame or atomic parameters gets those of ``calc.set(fparam=...,
    aparam=...)``, else those in ``atoms.info["fparam"]`` and ``atoms.info["aparam"]``.

    The process keeps up to 512 MB that are freed for the next step: see
    ``deepmd_ema.utils.keep_freed_memory``.

    Args:
        model: a ``.pt`` checkpoint, the folder of a run, a frozen ``.dp``, ``.yaml`` or ``.pt2``,
            or a ``Potential``. A ``.pt2`` is machine code, which runs when it is loaded: only from
            whom you trust.
        device: ``cpu``, ``cuda``, ``cuda:1``; CUDA when there is one if not given.
        skin: angstrom. Neighbors are searched this far beyond the cutoff, and again only when an
            atom has moved more than half of it or the cell has changed. Results depend on it by
            rounding; 0 searches at every step.
        head: name of the model in a file that holds several.
        **parameters: ``fparam`` (P,) and ``aparam`` (N, Q), and what ASE's ``Calculator`` takes.
    """

    name = "DP"
    # both are ASE's names, which it reads from the class
    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012
    default_parameters = {"fparam": None, "aparam": None}  # noqa: RUF012

    def __init__(
        self,
        model: str | Path | Potential,
        device: str | None = None,
        skin: float = 1.0,
        head: str | None = None,
        **parameters: Any,
    ) -> None:
        if not 0 <= skin < math.inf:
            raise UserError(
                f"skin = {skin}: expected a length in angstrom, 0 to search neighbors at every "
                "step."
            )
        # mallopt is documented as unsafe beside other threads, but these only read the two numbers
        # that it sets
        keep_freed_memory(_MEMORY_KEPT)
        super().__init__(**parameters)
        self._lock = RLock()
        self._neighbors = KeptPairs(skin) if skin else None
        self._conditions: dict[str, Any] = {}
        self.potential = (
            model
            if isinstance(model, Potential)
            else Potential(model, device=device, head=head)
        )
        if not self.potential.predicts_energies:
            label = self.potential.config.fitting_net.labels[0]
            self.implemented_properties = [label.partition("[")[0]]  # dos of dos[250]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of a copy."""
        keep_freed_memory(_MEMORY_KEPT)  # a copy may be in another process
        vars(self).update(state)
        self._lock = RLock()

    def get_property(
        self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True
    ) -> Any:
        """Return a result for ``atoms``, for one thread at a time."""
        # ASE calculates and then reads self.results: another thread with other atoms would replace
        # them in between
        with self._lock:
            return super().get_property(name, atoms, allow_calculation)

    def set(self, **parameters: Any) -> dict[str, Any]:
        """Change parameters; results are computed again when one differs.

        Raises:
            UserError: for one that models do not have, such as ``type_dict`` of DeePMD-kit's
                ``DP``.
        """
        # ASE takes any name and would never look at it; `parameters` is its own, a file of them
        unknown = sorted(parameters.keys() - {*self.default_parameters, "parameters"})
        if unknown:
            raise UserError(
                f"{unknown[0]}: models take no such parameter. Known: "
                f"{', '.join(self.default_parameters)}."
            )
        # copies: an array that the caller changes in place would be compared with itself
        changed = super().set(**deepcopy(parameters))
        if changed:
            self.reset()
        return changed

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Return names of changes since the last calculation, ``info`` for frame parameters."""
        changes: list[str] = (
            [] if self._is_same(atoms) else super().check_state(atoms, tol)
        )
        if changes:
            return changes
        # ASE does not compare atoms.info
        for name, value in self._conditions_of(atoms).items():
            if not np.array_equal(
                np.asarray(value), np.asarray(self._conditions.get(name))
            ):
                return ["info"]
        return []

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Fill ``results``; all properties cost one evaluation. Open systems have no stress.

        Raises:
            UserError: if an element is not in the model, or the cell is periodic in some directions
                only.
        """
        super().calculate(atoms, list(properties), list(system_changes))
        now = self.atoms  # a copy that ASE has made, which the caller does not move
        assert now is not None, "ASE has set it"
        self._conditions = self._conditions_of(now)
        frame = now.get_positions(), self._types(now), self._box(now)
        prediction = self.potential.evaluate(
            *frame, **self._conditions, kept=self._neighbors
        )
        if not self.potential.predicts_energies:
            self.results = {prediction.name: prediction.value[0]}
            return
        energy = float(prediction.energy[0])
        self.results = {
            "energy": energy,
            "free_energy": energy,
            "energies": prediction.atom_energy[0],
            "forces": prediction.force[0],
        }
        if now.pbc.all():
            # Stress in ASE is the derivative of the energy by strain over the volume. The virial is
            # minus this derivative. Voigt's order is xx, yy, zz, yz, xz, xy.
            stress = -prediction.virial[0].reshape(3, 3) / now.get_volume()
            stress = 0.5 * (stress + stress.T)
            self.results["stress"] = stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]

    def _conditions_of(self, atoms: Atoms) -> dict[str, Any]:
        """Return the parameters of the frame and its atoms.

        Parameters in ``atoms.info`` count if the model takes some.

        Raises:
            UserError: if the model needs some and neither place has them.
        """
        conditions = {}
        for name, number in self.potential.num_conditions.items():
            value = self.parameters[name]
            if value is None and number:
                value = atoms.info.get(name)
            conditions[name] = value
            has_default = name == FPARAM and self.potential.default_fparam
            if value is None and number and not has_default:
                needs = (
                    f"this model needs {counted(number, 'number')} per "
                    f"{'frame' if name == FPARAM else 'atom'}"
                )
                raise UserError(
                    f'{name}: {needs}. Set atoms.info["{name}"], or give DP(..., {name}=...).'
                )
        return conditions

    def _is_same(self, atoms: Atoms) -> bool:
        """Whether nothing has changed that ASE compares."""
        # the comparison of ASE is slow, and done four times per step
        last = self.atoms
        if last is None:
            return False
        if not (
            np.array_equal(last.pbc, atoms.pbc)
            and np.array_equal(last.cell.array, atoms.cell.array)
        ):
            return False
        for name in _WATCHED:
            before = last.arrays.get(name)
            now = atoms.arrays.get(name)
            if before is not now and (
                before is None or now is None or not np.array_equal(before, now)
            ):
                return False
        return True

    def _types(self, atoms: Atoms) -> NDArray[np.int64]:
        """Return the places of the elements in ``type_map``, (N,)."""
        type_map = self.potential.type_map
        symbols = atoms.get_chemical_symbols()
        place = {symbol: k for k, symbol in enumerate(type_map)}
        if unknown := sorted(set(symbols) - place.keys()):
            advice = did_you_mean(unknown[0], type_map)
            raise UserError(
                f"the element {unknown[0]} of the atoms is not in the model. {advice}"
            )
        return np.array([place[symbol] for symbol in symbols], np.int64)

    def _box(self, atoms: Atoms) -> Any:
        if not atoms.pbc.any():
            return None
        if not atoms.pbc.all():
            raise UserError(
                f"pbc = {atoms.pbc.tolist()}: periodic in some directions only, which models do "
                f"not know. Set pbc to True with a vacuum of more than {self.potential.rcut:g} "
                "angstrom along the open directions."
            )
        return atoms.cell.array
