"""Models compiled to machine code: batches and arrays as the tensors that a ``.pt2`` file takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import APARAM, ATOM_ENERGY, ENERGY, FORCE, FPARAM, VIRIAL
from deepmd_ema.model.energy import EnergyModel

# N atoms of a frame, E atoms and images, K slots, P pairs, A atoms of a batch, T types


class CompiledModel(nn.Module):
    """Evaluates batches as ``EnergyModel`` does, by compiled code, one frame after the other.

    Args:
        run: the compiled function, with the arguments of ``ExtendedModel``.
        model: the model that was compiled, which gives the layout of its neighbors.
        default_fparam: frame parameters of frames that come without, where the model has such.
    """

    def __init__(
        self,
        run: Callable[..., dict[str, Tensor]],
        model: EnergyModel,
        default_fparam: Sequence[float] | None,
    ) -> None:
        super().__init__()
        self._run = run
        self._default_fparam = default_fparam
        self.layout = model.layout
        self.type_map = model.type_map

    def forward(
        self, batch: Batch, create_graph: bool | None = None, need_virial: bool = True
    ) -> dict[str, Tensor]:
        """Return energies (F,), atomic energies (A,), forces (A, 3) and virials (F, 9), float64."""
        assert not create_graph, "compiled code has no parameters"
        energy = batch.coord.new_zeros(batch.num_frames)
        virial = batch.coord.new_zeros(batch.num_frames, 9)
        atom_energy = torch.zeros_like(batch.coord[:, 0])
        force = torch.zeros_like(batch.coord)
        # Nothing waits for a GPU here: frames are split by the sizes that the host knows, and empty
        # slots have images, as their number is on the device.
        in_file_order = torch.argsort(batch.atom_order).split(batch.sizes)
        for f, rows in enumerate(in_file_order):
            conditions: dict[str, Any] = {FPARAM: slice(f, f + 1), APARAM: rows}
            parameters = {
                name: batch.conditions[name][at]
                for name, at in conditions.items()
                if name in batch.conditions
            }
            outputs = self.frame(*_images(batch, rows), parameters)
            energy[f] = outputs[ENERGY]
            virial[f] = outputs[VIRIAL]
            atom_energy[rows] = outputs[ATOM_ENERGY]
            force[rows] = outputs[FORCE]
        return {ENERGY: energy, ATOM_ENERGY: atom_energy, FORCE: force, VIRIAL: virial}

    def frame(
        self,
        coord: Tensor,
        atype: Tensor,
        nlist: Tensor,
        mapping: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the energy (), atomic energies (N,), forces (N, 3) and virial (9,) of a frame.

        Args:
            coord: (E, 3), angstrom, the N atoms first.
            atype: (E,).
            nlist: (N, K) places among the E, -1 is none.
            mapping: (E,) the atom that each is an image of.
            conditions: ``fparam`` (1, P) and ``aparam`` (N, Q) by name, where the model takes them.
        """
        parameters = dict(conditions)
        if FPARAM not in parameters and self._default_fparam:
            parameters[FPARAM] = coord.new_tensor([self._default_fparam])
        if APARAM in parameters:  # (1, N, Q)
            parameters[APARAM] = parameters[APARAM][None]
        # compiled code takes them by position, and has no place for those that the model lacks
        optional = [parameters[name] for name in (FPARAM, APARAM) if name in parameters]
        outputs = self._run(
            coord[None], atype[None], nlist[None], mapping[None], *optional
        )
        # (E, 3): the force on an atom is the sum of those on its images
        on_images = outputs["energy_derv_r"][0, :, 0]
        num_atoms = len(nlist)
        force = on_images[:num_atoms].index_add(
            0, mapping[num_atoms:], on_images[num_atoms:]
        )
        return {
            ENERGY: outputs["energy_redu"][0, 0],
            ATOM_ENERGY: outputs["energy"][0, :, 0],
            FORCE: force,
            VIRIAL: outputs["energy_derv_c_redu"][0, 0],
        }


def _images(batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return coordinates, types, neighbors and mapping of atoms, with an image for each slot.

    Args:
        batch: of several frames.
        rows: (N,) atoms of one of them.
    """
    num_atoms = len(rows)
    device = rows.device
    filled = batch.occupied[rows]  # (N, K)
    neighbor = batch.neighbor[rows]  # (N, K) rows of the batch
    # from rows of the batch to those of the frame
    place = torch.full((len(batch.atom_type),), -1, device=device)
    place[rows] = torch.arange(num_atoms, device=device)
    images = num_atoms + torch.arange(filled.numel(), device=device).view(filled.shape)
    nlist = torch.where(filled, images, -1)
    if not nlist.shape[1]:  # compiled code takes one slot at least
        nlist = nlist.new_full((num_atoms, 1), -1)
    coord = batch.coord[rows]
    kinds = torch.cat([batch.atom_type[rows], batch.atom_type[neighbor].flatten()])
    around = (coord[:, None] + batch.vector[rows]).flatten(0, 1)
    mapping = torch.cat(
        [torch.arange(num_atoms, device=device), place[neighbor].flatten()]
    )
    return torch.cat([coord, around]), kinds, nlist, mapping
