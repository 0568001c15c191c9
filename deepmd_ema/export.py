"""Freeze and convert: weights as another model file, proven to be the same model before it takes its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from deepmd_ema import checkpoint, interchange
from deepmd_ema.batch import Batch
from deepmd_ema.config import ModelConfig
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.dist.device import select_device
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.files import MODEL_FILE, refuse_inputs, refuse_to_lose
from deepmd_ema.infer.load import COMPILED_SUFFIX, LoadedModel, load_model
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.linear import LinearDescriptor

SUFFIXES = (".dp", ".yaml", ".yml", COMPILED_SUFFIX)
WEIGHTS = ".pt"
CONVERTED = (".pth", ".pb", ".pte", ".savedmodel", ".savedmodeltf")  # what `dp convert-backend` makes of a .dp
# largest difference between the file that was read back and the checkpoint, relative to the largest number
SAME_MATH = {torch.float64: 1e-10, torch.float32: 1e-4}
SPACING = 2.1  # angstrom, of the atoms of the frames on which the two are compared


@dataclass(frozen=True)
class Frozen:
    """A file that was written.

    Attributes:
        path: the file.
        source: what was frozen, in words.
        num_bytes: its size.
        difference: largest difference to the checkpoint, by quantity, in eV and eV/angstrom.
        only_here: why DeePMD-kit's torch backend does not read it, or an empty string.
    """

    path: Path
    source: str
    num_bytes: int
    difference: Mapping[str, float]
    only_here: str = ""

    def text(self) -> str:
        """Return what was written, how far it is from the checkpoint, and what can be done with it."""
        found = ", ".join(f"{name} {value:.1e}" for name, value in self.difference.items())
        use = self.only_here or (
            f"start a run from it: dp-ema train INPUT --init-model {self.path}"
            if self.path.suffix.lower() == WEIGHTS
            else "for deepmd_ema.calculator.DP, dp-ema test and DeePMD-kit 3.2.0, on machines like this one"
            if self.path.suffix == COMPILED_SUFFIX
            else f"for LAMMPS with DeePMD-kit: dp convert-backend {self.path} {self.path.with_suffix('.pth')}"
        )
        return (
            f"{self.path}: {self.source}; {self.num_bytes / 1e6:.2f} MB\n"
            f"read back and compared on two made-up frames: largest difference {max(self.difference.values()):.1e} "
            f"({found})\n{use}"
        )


def convert(loaded: LoadedModel, output: str | Path) -> Frozen:
    """Write a model to another kind of file, read it back, and compare the two before the file takes its name.

    Args:
        loaded: the model with where its weights come from, which the file records.
        output: ``.dp``, ``.yaml``, or ``.pt``: then a file of kind ``weights``, without what a restart needs.

    Raises:
        UserError: if the name says no format, or something else stands there.
        CheckpointError: if the file cannot be written or is not the same model; an older file of that name stays.
    """
    path = Path(output)
    if path.suffix.lower() not in (*SUFFIXES, *CONVERTED, WEIGHTS):
        raise UserError(f"OUT {path}: expected a name that ends in {', '.join(SUFFIXES)} or {WEIGHTS}.")
    return _write_weights(loaded, path) if path.suffix.lower() == WEIGHTS else freeze(loaded, path, "OUT")


def freeze(loaded: LoadedModel, output: str | Path, option: str = "-o", device: str | None = None) -> Frozen:
    """Write a model to ``output``, read it back, and compare the two before the file takes its name.

    Args:
        loaded: the model with where its weights come from, which the file records.
        output: ``.dp``, ``.yaml``, or ``.pt2``, which takes minutes to compile; ``.dp`` is added without a suffix.
        option: what names the file, for messages.
        device: what a ``.pt2`` is compiled for: ``cpu``, ``cuda``; CUDA when there is one if not given.

    Raises:
        UserError: if a ``.pt2`` cannot be compiled here, or ``device`` is given for another format.
        CheckpointError: if the file cannot be written or is not the same model; an older file of that name stays.
    """
    path = _target(Path(output), option)
    refuse_to_lose(path, option, MODEL_FILE, [loaded.info.path])
    info, compiled = loaded.info, path.suffix == COMPILED_SUFFIX
    if device is not None and not compiled:
        raise UserError(f"--device {device}: {path} is for any device. Leave it out, or write a .pt2 file.")
    section, extra = dict(info.config["model"]), {**info.as_dict(), "config": dict(info.config)}
    difference: dict[str, float] = {}

    def read_back(part: Path) -> None:
        try:
            back, where = load_model(part).on(device) if compiled else (load_model(part).model, None)
        except CheckpointError as error:
            raise CheckpointError([text.replace(str(part), str(path)) for text in error.problems]) from error
        difference.update(compare(loaded.model, back, loaded.config, where))

    if compiled:
        tree = interchange.file_tree(loaded.model, section, info.min_nbor_dist, extra)
        interchange.write_pt2(path, loaded.model, loaded.config, tree, select_device(device), check=read_back)
    else:
        interchange.write_dp(path, loaded.model, section, info.min_nbor_dist, extra, check=read_back)
    return Frozen(
        path, f"{info.in_words()}, from {info.path}", path.stat().st_size, difference, _only_here(loaded.model)
    )


def _only_here(model: EnergyModel) -> str:
    """Return why DeePMD-kit's torch backend does not read a model, or an empty string."""
    feature, whole = "use_srtab" if model.short_range is not None else "", model.descriptor
    descriptors = [whole]
    if isinstance(whole, LinearDescriptor):
        feature, descriptors = "linear_ener", whole.descriptors
    if not feature or all(one.mixed_types for one in descriptors):
        return ""
    return f"DeePMD-kit's torch backend does not read it: it has {feature} for descriptors of mixed types only"


def compare(
    model: EnergyModel, other: nn.Module, config: ModelConfig, where: torch.device | None = None
) -> dict[str, float]:
    """Return the largest differences of two models on frames with all elements, one periodic and one open.

    Args:
        model: what was read.
        other: what was written and read back.
        config: the section ``model``.
        where: the device of ``other`` if it is compiled.

    Raises:
        CheckpointError: if they differ by more than rounding.
    """
    batch = _made_up_frames(model, config, model.layout.rcut if where is not None else 0.0)
    where = where or batch.coord.device
    one, two = model.eval()(batch), other.to(where).eval()(batch.to(where))
    two = {name: value.to(batch.coord.device) for name, value in two.items()}
    difference = {name: float((one[name] - two[name]).abs().max()) for name in one}
    tolerance = max(SAME_MATH[parameter.dtype] for parameter in model.parameters())
    for name, value in difference.items():
        scale = max(1.0, float(one[name].abs().max()))
        if not value <= tolerance * scale:
            raise CheckpointError(
                f"the frozen file read back differs from the checkpoint by {value:.1e} in {name}, more than "
                f"{tolerance * scale:.0e}: it was not kept. Please report this."
            )
    return difference


def _made_up_frames(model: EnergyModel, config: ModelConfig, smallest: float) -> Batch:
    """Return frames in a cell of at least ``smallest`` angstrom: without images of an atom as its own neighbors.

    A compiled model sorts neighbors itself, and may take two images of one atom at one distance in another order.
    """
    rng = np.random.default_rng(0)
    num_types = len(config.type_map)
    side = max(2, int(np.ceil((2 * num_types) ** (1 / 3))), int(np.ceil(1.1 * smallest / SPACING)))
    sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    natoms = len(sites)
    box = SPACING * side * np.array([[1.0, 0.0, 0.0], [0.1, 1.0, 0.0], [-0.1, 0.2, 1.0]])
    fitting = config.fitting_net
    frames = [
        Frame(
            coord=sites / side @ box + rng.normal(scale=0.1, size=(natoms, 3)),
            atom_type=np.arange(natoms) % num_types,
            box=cell,
            fparam=rng.normal(size=fitting.numb_fparam) if fitting.numb_fparam else None,
            aparam=rng.normal(size=(natoms, fitting.numb_aparam)) if fitting.numb_aparam else None,
        )
        for cell in (box, None)
    ]
    return collate(frames, model.layout).to(model.out_bias.device)


def _write_weights(loaded: LoadedModel, path: Path) -> Frozen:
    """Write a checkpoint of kind ``weights``."""
    _check_folder(path, "OUT")
    checkpoint.refuse_to_replace(path, "OUT")
    info = loaded.info
    refuse_inputs(path, "OUT", [info.path])
    difference: dict[str, float] = {}

    def read_back(part: Path) -> None:
        difference.update(compare(loaded.model, load_model(part).model, loaded.config))

    head = checkpoint.payload_head("weights", info.weights, info.step, info.config, info.min_nbor_dist)
    facts = {name: dict(fact) for name, fact in (("average", info.average), ("bias", info.bias)) if fact}
    checkpoint.save(path, {**head, **facts, "model": dict(loaded.model.state_dict())}, check=read_back)
    return Frozen(path, f"{info.in_words()}, from {info.path}", path.stat().st_size, difference)


def _target(path: Path, option: str) -> Path:
    if path.suffix in CONVERTED:
        raise UserError(
            f"{option} {path}: dp-ema writes .dp and .pt2 files. Write {path.with_suffix('.dp')}, then "
            f"`dp convert-backend {path.with_suffix('.dp')} {path}` with DeePMD-kit."
        )
    if path.suffix not in SUFFIXES:
        path = path.with_name(f"{path.name}.dp")
    _check_folder(path, option)
    return path


def _check_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise CheckpointError(f"{path}: the folder {path.parent} is not there. Make it, or choose another {option}.")
