"""The chemical elements, and which one-electron states of a free atom are occupied."""

from __future__ import annotations

from typing import NamedTuple

_SYMBOLS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb "
    "Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm "
    "Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og"
)
SYMBOLS = tuple(_SYMBOLS.split())
# states of oganesson: all shells that any element begins are full in it, with one electron a state
NUM_STATES = len(SYMBOLS)

Shell = tuple[int, int]
"""Principal and angular quantum number (n, l); it holds 2 (2 l + 1) electrons."""


class _Move(NamedTuple):
    """Electrons that are in another shell than the Madelung rule says."""

    source: Shell
    target: Shell
    number: int


_MOVED = {
    **dict.fromkeys(("Cr", "Cu"), _Move((4, 0), (3, 2), 1)),
    **dict.fromkeys(("Nb", "Mo", "Ru", "Rh", "Ag"), _Move((5, 0), (4, 2), 1)),
    "Pd": _Move((5, 0), (4, 2), 2),
    **dict.fromkeys(("La", "Ce", "Gd"), _Move((4, 3), (5, 2), 1)),
    **dict.fromkeys(("Pt", "Au"), _Move((6, 0), (5, 2), 1)),
    **dict.fromkeys(("Ac", "Pa", "U", "Np", "Cm"), _Move((5, 3), (6, 2), 1)),
    "Th": _Move((5, 3), (6, 2), 2),
    **dict.fromkeys(("Ds", "Rg"), _Move((7, 0), (6, 2), 1)),
}


def electrons_of_shells(symbol: str) -> dict[Shell, int]:
    """Return the electrons in each shell of a free atom, shells sorted by n, then by l."""
    # the shells of all elements in the order in which they are filled: by n + l, then by n
    # (Madelung rule)
    shells = [
        (n, total - n)
        for total in range(1, 9)
        for n in range(total // 2 + 1, min(total, 7) + 1)
    ]
    electrons = {}
    left = SYMBOLS.index(symbol) + 1
    for n, l in shells:  # noqa: E741
        electrons[n, l] = min(left, 2 * (2 * l + 1))
        left -= electrons[n, l]
    if symbol in _MOVED:
        move = _MOVED[symbol]
        electrons[move.source] -= move.number
        electrons[move.target] += move.number
    return dict(sorted(electrons.items()))


def occupied_states(symbol: str) -> list[bool]:
    """Return for each of ``NUM_STATES`` one-electron states whether it is occupied.

    Shells are sorted by n, then by l. By Hund's rule every orbital of a shell gets one electron
    before any gets two; of each orbital the state of the second electron comes first, as in
    DeePMD-kit.
    """
    states = []
    # l is the name of the angular quantum number in the literature
    for (_, l), number in electrons_of_shells(symbol).items():  # noqa: E741
        orbitals = range(2 * l + 1)
        states += [
            occupied
            for k in orbitals
            for occupied in (number > len(orbitals) + k, number > k)
        ]
    return states


# masses of H to Lr in u, IUPAC 2016, as in ASE
_MASSES = (
    "1.008 4.0026 6.94 9.0122 10.81 12.011 14.007 15.999 18.998 20.18 22.99 24.305 26.982 28.085 "
    "30.974 32.06 35.45 39.948 39.098 40.078 44.956 47.867 50.941 51.996 54.938 55.845 58.933 "
    "58.693 63.546 65.38 69.723 72.63 74.922 78.971 79.904 83.798 85.468 87.62 88.906 91.224 "
    "92.906 95.95 97.907 101.07 102.91 106.42 107.87 112.41 114.82 118.71 121.76 127.6 126.9 "
    "131.29 132.91 137.33 138.91 140.12 140.91 144.24 144.91 150.36 151.96 157.25 158.93 162.5 "
    "164.93 167.26 168.93 173.05 174.97 178.49 180.95 183.84 186.21 190.23 192.22 195.08 196.97 "
    "200.59 204.38 207.2 208.98 208.98 209.99 222.02 223.02 226.03 227.03 232.04 231.04 238.03 "
    "237.05 244.06 243.06 247.07 247.07 251.08 252.08 257.1 258.1 259.1 262.11 "
)
MASSES = dict(zip(SYMBOLS, map(float, _MASSES.split())))
