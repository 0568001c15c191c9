"""Names of every tensor that travels in a dictionary, with its shape and unit."""

# F frames, A atoms of the batch (real atoms only, all frames on one axis)
ENERGY = "energy"  # (F,) eV
FORCE = "force"  # (A, 3) eV/angstrom
VIRIAL = "virial"  # (F, 9) eV, row major, positive: sum_i r_i (x) f_i for an open system
ATOM_ENERGY = "atom_energy"  # (A,) eV
ATOM_PREF = "atom_pref"  # (A,) dimensionless weight of an atom's force error

# conditions: what an energy depends on beside positions and elements
FPARAM = "fparam"  # (F, P) frame parameters, any unit
APARAM = "aparam"  # (A, Q) atomic parameters, any unit

LABELS = (ENERGY, FORCE, VIRIAL, ATOM_ENERGY, ATOM_PREF)
PER_ATOM = frozenset({FORCE, ATOM_ENERGY, ATOM_PREF})

# file of a label inside set.*/ ; the alternative spelling is tried when the first is absent
LABEL_FILES = {
    ENERGY: ("energy",),
    FORCE: ("force",),
    VIRIAL: ("virial",),
    ATOM_ENERGY: ("atom_ener", "atomic_ener"),
    ATOM_PREF: ("atom_pref", "atomic_pref"),
}
