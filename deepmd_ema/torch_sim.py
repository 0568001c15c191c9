"""A model for torch-sim, which simulates many systems at once; needs torch-sim to be installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.potential import Potential

try:
    # the class below is a subclass of torch-sim's: there is no later moment to import it
    import torch_sim
    from torch_sim.models.interface import ModelInterface
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "deepmd_ema.torch_sim needs torch-sim: pip install 'dp-ema[torch-sim]'",
        name="torch_sim",
    ) from error


class DPModel(ModelInterface):
    """Energies (eV), forces (eV/angstrom), stresses (eV/angstrom^3) of a model in torch-sim.

    The systems of a state are evaluated together, as one batch or, where they are large, as
    several. Neighbors are searched on the CPU. A model that takes frame parameters needs their
    default in its file; one that takes atomic parameters is refused.

    Example::

        import torch_sim as ts
        from ase.build import molecule
        from deepmd_ema.torch_sim import DPModel

        model = DPModel("water.dp")
        state = ts.initialize_state([molecule("H2O")] * 8, model.device, model.dtype)
        model(state)["forces"]  # (24, 3)
        nve = ts.Integrator.nve  # torch-sim 0.3 (Python 3.11): ts.nve
        final = ts.integrate(
            state, model, integrator=nve, n_steps=100, temperature=300, timestep=0.0005
        )

    Args:
        model: a ``.pt`` checkpoint, the folder of a run, a frozen ``.dp``, ``.yaml`` or ``.pt2``,
            or a ``Potential``. A ``.pt2`` is machine code, which runs when it is loaded: only from
            whom you trust.
        device: where the model computes; CUDA when there is one if not given. States are on the
            same device.
        dtype: precision of the results; the model itself computes in its own precision, from
            positions in float64.
        skin: angstrom. The neighbors of a system are searched this far beyond the cutoff, and again
            only when an atom of it has moved more than half of it or its cell has changed; 0
            searches at every step.
        head: name of the model in a file that holds several.
        compute_forces: whether results have ``forces``.
        compute_stress: whether results have ``stress``; that of an open system is 0.
    """

    # attributes that can be set; in the base class they are properties that cannot
    compute_forces: bool = True
    compute_stress: bool = True

    def __init__(
        self,
        model: str | Path | Potential,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
        skin: float = 1.0,
        head: str | None = None,
        compute_forces: bool = True,
        compute_stress: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= skin < math.inf:
            raise UserError(
                f"skin = {skin}: expected a length in angstrom, 0 to search neighbors at every "
                "step."
            )
        where = None if device is None else str(device)
        self.potential = (
            model
            if isinstance(model, Potential)
            else Potential(model, device=where, head=head)
        )
        if not self.potential.predicts_energies:
            raise UserError(
                f"{self.potential.info.path}: does not predict energies and forces, which "
                "torch-sim needs."
            )
        for name, number in self.potential.num_conditions.items():
            if number and (name == "aparam" or not self.potential.default_fparam):
                raise UserError(
                    f"{self.potential.info.path}: the model takes {name} ({number} numbers), "
                    "which torch-sim does not have. Use a model without, or one with "
                    "default_fparam."
                )
        self._device = self.potential.device
        self._dtype = dtype
        self.compute_forces = compute_forces
        self.compute_stress = compute_stress
        # torch-sim groups systems into batches by this estimate: neighbors take most of the memory
        self._memory_scales_with = "n_atoms_x_density"
        self._skin = skin
        self._neighbors = list[KeptPairs]()  # one per system of a state, by its place
        # (119,) type of each atomic number, or -1; no element has the number 0
        self._type_of = torch.full((len(SYMBOLS) + 1,), -1)
        for number, name in enumerate(self.potential.type_map):
            if name in SYMBOLS:
                self._type_of[SYMBOLS.index(name) + 1] = number

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        """Return the results for the S systems of a state, with N atoms together.

        Args:
            state: a ``SimState``, or a dictionary of its tensors.
            **_: arguments of torch-sim for models that take more.

        Returns:
            ``energy`` (S,), eV; ``forces`` (N, 3), eV/angstrom; ``stress`` (S, 3, 3),
            eV/angstrom^3.

        Raises:
            UserError: if an element is not in the model, a system is periodic in some directions
                only, or the model has no energy for one, as for two atoms in one place.
        """
        if isinstance(state, dict):
            state = torch_sim.SimState(
                **{"masses": torch.ones(len(state["positions"])), **state}
            )
        coord = state.positions.detach().to("cpu", torch.float64).numpy()
        cells = state.row_vector_cell.detach().to("cpu", torch.float64).numpy()
        sizes = torch.bincount(state.system_idx.cpu(), minlength=len(cells)).tolist()
        if len(directions := set(torch.as_tensor(state.pbc).flatten().tolist())) > 1:
            raise UserError(
                "pbc: periodic in some directions only. Expected all of them, or none."
            )
        types = self._types(state.atomic_numbers.cpu())
        periodic = bool(directions.pop())
        # A state of other systems finds other cells or positions here, and is searched again.
        missing = len(sizes) - len(self._neighbors)
        self._neighbors += [KeptPairs(self._skin) for _ in range(missing)]
        systems = []
        end = 0
        for size, cell in zip(sizes, cells):
            begin = end
            end += size
            systems.append(
                (coord[begin:end], types[begin:end], cell if periodic else None)
            )
        neighbors = self._neighbors if self._skin else None
        predictions = self.potential.evaluate_systems(systems, neighbors)

        def tensor(values: Any) -> Tensor:
            return torch.as_tensor(
                values, dtype=self._dtype, device=state.positions.device
            )

        results = {
            "energy": tensor(
                [float(prediction.energy[0]) for prediction in predictions]
            )
        }
        if self.compute_forces:
            forces = [
                tensor(prediction.force[0]) for prediction in predictions
            ]  # (atoms, 3) each
            results["forces"] = torch.cat(forces)
        if self.compute_stress:
            volumes = torch.linalg.det(
                state.row_vector_cell.detach().to(self._dtype)
            ).abs()
            # (S, 3, 3), eV
            virials = torch.stack([tensor(p.virial[0]).view(3, 3) for p in predictions])
            # an open system has no volume
            results["stress"] = (
                -virials / volumes[:, None, None]
                if periodic
                else torch.zeros_like(virials)
            )
        return results

    def _types(self, atomic_numbers: Tensor) -> Any:
        """Return the type (N,) of each atom."""
        types = self._type_of[atomic_numbers.clamp(0, len(SYMBOLS))]
        if (types < 0).any():
            number = int(atomic_numbers[types < 0][0])
            name = (
                SYMBOLS[number - 1]
                if 0 < number <= len(SYMBOLS)
                else f"atomic number {number}"
            )
            raise UserError(
                f"{name}: is not an element of the model, which has "
                f"{' '.join(self.potential.type_map)}."
            )
        return types.numpy()
