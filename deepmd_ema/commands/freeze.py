"""Freezing and conversion: writes a model file of another kind, which is read back and compared."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deepmd_ema import checkpoint
from deepmd_ema.batch import Batch
from deepmd_ema.config import ModelConfig
from deepmd_ema.config.labels import ENERGY, LABELS
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.files import MODEL_FILE, check_output
from deepmd_ema.infer.load import (
    COMPILED_SUFFIX,
    LoadedModel,
    ModelFile,
    load_model,
    load_models,
)
from deepmd_ema.interop import deepmd_kit, dp
from deepmd_ema.interop.deepmd_pt import write_deepmd_pt
from deepmd_ema.interop.tree_files import write_tree
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.tabulated import make_tables, min_table_distance, tabulate
from deepmd_ema.text import command, counted

SUFFIXES = (".dp", ".yaml", ".yml", COMPILED_SUFFIX)
WEIGHTS = ".pt"
FOLDERS = (".savedmodel", ".savedmodeltf")  # `dp convert-backend` makes them of a .dp
# largest difference between the file that was read back and the checkpoint, relative to the largest
# number
SAME_MATH = {torch.float64: 1e-10, torch.float32: 1e-4}
# the same of a file with tables of its networks
FROM_TABLES = {torch.float64: 1e-8, torch.float32: 1e-4}
SPACING = 2.1  # angstrom, of the atoms of the frames on which the two are compared
# 192 atoms, two layers of attention, one core: benchmarks/results/versions.md
SLOWER = (
    "an evaluation of se_atten took 1.2 times as long as from a file of torch 2.13, which runs "
    "here too"
)
IN_LAMMPS = (
    COMPILED_SUFFIX,
    ".pth",
)  # what DeePMD-kit's pair style reads with its torch backends
# versions that benchmarks/lammps.py was run with
LAMMPS_VERSIONS = "LAMMPS of DeePMD-kit 3.2.0 with torch 2.11"


@dataclass(frozen=True)
class Frozen:
    """A file that was written.

    Attributes:
        path: the file.
        source: description of the weights that were frozen.
        difference: largest difference to the checkpoint, by quantity, in eV and eV/angstrom.
        use: line about what the file is for.
        tables: line about the tables of its networks, or an empty string.
        lammps: lines of an input of LAMMPS, or an empty string for a file that it does not read.
        pressure: line about pressures that mean nothing, or an empty string.
    """

    path: Path
    source: str
    difference: Mapping[str, float]
    use: str
    tables: str = ""
    lammps: str = ""
    pressure: str = ""

    def text(self) -> str:
        """Return lines about the file: size, differences to the checkpoint, and its readers."""
        each = ", ".join(
            f"{name} {value:.1e} {LABELS[name].unit}".rstrip()
            for name, value in self.difference.items()
        )
        written = f"{self.path}: {self.source}; {self.path.stat().st_size / 1e6:.2f} MB"
        compared = (
            f"read back and compared on two made-up frames, largest differences: {each}"
        )
        lines = (written, self.tables, compared, self.pressure, self.use, self.lammps)
        return "\n".join(filter(None, lines))


def convert(
    file: ModelFile,
    output: str | Path,
    for_deepmd: bool = False,
    program: str | None = None,
) -> Frozen:
    """Write models to another kind of file, which takes its name after it was compared.

    Args:
        file: the models with where their weights come from, which the file records; a single one
            gets no name there, and only a checkpoint of DeePMD-kit holds several.
        output: as for :func:`freeze`, or ``.pt``: a file of kind ``weights``, without what a
            restart needs, or a checkpoint of DeePMD-kit.
        for_deepmd: which of these a ``.pt`` is.
        program: the command of DeePMD-kit, for the formats that it writes.

    Raises:
        UserError: if the name says no format, or there is something else.
        CheckpointError: if DeePMD-kit does not have such a model, the file cannot be written or is
            not the same models; an older file of that name stays.
    """
    path = Path(output)
    models = (
        file.models if len(file.models) > 1 else {"": next(iter(file.models.values()))}
    )
    loaded = next(iter(models.values()))
    info, difference = loaded.info, dict[str, float]()
    if path.suffix.lower() not in (*SUFFIXES, *deepmd_kit.SUFFIXES, *FOLDERS, WEIGHTS):
        raise UserError(
            f"OUT {path}: expected a name that ends in {', '.join(SUFFIXES)} or {WEIGHTS}."
        )
    if path.suffix.lower() != WEIGHTS:
        return freeze(loaded, path, "OUT", program=program)
    checkpoint.refuse_to_replace(path, "OUT")
    check_output(path, "OUT", None, [info.path])

    def read_back(part: Path) -> None:
        back = load_models(part).models
        for task, written in models.items():
            values = compare(written.model, back[task].model, written.config)
            for name, value in values.items():
                difference[name] = max(value, difference.get(name, 0.0))

    source = info.describe()
    if for_deepmd:
        for each in models.values():
            if only_here := _only_here(path, each.model, each.config):
                raise CheckpointError(
                    f"{path}: {only_here}. Without --to deepmd the file is for dp-ema."
                )
        tasks = {
            task: (each.config, each.model, each.info.as_dict())
            for task, each in models.items()
        }
        write_deepmd_pt(path, tasks, check=read_back)
        if len(models) > 1:
            source = f"{', '.join(models)}: {replace(info, head='').describe()}"
        use = (
            "for DeePMD-kit: dp --pt test, freeze, change-bias, and train with --init-model or "
            "--finetune"
        )
    else:
        head = checkpoint.payload_head(
            "weights", info.weights, info.step, info.config, info.min_nbor_dist
        )
        facts = {
            name: dict(fact)
            for name, fact in (("average", info.average), ("bias", info.bias))
            if fact
        }
        weights = {**head, **facts, "model": dict(loaded.model.state_dict())}
        checkpoint.save(path, weights, check=read_back, option="OUT")
        use = f"start a run from it: {command('dp-ema', 'train', 'INPUT', '--init-model', path)}"
    return Frozen(path, f"{source}, from {info.path}", difference, use)


def freeze(
    loaded: LoadedModel,
    output: str | Path,
    option: str = "-o",
    device: str | None = None,
    compress: bool | None = None,
    program: str | None = None,
) -> Frozen:
    """Write a model to ``output``, which takes its name after it was read back and compared.

    Args:
        loaded: the model with where its weights come from, which the file records.
        output: ``.dp``, ``.yaml``, ``.pt2``, which takes minutes to compile, or ``.pth``, ``.pte``,
            ``.pb``, which an installed DeePMD-kit writes; ``.dp`` is added without a suffix.
        option: what names the file, for messages.
        device: what a ``.pt2`` is compiled for: ``cpu``, ``cuda``; CUDA when there is one if not
            given.
        compress: whether a ``.pt2`` has tables of the embedding networks instead of the networks;
            None: for a CPU and networks of which tables are faster.
        program: the command of DeePMD-kit, for the formats that it writes; None: ``dp`` on the
            PATH.

    Raises:
        UserError: if a ``.pt2`` cannot be compiled here, ``device``, ``compress`` or ``program`` is
            given for another format, or there is no DeePMD-kit for a format that it writes, or it
            fails.
        CheckpointError: if the file cannot be written or is not the same model; an older file of
            that name stays.
    """
    path, info = Path(output), loaded.info
    if path.suffix in FOLDERS:
        frozen = path.with_suffix(".dp")
        line = command("dp", "convert-backend", frozen, path)
        raise UserError(
            f"{option} {path}: dp-ema writes files. Write {frozen}, then `{line}` with DeePMD-kit."
        )
    if path.suffix not in (*SUFFIXES, *deepmd_kit.SUFFIXES):
        path = path.with_name(f"{path.name}.dp")
    check_output(path, option, MODEL_FILE, [info.path])
    checkpoint.require_finite(loaded.model.state_dict(), info.path)
    only_here = _only_here(path, loaded.model, loaded.config)
    compiled = path.suffix == COMPILED_SUFFIX
    _refuse_options(path, device, compress, program)
    kind = loaded.config.fitting_net.type
    if compiled:
        loaded.require_energies(f"a {COMPILED_SUFFIX} file")
    kit = None
    if path.suffix in deepmd_kit.SUFFIXES:
        if only_here:
            raise UserError(f"{path}: {only_here}. Write a .dp or a .pt2 file.")
        kit = deepmd_kit.find_deepmd_kit(path, program)
    facts = {**info.as_dict(), "config": dict(info.config)}
    section = dict(info.config["model"])
    tree = dp.file_tree(loaded.model, section, info.min_nbor_dist, facts)
    difference: dict[str, float] = {}
    tables = ""

    def read_back(part: Path) -> None:
        try:
            read = load_model(part)
            back, where = read.on(device) if compiled else (read.model, None)
        except CheckpointError as error:
            raise CheckpointError(
                [text.replace(str(part), str(path)) for text in error.problems]
            ) from error
        if tables:
            compare(model, back, loaded.config, where)
        tolerances = FROM_TABLES if tables else SAME_MATH
        difference.update(compare(loaded.model, back, loaded.config, where, tolerances))

    if compiled:
        from deepmd_ema.interop.pt2 import check_compiler, write_pt2

        check_compiler(path)
        target = select_device(device)
        model, tables = _with_tables(loaded, target, compress)
        has_vectors = write_pt2(
            path, model, loaded.config, tree, target, check=read_back
        )
        use = (
            "for deepmd_ema.calculator.DP, dp-ema test and DeePMD-kit 3.2.0, on machines like "
            "this one"
        )
        if not has_vectors:
            use += (
                f"\nwithout vector instructions, of which torch {torch.__version__} makes wrong "
                f"code: {SLOWER}"
            )
    elif kit is not None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "model.dp"
            write_tree(source, tree, read_back)
            needs_task_dim = kind == "dipole" and path.suffix == ".pth"
            edit = deepmd_kit.copy_with_task_dim if needs_task_dim else shutil.copyfile
            kit.write(["convert-backend", str(source), "{}"], path, edit)
        use = f"written by {kit} from the .dp file that was compared"
    else:
        write_tree(path, tree, read_back)
        compiles = ENERGY in loaded.model.labels
        suffix = COMPILED_SUFFIX if compiles else ".pth"
        freeze_it = command(
            "dp-ema", "freeze", "-c", path, "-o", path.with_suffix(suffix)
        )
        use = only_here or f"for LAMMPS with DeePMD-kit: {freeze_it}"
        use = use if compiles or _has_dipoles_in_lammps(loaded) else ""
    lammps = format_lammps_lines(path, loaded) if path.suffix in IN_LAMMPS else ""
    text = f"{info.describe()}, from {info.path}"
    pressure = _describe_pressure(info.config, info.head)
    return Frozen(path, text, difference, use, tables, lammps, pressure)


def _describe_pressure(config: Mapping[str, Any], head: str) -> str:
    """Return a line about a model of energies whose loss had no virials, else an empty text."""
    losses = config.get("loss_dict", {})
    loss = losses.get(head, {}) if losses else config.get("loss", {})
    has_virials = any(loss.get(f"{when}_pref_v") for when in ("start", "limit"))
    if "training" not in config or loss.get("type", "ener") != "ener" or has_virials:
        return ""
    return (
        "trained without virials: pressures and stresses mean nothing if all training frames had "
        "one cell"
    )


def format_lammps_lines(path: Path, loaded: LoadedModel) -> str:
    """Return the lines of an input of LAMMPS that use a frozen file, and versions that were tried.

    Atom types of LAMMPS are numbered as in the type map. A ``.pt2`` that passes messages must know
    which atom an image belongs to (``atom_modify map yes``), and runs on one rank; a ``.pth``
    exchanges them itself. Parameters without default are named, for the user to replace.
    """
    fitting = loaded.config.fitting_net
    if ENERGY not in loaded.model.labels:
        if not _has_dipoles_in_lammps(loaded):
            return ""
        lines = [
            f"in LAMMPS (tried: {LAMMPS_VERSIONS}):",
            "units        metal",
            f"pair_style   zero {loaded.model.layout.rcut:g}  # or another one that reaches as far",
            "pair_coeff   * *",
            f"compute      ID all deeptensor/atom {command(path)}  # atom types: "
            f"{' '.join(loaded.config.type_map)}",
        ]
        return "\n  ".join(lines)
    arguments = [str(path)]
    if fitting.numb_fparam and not fitting.default_fparam:
        arguments += [
            "fparam",
            *(f"FPARAM_{k + 1}" for k in range(fitting.numb_fparam)),
        ]
    if fitting.numb_aparam:
        arguments += [
            "aparam",
            *(f"APARAM_{k + 1}" for k in range(fitting.numb_aparam)),
        ]
    lines = ["units        metal"]
    on_one_rank = ""
    if path.suffix == COMPILED_SUFFIX and loaded.model.descriptor.passes_messages:
        freeze = command("dp-ema", "freeze", "-o", path.with_suffix(".pth"))
        on_one_rank = f" on one rank; for several: {freeze}"
        lines.append("atom_modify  map yes  # before the box is defined")
    lines = [
        f"in LAMMPS{on_one_rank} (tried: {LAMMPS_VERSIONS}):",
        *lines,
        f"pair_style   deepmd {command(*arguments)}",
        f"pair_coeff   * * {' '.join(loaded.config.type_map)}",
    ]
    return "\n  ".join(lines)


def _has_dipoles_in_lammps(loaded: LoadedModel) -> bool:
    """Whether ``compute deeptensor/atom`` of DeePMD-kit 3.2.0 reads the ``.pth`` of a model.

    It wants derivatives, which models of polarizabilities do not have there, and exchanges no
    messages.
    """
    return (
        loaded.config.fitting_net.type == "dipole"
        and not loaded.model.descriptor.passes_messages
    )


def compress(
    source: Path, target: Path, device: str | None = None, program: str | None = None
) -> str:
    """Write a frozen model with tables of its embedding networks, and return lines about the file.

    Args:
        source: a ``.pt2``, which is compiled again, or a file that an installed DeePMD-kit
            compresses.
        target: of the same kind.
        device: what a ``.pt2`` is compiled for.
        program: the command of DeePMD-kit.

    Raises:
        UserError: if no network of the model can have tables, or there is no DeePMD-kit for the
            kind of file.
        CheckpointError: if the file cannot be written or is not the same model; an older file of
            that name stays.
    """
    if source.suffix.lower() == COMPILED_SUFFIX:
        loaded = load_model(source)
        return freeze(
            loaded, target, device=device, compress=True, program=program
        ).text()
    _refuse_options(target, device, None, program)
    check_output(target, "-o", MODEL_FILE, [source])
    kit = deepmd_kit.find_deepmd_kit(target, program)
    flag = "--pt" if target.suffix.lower() == ".pth" else "--pt-expt"
    kit.write([flag, "compress", "-i", str(source.absolute()), "-o", "{}"], target)
    return (
        f"{target}: {source} with tables of DeePMD-kit; {target.stat().st_size / 1e6:.2f} MB\n"
        f"written by {kit}"
    )


def _refuse_options(
    path: Path, device: str | None, compress: bool | None, program: str | None
) -> None:
    """Raise an error for an option that the format of ``path`` would ignore."""
    compiled = path.suffix == COMPILED_SUFFIX
    if device is not None and not compiled:
        raise UserError(
            f"--device {device}: {path} is for any device. Leave it out, or write a .pt2 file."
        )
    if compress is not None and not compiled:
        raise UserError(
            f"{'--compress' if compress else '--no-compress'}: {path} holds the networks "
            "themselves. dp-ema evaluates them from tables by default. Leave it out, or write a "
            ".pt2 file."
        )
    if program is not None and path.suffix not in deepmd_kit.SUFFIXES:
        raise UserError(
            f"--dp {program}: {path} is written without DeePMD-kit. Leave it out."
        )


def _with_tables(
    loaded: LoadedModel, device: torch.device, compress: bool | None
) -> tuple[EnergyModel, str]:
    """Return the model, or a copy with tables of its networks and a line about these."""
    if compress is False or (compress is None and device.type != "cpu"):
        return loaded.model, ""
    if device.type != "cpu":
        raise UserError(
            f"--compress: tables are for CPUs, and this is compiled for {device}. Leave it out."
        )
    model = deepcopy(loaded.model)
    tabulate(model, always=bool(compress))
    tables = make_tables(model, _made_up_frames(model, loaded.config, 0.0))
    if not tables:
        if compress:
            raise UserError(
                f"--compress: the descriptor {loaded.config.descriptor.type} has no network of "
                "one distance alone, or these are for each element of the centre as well (concat "
                "without type_one_side). Leave it out."
            )
        return loaded.model, ""
    return model, (
        f"embedding networks as {counted(len(tables), 'table')} of at most "
        f"{max(table.terms for table in tables)} terms, derivatives within "
        f"{max(table.error for table in tables):.0e} of the largest; pairs nearer than "
        f"{min_table_distance(model):.2f} angstrom by the networks"
    )


def _only_here(path: Path, model: EnergyModel, config: ModelConfig) -> str:
    """Return why DeePMD-kit's torch backend does not read a file of a model, or an empty string."""
    if path.suffix == COMPILED_SUFFIX:
        return ""  # it runs the code in the file
    fitting = config.fitting_net.type
    if path.suffix in (".pth", ".pb") and fitting == "dpa4_ener":
        return f"DeePMD-kit 3.2.0 has models with {fitting} in {COMPILED_SUFFIX} files only"
    feature = "use_srtab" if config.use_srtab is not None else ""
    descriptors = [model.descriptor]
    if config.type == "linear_ener":
        feature = config.type
        descriptors = list(getattr(model.descriptor, "parts", ()))
    if not feature or all(descriptor.mixed_types for descriptor in descriptors):
        return ""
    return (
        f"DeePMD-kit's torch backend does not read it: it has {feature} for descriptors of mixed "
        "types only"
    )


def compare(
    model: EnergyModel,
    other: nn.Module,
    config: ModelConfig,
    where: torch.device | None = None,
    tolerances: Mapping[torch.dtype, float] = SAME_MATH,
) -> dict[str, float]:
    """Return the largest differences of two models on a periodic and an open frame.

    The frames have all elements.

    Args:
        model: what was read.
        other: what was written and read back.
        config: the section ``model``.
        where: the device of ``other`` if it is compiled.
        tolerances: by precision, relative to the largest number.

    Raises:
        CheckpointError: if they differ by more than rounding.
    """
    batch = _made_up_frames(
        model, config, model.layout.rcut if where is not None else 0.0
    )
    where = where or batch.coord.device
    expected = model.eval()(batch)
    output = other.to(where).eval()(batch.to(where))
    output = {name: value.to(batch.coord.device) for name, value in output.items()}
    difference = {
        name: float((expected[name] - output[name]).abs().max())
        for name in expected
        if name in LABELS
    }
    tolerance = max(tolerances[parameter.dtype] for parameter in model.parameters())
    for name, value in difference.items():
        scale = max(1.0, float(expected[name].abs().max()))
        if not value <= tolerance * scale:
            raise CheckpointError(
                f"the frozen file read back differs from the checkpoint by {value:.1e} in {name}, "
                f"more than {tolerance * scale:.0e}: it was not kept. Please report this."
            )
    return difference


def _made_up_frames(model: EnergyModel, config: ModelConfig, smallest: float) -> Batch:
    """Return frames in a cell of at least ``smallest`` angstrom.

    No atom has its own images as neighbors then. A compiled model sorts neighbors itself, and may
    take two images of one atom at one distance in another order.
    """
    rng = np.random.default_rng(0)
    num_types = len(config.type_map)
    side = max(
        2,
        int(np.ceil((2 * num_types) ** (1 / 3))),
        int(np.ceil(1.1 * smallest / SPACING)),
    )
    sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(
        -1, 3
    )
    natoms = len(sites)
    box = (
        SPACING * side * np.array([[1.0, 0.0, 0.0], [0.1, 1.0, 0.0], [-0.1, 0.2, 1.0]])
    )
    fitting = config.fitting_net
    frames = [
        Frame(
            coord=sites / side @ box + rng.normal(scale=0.1, size=(natoms, 3)),
            atom_type=np.arange(natoms) % num_types,
            box=cell,
            fparam=rng.normal(size=fitting.numb_fparam)
            if fitting.numb_fparam
            else None,
            aparam=rng.normal(size=(natoms, fitting.numb_aparam))
            if fitting.numb_aparam
            else None,
        )
        for cell in (box, None)
    ]
    return collate(frames, model.layout).to(model.out_bias.device)
