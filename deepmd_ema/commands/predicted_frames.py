"""Frames with their predictions as extended XYZ, ``dp-ema test -o``."""

from __future__ import annotations

import os
from pathlib import Path

from deepmd_ema.config.labels import APARAM, FORCE, FPARAM, LABELS, VIRIAL
from deepmd_ema.data.formats.extxyz import REFERENCE, XYZ_SUFFIXES, frame_text
from deepmd_ema.data.formats.properties import STRESS
from deepmd_ema.data.source import BOX, COORD
from deepmd_ema.errors import UserError
from deepmd_ema.files import atomic_write, check_output
from deepmd_ema.infer.evaluate import ErrorReport


def refuse_frames(path: str) -> None:
    """Check that :func:`write_frames` can write a new file.

    Raises:
        UserError: if the name is of another kind of file, or a file is there, which may be data.
    """
    if Path(path).suffix.lower() not in XYZ_SUFFIXES:
        raise UserError(
            f"-o {path}: expected a file that ends in {' or '.join(XYZ_SUFFIXES)}."
        )
    if os.path.lexists(path):
        raise UserError(
            f"-o {path}: exists, and may be data. Name another file, or remove it."
        )
    check_output(path, "-o", None)


def write_frames(report: ErrorReport, path: str) -> Path:
    """Write all frames with their predictions under the names of ASE.

    Labels are ``REF_energy``, ``REF_forces``, ... A periodic frame has the stress in place of the
    virial, in eV/angstrom^3, positive under tension.
    """
    kinds = report.kinds
    with (
        atomic_write(path, "Choose another -o.") as part,
        part.open("w", encoding="utf-8") as file,
    ):
        for result in report.frames:
            system, number = result.source
            frame = report.systems[system].frame(number)
            arrays = {
                COORD: frame.coord,
                BOX: frame.box,
                FPARAM: frame.fparam,
                APARAM: frame.aparam,
            }
            for prefix, values in (("", result.prediction), (REFERENCE, result.label)):
                for name, value in values.items():
                    if LABELS[name].per_atom and name not in (FORCE, *result.label):
                        # a share of an atom would be taken for a label when the file is read
                        continue
                    if name == VIRIAL and result.volume is not None:
                        arrays[prefix + STRESS] = -value / result.volume
                    else:
                        arrays[prefix + name] = value
            symbols = [report.type_map[k] for k in result.atom_type]
            present = {
                name: array for name, array in arrays.items() if array is not None
            }
            file.write(frame_text(symbols, present, kinds[result.source]))
    return Path(path)
