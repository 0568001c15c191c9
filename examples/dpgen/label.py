"""Label a structure with GFN1-xTB: the first-principles step of the iteration.

usage: python label.py POSCAR TRAJECTORY
"""

import sys

from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from tblite.ase import TBLite

atoms = read(sys.argv[1], format="vasp")
atoms.calc = TBLite(method="GFN1-xTB", accuracy=0.1, verbosity=0)
energy, forces, stress = (
    atoms.get_potential_energy(),
    atoms.get_forces(),
    atoms.get_stress(),
)
atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, stress=stress)
write(sys.argv[2], atoms, format="traj")
