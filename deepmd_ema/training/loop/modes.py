"""Modes of evaluation that config and device decide: compiled code, CUDA graphs, batches that are filled up."""

from __future__ import annotations

from functools import partial

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.config import RunConfig
from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.optim import LKFConfig, SOAPConfig
from deepmd_ema.data.loader import Pad
from deepmd_ema.dist.world import World
from deepmd_ema.model.compiler import CompileOptions
from deepmd_ema.model.dummy_atoms import pad, to_eighth


def compiled_modes(config: RunConfig) -> tuple[bool, bool]:
    """Return whether training, and whether validation, runs compiled code."""
    in_training, infer = config.training.enable_compile, config.validating.compiled_infer
    return in_training, (in_training if infer is None else infer) and config.has_validation_data


def why_no_graphs(config: RunConfig, world: World) -> str:
    """Return the reason why steps are not launched as CUDA graphs; empty if they are."""
    if world.device.type != "cuda":
        return "there are none on a CPU"
    if isinstance(config.optimizer, LKFConfig):
        return "LKF draws numbers on the host in each step"
    if isinstance(config.optimizer, SOAPConfig):
        return "SOAP changes its bases in some steps only"
    if world.size > 1:
        return "ranks exchange gradients in a step"
    if config.training.accumulate > 1:
        return "a step of several batches (training.accumulate) would be a graph for each combination of their shapes"
    if config.training.enable_compile and config.training.compile_options.makes_cuda_graphs:
        return "compile_options makes CUDA graphs of its own"
    return ""


def launches_graphs(config: RunConfig, world: World) -> bool:
    """Whether steps are launched as CUDA graphs."""
    return config.training.cuda_graphs and not why_no_graphs(config, world)


def pads(config: RunConfig, world: World, layout: NeighborLayout) -> tuple[Pad | None, Pad | None]:
    """Return the functions that fill up batches of training and displayed ones of validation; None: they stay."""
    in_training, in_validation = compiled_modes(config)
    compiled = CompileOptions(**plain(config.training.compile_options)).pad(layout)
    few_shapes = partial(pad, layout=layout, up=to_eighth)
    of_training = few_shapes if launches_graphs(config, world) else compiled if in_training else None
    return of_training, compiled if in_validation else None
