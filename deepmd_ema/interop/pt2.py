"""Models compiled to machine code (``.pt2``): packages of AOTInductor as DeePMD-kit reads them."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from deepmd_ema.config import ModelConfig
from deepmd_ema.config.schema.common import MAX_SIZE
from deepmd_ema.distributed.world import select_device
from deepmd_ema.errors import CheckpointError, NotCompiledError, UserError
from deepmd_ema.files import atomic_write
from deepmd_ema.interop.tree_files import (
    PACKAGED_TREE,
    Tree,
    opened_package,
    packaged_text,
)
from deepmd_ema.model.compiler import CODE_OPTIONS, without_compiler
from deepmd_ema.model.dummy_atoms import MIN_SIZE
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.extended_model import ExtendedModel
from deepmd_ema.model.tabulated import seal

# F frames, N atoms of a frame, E atoms of a frame and images of them, L slots as given

logger = logging.getLogger(__name__)

_FACTS = "model/extra/metadata.json"  # names of DeePMD-kit
_SCRIPT = "model/extra/model_def_script.json"
_DEVICE = "dp_ema_device"
_OTHER_COMPILER = (
    "Install g++, or name another compiler in the environment variable CXX; or "
    "write a .dp file."
)
# as many threads as torch has when it runs, not when it was compiled
_OPTIONS = {"cpp.dynamic_threads": True, **CODE_OPTIONS}


def check_compiler(path: Path) -> None:
    """Check that torch and a C++ compiler can write a ``.pt2`` here.

    Compilation would fail after a minute otherwise.

    Raises:
        UserError: if torch is too old, or there is no C++ compiler.
    """
    if torch.__version__ < "2.10":  # which cannot export the graph
        raise UserError(
            f"-o {path}: torch {torch.__version__} cannot compile models to .pt2 files. Use torch "
            "2.10 or newer; or write a .pth file for LAMMPS, or a .dp file."
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        advice = without_compiler("a .pt2 file is made with")
        raise UserError(f"-o {path}: {advice}; or write a .dp file.") from error


def write_pt2(
    path: Path,
    model: EnergyModel,
    config: ModelConfig,
    tree: Tree,
    device: torch.device,
    check: Callable[[Path], None] | None = None,
) -> bool:
    """Compile a model for ``device`` and write it; the file appears whole or not at all.

    This takes minutes.

    Args:
        path: ends in ``.pt2``.
        model: in evaluation mode. Tables of its nets, if it has been evaluated with some, are
            constants in the file.
        config: the section ``model``.
        tree: content of the ``.dp`` file of the model, which the package holds as well.
        device: where the file computes.
        check: called with the path of the whole file before it takes its name; what it raises keeps
            an older file.

    Returns:
        Whether the code has vector instructions.

    Raises:
        UserError: if the C++ compiler fails.
        NotCompiledError: if torch cannot compile the model.
        WriteError: if the file cannot be written.
    """
    facts = {**metadata(model, config), _DEVICE: device.type}
    with tempfile.TemporaryDirectory() as folder, _clock() as line:
        file = (
            Path(folder) / "model.pt2"
        )  # the name is that of the folder in the package
        logger.info("compiling %s, which takes about a minute", path)
        with _failures_as_messages(path, config), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # of torch about its own calls
            line.desc = f"{path}: exporting the graph (1 of 3)"
            exported = _exported(model, config, device)
            line.desc = f"{path}: compiling (2 of 3)"
            compiling = partial(
                torch._inductor.aoti_compile_and_package,
                exported,
                package_path=str(file),
            )
            has_vectors = True
            try:
                compiling(inductor_configs=_OPTIONS)
            except RuntimeError as error:
                if not (
                    CODE_OPTIONS
                    and "CppCompileError" in f"{type(error).__name__}: {error}"
                ):
                    raise
                # names that are not declared are, for some models, also in loops that transpose
                # vectors
                logger.info(
                    "compiling it without vectors, of which torch %s makes wrong code",
                    torch.__version__,
                )
                has_vectors = False
                compiling(inductor_configs=_OPTIONS | {"cpp.simdlen": 1})
        with zipfile.ZipFile(file, "a") as package:
            package.writestr(_FACTS, json.dumps(facts))
            package.writestr(_SCRIPT, json.dumps(tree["model_def_script"]))
            package.writestr(PACKAGED_TREE, packaged_text(tree))
        with atomic_write(path, "Choose another -o, or make room.") as part:
            shutil.copyfile(file, part)
            line.desc = f"{path}: reading it back (3 of 3)"
            if check is not None:
                check(part)
    return has_vectors


def load_compiled(
    path: Path, name: str | None = None
) -> tuple[Callable[..., dict[str, Tensor]], torch.device]:
    """Return the compiled function of a ``.pt2`` file and its device.

    The function takes the arguments of ``ExtendedModel``.

    Machine code in the file runs as it is loaded.

    Args:
        path: the file.
        name: of a device; that of the file if not given.

    Raises:
        CheckpointError: if the file is missing or damaged, or this machine cannot run it.
        UserError: if the device is not there, or the file is compiled for another one.
    """
    try:
        with opened_package(path) as package:
            bad = package.testzip()
            facts = json.loads(package.read(_FACTS))
        if bad is not None or not isinstance(facts, dict):
            raise CheckpointError(
                f"{path}: damaged ({bad or _FACTS}). Freeze the model again."
            )
        kind = str(facts[_DEVICE])
        if kind == "cuda" and not torch.cuda.is_available():
            raise CheckpointError(
                f"{path}: compiled for CUDA, and there is no GPU here. Freeze the model again here."
            )
        device = select_device(kind if name is None else name)
        if device.type != kind:
            raise UserError(
                f"{path}: compiled for {kind}, not for {device}. Freeze the model again with "
                f"--device {device}."
            )
        number = -1 if device.index is None else device.index
        return torch._inductor.aoti_load_package(str(path), device_index=number), device
    except (
        OSError,
        EOFError,
        RuntimeError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: cannot be loaded ({reason}). It was compiled for one kind of machine, "
            "device and version of torch: freeze the model again here."
        ) from error


def metadata(model: EnergyModel, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata that DeePMD-kit reads from a package before it runs it."""
    layout, fitting = model.layout, config.fitting_net
    default = list(fitting.default_fparam) if fitting.default_fparam else None
    # DeePMD-kit fills lists up to that many and cuts none: of a model that keeps all neighbors it
    # is a small number
    sel = list(layout.sel) if sum(layout.sel) < MAX_SIZE else [MIN_SIZE]
    energy = {
        "name": "energy",
        "shape": [1],
        "reducible": True,
        "r_differentiable": True,
        "c_differentiable": True,
        "atomic": True,
        "category": 0,
        "r_hessian": False,
        "magnetic": False,
        "intensive": False,
    }
    return {
        "type_map": list(model.type_map),
        "rcut": layout.rcut,
        "sel": sel,
        "nnei": sum(sel),
        "mixed_types": not layout.by_type,
        "pair_exclude_types": sorted([list(pair) for pair in layout.excluded_pairs]),
        "dim_fparam": fitting.numb_fparam,
        "dim_aparam": fitting.numb_aparam,
        "has_default_fparam": default is not None,
        "default_fparam": default,
        "fitting_output_defs": [energy],
        "output_keys": [
            "energy",
            "mask",
            "energy_redu",
            "energy_derv_r",
            "energy_derv_c",
            "energy_derv_c_redu",
        ],
        "has_message_passing": model.descriptor.passes_messages,
        # where messages are passed, a virial of pairs is not what DeePMD-kit calls that of an atom
        "do_atomic_virial": not model.descriptor.passes_messages,
        "lower_input_kind": "nlist",
        "graph_edge_dtype": "float64",
        "has_comm_artifact": False,
        "sel_type": [],
        "is_spin": False,
        "dim_chg_spin": 0,
        "has_chg_spin_ebd": False,
        "has_default_chg_spin": False,
        "default_chg_spin": None,
        "chg_spin_table_ranges": None,
    }


def _exported(
    model: EnergyModel, config: ModelConfig, device: torch.device
) -> torch.export.ExportedProgram:
    """Return the graph of a model for frames of any number and size.

    It is traced twice: ``torch.export`` cannot look into ``torch.func.vjp``, and ``make_fx`` writes
    it out.
    """
    from torch.export import Dim
    from torch.export.passes import move_to_device_pass
    from torch.fx.experimental.proxy_tensor import make_fx

    copy = deepcopy(model).cpu().eval().requires_grad_(False)
    copy.evaluate_all_blocks()  # a graph is for all elements
    seal(copy)
    samples = _samples(copy, config)
    frames = Dim("frames", min=1)
    atoms = Dim("atoms", min=1)
    on_images = {0: frames, 1: Dim("extended", min=1)}
    on_slots = {0: frames, 1: atoms, 2: Dim("slots", min=1)}
    shapes = [on_images, on_images, on_slots, on_images]
    if config.fitting_net.numb_fparam:
        shapes.append({0: frames})
    if config.fitting_net.numb_aparam:
        shapes.append({0: frames, 1: atoms})
    function = _with_conditions(copy, config)
    trace = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    traced = trace(*samples)
    exported = torch.export.export(
        traced,
        samples,
        dynamic_shapes=tuple(shapes),
        strict=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    return exported if device.type == "cpu" else move_to_device_pass(exported, device)


def _with_conditions(
    model: EnergyModel, config: ModelConfig
) -> Callable[..., dict[str, Tensor]]:
    """Return the function of the positional tensors of a model, with the parameters it takes."""
    extended, has_frame = ExtendedModel(model), config.fitting_net.numb_fparam > 0

    def run(
        coord: Tensor,
        atype: Tensor,
        nlist: Tensor,
        mapping: Tensor,
        *conditions: Tensor,
    ) -> dict[str, Tensor]:
        fparam = conditions[0] if has_frame else None
        aparam = conditions[-1] if len(conditions) > has_frame else None
        out: dict[str, Tensor] = extended(coord, atype, nlist, mapping, fparam, aparam)
        return out

    return run


@contextmanager
def _clock() -> Iterator[tqdm]:
    """Yield a line with a description and the time since now.

    A terminal shows it until the end of the block.
    """
    with tqdm(
        bar_format="{desc}  {elapsed}", delay=1, disable=None, leave=False
    ) as line:
        is_done = Event()

        def draw() -> None:
            while not is_done.wait(1):
                line.refresh()

        thread = Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield line
        finally:
            is_done.set()
            thread.join()
            line.clear()


def _samples(model: EnergyModel, config: ModelConfig) -> tuple[Tensor, ...]:
    """Return arguments whose sizes differ from each other and from those of the model.

    Equal ones would become one size.
    """
    fitting = config.fitting_net
    taken = {size for tensor in model.state_dict().values() for size in tensor.shape}
    taken |= {
        1,
        2,
        3,
        9,
        len(model.type_map),
        fitting.numb_fparam,
        fitting.numb_aparam,
        *model.layout.sel,
    }
    taken |= {sum(model.layout.sel), *(most for _, most in model.layout.inner)}
    sizes = (n for n in count(5) if n not in taken)
    frames = next(sizes)
    atoms = next(sizes)
    extended = next(sizes)
    slots = next(sizes)
    coord = torch.zeros(frames, extended, 3, dtype=torch.float64)
    atype = torch.zeros(frames, extended, dtype=torch.int64)
    nlist = torch.zeros(frames, atoms, slots, dtype=torch.int64)
    conditions = []
    if fitting.numb_fparam:
        conditions.append(torch.zeros(frames, fitting.numb_fparam, dtype=torch.float64))
    if fitting.numb_aparam:
        conditions.append(
            torch.zeros(frames, atoms, fitting.numb_aparam, dtype=torch.float64)
        )
    return coord, atype, nlist, torch.zeros_like(atype), *conditions


@contextmanager
def _failures_as_messages(path: Path, config: ModelConfig) -> Iterator[None]:
    """Turn errors of compilation, which have no type, into messages with the place in the code."""
    try:
        yield
    except (
        RuntimeError,
        AssertionError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
    ) as error:
        text = f"{type(error).__name__}: {error}"
        if "CppCompileError" in text:
            output = text.partition("Output:")[2].strip() or text
            raise UserError(
                f"{path}: the C++ compiler failed ({output.splitlines()[0][:200]}). "
                f"{_OTHER_COMPILER} --debug shows all of its output."
            ) from error
        # an error of a graph has the traced lines in its text
        lines = re.findall(
            r'deepmd_ema/(model/\S+)", line (\d+)', "".join(format_exception(error))
        )
        places = [f"{file} line {number}" for file, number in lines]
        where = ", ".join(
            [config.descriptor.type, *places[-1:], *re.findall(r"aten\.\w+", text)[:1]]
        )
        raise NotCompiledError(
            f"{path}: torch {torch.__version__} cannot compile this model ({where}). Write a .dp "
            f"file instead, and please report this: {text.splitlines()[0][:150]}"
        ) from error
