"""Write the first frames of a system, and one more as the start of molecular dynamics.

usage: python prepare.py SYSTEM FOLDER
"""

import sys
from pathlib import Path

import dpdata

NUM_FRAMES = 60

system, folder = dpdata.LabeledSystem(sys.argv[1], fmt="deepmd/npy"), Path(sys.argv[2])
system.sub_system(range(NUM_FRAMES)).to("deepmd/npy", folder / "init")
system.sub_system([NUM_FRAMES]).to("vasp/poscar", folder / "POSCAR")
