"""One configuration of atoms with its labels, as read from a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepmd_ema.arrays import Array


@dataclass(frozen=True, eq=False)
class Frame:
    """One configuration: real atoms only, in the order of the file.  N atoms.

    Attributes:
        coord: (N, 3) float64, angstrom.
        atom_type: (N,) int64, indices into the model's type map.
        box: (3, 3) float64, angstrom, rows are cell vectors; None for an open system.
        labels: label name (see ``labels``) to float64 array, only labels that this frame has; energy is (), virial
            (9,), per atom labels (N,) or (N, 3).
        fparam: (P,) float64 or None.
        aparam: (N, Q) float64 or None.
        source: system name and frame number in the system, for messages.
        file_index: (N,) int64, place of each atom in the file, where virtual atoms count too; None without any.
    """

    coord: Array
    atom_type: Array
    box: Array | None = None
    labels: Mapping[str, Array] = field(default_factory=dict)
    fparam: Array | None = None
    aparam: Array | None = None
    source: tuple[str, int] = ("", 0)
    file_index: Array | None = None

    @property
    def num_atoms(self) -> int:
        """Number of real atoms."""
        return len(self.atom_type)
