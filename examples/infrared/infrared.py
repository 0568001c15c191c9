"""Infrared spectrum of liquid water: molecular dynamics with a potential, dipoles with a second
model.

    python infrared.py potential/model_ema.ckpt.pt dipole/model_ema.ckpt.pt

Positions are kept in trajectory.npy. If it exists, only dipoles, spectrum and picture are computed.
"""

import argparse
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet
from numpy.typing import NDArray

from deepmd_ema import Potential
from deepmd_ema.calculator import DP

Array = NDArray[np.floating]

DATA = Path(
    "deepmd-kit/examples/water_tensor/dipole/training_data_reformat/atomic_system/set.000"
)
STEP = 0.5  # fs
STEPS_PER_FRAME = 2
INTERVAL = STEP * STEPS_PER_FRAME  # fs, between frames
TEMPERATURE = 300  # K
WIDTH = 50  # 1/cm, full width at half maximum of the Gaussian that smooths the spectrum
SPEED_OF_LIGHT = 1e-13 * units._c  # cm/fs
# liquid water at 298 K, 1/cm: J. E. Bertie and Z. Lan, Appl. Spectrosc. 50, 1047 (1996)
EXPERIMENT = {"hydrogen bond": 200, "libration": 660, "bend": 1640, "stretch": 3400}


def first_frame() -> Atoms:
    """Return 64 molecules in the order O, H, H at 1.00 g/cm3, from the training data of the
    dipoles.
    """
    coord, box = (
        np.load(DATA / f"{name}.npy")[-1].reshape(-1, 3) for name in ("coord", "box")
    )
    return Atoms("OHH" * (len(coord) // 3), coord, cell=box, pbc=True)


def simulate(atoms: Atoms, frames: int, path: Path) -> None:
    """Write positions of molecules that stay whole, angstrom, (frames, atoms, 3): 1 ps of NVT, then
    NVE.
    """
    rng = np.random.default_rng(1)
    thermalize_momenta(atoms, temperature_K=TEMPERATURE, rng=rng)
    thermostat = {
        "temperature_K": TEMPERATURE,
        "friction": 0.01 / units.fs,
        "fixcm": False,
        "rng": rng,
    }
    Langevin(atoms, STEP * units.fs, **thermostat).run(2000)
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, STEP * units.fs)
    positions = np.lib.format.open_memmap(
        path, "w+", np.float32, (frames, len(atoms), 3)
    )
    for k in range(frames):
        dynamics.run(STEPS_PER_FRAME)
        positions[k] = atoms.positions
        if (k + 1) % 500 == 0:
            positions.flush()
            energy, kelvin = atoms.get_total_energy(), atoms.get_temperature()
            print(
                f"{(k + 1) * INTERVAL / 1000:g} ps: total energy {energy:.4f} eV, {kelvin:.0f} K",
                flush=True,
            )


def total_dipole(model: Potential, positions: Array, cell: Array) -> Array:
    """Return the dipoles of the cell, e angstrom, (frames, 3), by the modern theory of
    polarization.

    The cores have charges of +1 (H) and +6 (O), the eight electrons of a molecule -8. The model
    predicts the sum of the vectors from O to the four Wannier centers, each of which is a pair of
    electrons.
    """
    dipoles = []
    for k in range(0, len(positions), 100):
        part = positions[k : k + 100].astype(float)
        centers = model.evaluate(
            part, ["O", "H", "H"] * (part.shape[1] // 3), cell
        ).dipole
        oxygen, *hydrogen = (part[:, j::3].sum(axis=1) for j in range(3))
        dipoles.append(hydrogen[0] + hydrogen[1] - 2 * oxygen - 2 * centers)
    return np.concatenate(dipoles)


def spectrum(
    dipole: Array, interval: float, volume: float, temperature: float
) -> tuple[Array, Array]:
    """Return wavenumbers and absorption coefficient times refractive index, both in 1/cm.

    beta / (6 c V epsilon_0) times the Fourier transform of <M'(0) M'(t)>, M' the derivative of the
    dipole by time: the classical correlation with the harmonic quantum correction (Ramirez et al.,
    J. Chem. Phys. 121, 3973, 2004).

    Args:
        dipole: (frames, 3), e angstrom.
        interval: between frames, fs.
        volume: angstrom^3.
        temperature: K.
    """
    derivative = np.diff(dipole, axis=0) / interval
    frames = len(derivative)
    power = (
        np.abs(np.fft.rfft(derivative, 2 * frames, axis=0)) ** 2
    )  # padded: no correlation across the ends
    correlation = np.fft.irfft(power.sum(axis=1))[:frames] / np.arange(frames, 0, -1)
    decay = WIDTH * np.pi * SPEED_OF_LIGHT / np.sqrt(4 * np.log(2))  # 1/fs
    correlation *= np.exp(-((decay * interval * np.arange(frames)) ** 2))
    transform = interval * (
        2 * np.fft.rfft(correlation, 2 * frames).real - correlation[0]
    )  # of both signs of time
    wavenumber = np.fft.rfftfreq(2 * frames, interval * SPEED_OF_LIGHT)
    transform /= (
        np.sinc(wavenumber * SPEED_OF_LIGHT * interval) ** 2
    )  # derivative was a difference of frames
    si = (
        (units._e * 1e5) ** 2 * 1e-15 / (1e-30 * volume)
    )  # (e angstrom/fs)^2 fs/angstrom^3
    factor = si / (6 * units._c * units._eps0 * units._k * temperature)  # 1/m
    return wavenumber, 0.01 * factor * transform


def draw(wavenumber: Array, absorption: Array, path: str) -> None:
    """Write a picture with the bands of the experiment."""
    from matplotlib import pyplot as plt

    shown = wavenumber < 4500
    plt.figure(figsize=(8, 3.5), layout="constrained")
    plt.plot(wavenumber[shown], absorption[shown] / 1000)
    for name, place in EXPERIMENT.items():
        plt.axvline(place, color="0.6", ls="--", lw=1)
        plt.annotate(
            f" {name}",
            (place, 1),
            xycoords=("data", "axes fraction"),
            va="top",
            rotation=90,
            ha="right",
        )
    plt.axis(xmin=0, xmax=4500, ymin=0)
    plt.title("Liquid water; dashed: bands of the experiment", loc="left")
    plt.xlabel("Wavenumber (1/cm)")
    plt.ylabel("Absorption × refractive index\n(1000/cm)")
    plt.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("potential")
    parser.add_argument("dipoles")
    parser.add_argument("--picoseconds", type=float, default=20)
    args = parser.parse_args()
    path = Path("trajectory.npy")
    atoms = first_frame()
    if not path.exists():
        atoms.calc = DP(args.potential)
        simulate(atoms, round(1000 * args.picoseconds / INTERVAL), path)
    dipole = total_dipole(Potential(args.dipoles), np.load(path), atoms.cell.array)
    np.save("dipole.npy", dipole)
    wavenumber, absorption = spectrum(dipole, INTERVAL, atoms.get_volume(), TEMPERATURE)
    draw(wavenumber, absorption, "infrared.svg")
    for name, place in EXPERIMENT.items():
        band = abs(wavenumber / place - 1) < 0.4
        peak = wavenumber[band][absorption[band].argmax()]
        print(
            f"{name}: {peak:.0f} 1/cm (experiment: {place}), height {absorption[band].max():.0f} "
            "1/cm"
        )
