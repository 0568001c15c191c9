"""Kernels and waits of training steps on a CUDA device, for every descriptor and optimizer.

``python tests/pretend_cuda tests/gpu_counts.py [NAME ...]`` prints them as a Markdown table.

The models are toy models with 2 elements and as many layers as usual: 3 of embedding, 3 and 1 of
fitting, 2 of attention, 3 of repformer and repflow, 2 blocks of dpa4. The number of kernels depends
on these, not on widths and numbers of atoms.
"""

import json
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from helpers import SPACING, tiny_input, write_system
from torch.utils._python_dispatch import TorchDispatchMode
from toy_models import TYPES, model_section

import deepmd_ema
from deepmd_ema.data.check.bonds import COVALENT_RADII
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

IS_PRETENDED = torch.version.cuda is None
FIRST_COUNTED, COUNTED = (
    5,
    2,
)  # steps: the first ones make the buffers of the optimizer and of the averages
PACKAGE = str(Path(deepmd_ema.__file__).parent)
NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
}
# a CUDA device adds in any order, so the last bits of the sums may change from run to run. Not
# `index_add`: it is the derivative of `index_select` over `reverse`, which has each place once
# (deepmd_ema/model/ops/gather.py)
ATOMIC_ADDITIONS = {
    "index_add_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "index_reduce",
    "embedding_dense_backward",
    "bincount",
    "histc",
    "put_",
}

ONE_SIDED = ("se_e2_a", {"type_one_side": True})
EMA = {"training__enable_ema": True}
HOST = {
    "training__averaging": [
        {"type": "ema", "name": "ema", "decay": 0.9, "device": "cpu"}
    ]
}
TWO = {
    "training__averaging": [
        {"type": "ema", "name": "ema", "decay": 0.9},
        {"type": "power", "name": "power", "sigma_rel": 0.1},
    ]
}
GROUPS = [{"pattern": "descriptor.*", "lr_scale": 0.1, "weight_decay": 0}]
# name: descriptor, changes of it, options of the input, upper bound of kernels, about 2 % above
# what is counted
STEPS = {
    "se_e2_a": (*ONE_SIDED, EMA, 538),
    "se_e2_a, two-sided": ("se_e2_a", {"type_one_side": False}, EMA, 743),
    "se_e2_a, two averages": (*ONE_SIDED, TWO, 543),
    "se_e2_a, average on the host": (*ONE_SIDED, HOST, 531),
    "se_e2_a, clipping": (*ONE_SIDED, EMA | {"training__gradient_max_norm": 1.0}, 543),
    "se_e2_a, AdaMuon": (*ONE_SIDED, EMA | {"optimizer": {"type": "AdaMuon"}}, 621),
    "se_e2_a, HybridMuon": (
        *ONE_SIDED,
        EMA | {"optimizer": {"type": "HybridMuon"}},
        686,
    ),
    "se_e2_a, groups of AdamW": (
        *ONE_SIDED,
        EMA | {"optimizer": {"type": "AdamW", "groups": GROUPS}},
        542,
    ),
    "se_e2_a, three batches a step": (
        *ONE_SIDED,
        EMA | {"training__accumulate": 3},
        1643,
    ),
    "se_e2_a, LKF": (*ONE_SIDED, EMA | {"optimizer": {"type": "LKF"}}, 2776),
    "se_e2_r": ("se_e2_r", {}, EMA, 553),
    "se_e3": ("se_e3", {}, EMA, 620),
    "se_atten, no attention": ("se_atten_no_attention", {}, EMA, 475),
    "se_atten, 2 layers": ("se_atten", {}, EMA, 962),
    "se_e3_tebd": ("se_e3_tebd", {}, EMA, 396),
    "dpa2": ("dpa2", {}, EMA, 2284),
    "dpa3": ("dpa3", {}, EMA, 1170),
    "dpa4": ("dpa4", {}, EMA, 3930),
    "dpa4c": ("dpa4c", {}, EMA, 963),
    "hybrid": ("hybrid", {}, EMA, 964),
    "se_e2_a with a table": ("table_by_type", {}, EMA, 848),
}


@dataclass
class StepCounts:
    """Counts of one training step.

    Attributes:
        operations: kernels by the operation of torch.
        parts: kernels by the package of ``deepmd_ema`` that called the operation; ``autograd``: by
            the backward pass.
        waits: waits of the host for the device, by the operation and the lines that called it.
    """

    operations: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def kernels(self):
        """Return the number of kernels."""
        return self.operations.total()

    @property
    def atomic(self):
        """Return the names of the operations whose sums have no fixed order."""
        return sorted(ATOMIC_ADDITIONS & self.operations.keys())

    def describe(self):
        """Return the counts by part and by operation, and the lines that waited."""
        lines = [
            f"{self.kernels} kernels, {self.waits.total()} waits",
            "by part: " + _listed(self.parts),
        ]
        lines += ["by operation: " + _listed(self.operations)]
        return "\n".join(
            [
                *lines,
                *(
                    f"wait {number}: {place}"
                    for place, number in self.waits.most_common()
                ),
            ]
        )


class KernelCounter(TorchDispatchMode):
    """Counts the operations below autograd that make no view: the least number of kernels that a
    GPU launches.
    """

    def __init__(self):
        super().__init__()
        self.counts = StepCounts()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write
            for r in schema.returns
        )
        name = schema.name.partition("::")[2]
        if not is_view and name not in NO_KERNEL:
            self.counts.operations[name] += 1
            self.counts.parts[_calling_package()] += 1
        return function(*args, **(kwargs or {}))


class CountedSteps(Callback):
    """Counts the steps of a run from ``FIRST_COUNTED`` on."""

    def __init__(self):
        self.counts = []

    @contextmanager
    def during(self, trainer, phase):
        if (
            phase != "step" or not 0 <= trainer.step + 1 - FIRST_COUNTED < COUNTED
        ):  # the last one saves, and waits
            yield
            return
        with counted_waits() as waits, KernelCounter() as counter:
            yield
        counter.counts.waits.update(waits)
        self.counts.append(counter.counts)


@contextmanager
def counted_waits():
    """Count waits by the operation and the lines that called it; on a GPU, where none can be
    counted, they raise.
    """
    waits = Counter()
    if not torch.cuda.is_available():
        yield waits
    elif IS_PRETENDED:
        import pretend_cuda

        with pretend_cuda.counted_waits() as seen:
            yield waits
        waits.update(
            {
                f"{operation}: {lines}": number
                for (operation, lines), number in seen.places.items()
            }
        )
    else:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def count_step(folder, name, device="cuda"):
    """Return the counts of one step of ``STEPS[name]``, which is trained in ``folder``.

    Raises:
        AssertionError: if the counts differ from step to step.
    """
    folder.mkdir(parents=True)
    (folder / "input.json").write_text(json.dumps(_input(folder, *STEPS[name][:-1])))
    steps = CountedSteps()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_training("input.json", device=device, callback=steps)
    first = steps.counts[0]
    for counts in steps.counts[1:]:
        assert counts.kernels == first.kernels, (
            f"{first.describe()}\n{counts.describe()}"
        )
    return first


def _input(folder, descriptor, changes, options):
    data = write_system(folder / "data", frames=8)
    num_steps = FIRST_COUNTED + COUNTED  # the last one saves
    rare = {"training__disp_freq": 1000, "training__save_freq": 1000}
    config = tiny_input([data], num_steps=num_steps, **rare, **options)
    if config.get("optimizer", {}).get("type") == "LKF":
        del config["loss"]
    config["model"] = model_section(
        descriptor, changes, {"neuron": [12, 12, 12], "resnet_dt": True}
    )
    config["model"]["type_map"] = TYPES[:2]
    _keep_two_elements(config["model"])
    return config


def _keep_two_elements(section):
    """Leave out what the sections of toy models have for the third element."""
    for key, value in section.items():
        if key == "sel" and isinstance(value, list):
            section[key] = [30, 30]
        if key == "use_srtab":  # r and the pairs 00, 01, 02, 11, 12, 22
            section[key] = [[row[k] for k in (0, 1, 2, 4)] for row in value]
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _keep_two_elements(part)


def _calling_package():
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return Path(path).relative_to(PACKAGE).parts[0].removesuffix(".py")
        frame = frame.f_back
    return "autograd"


def _listed(counts, most=None):
    return ", ".join(f"{name} {number}" for name, number in counts.most_common(most))


def main(names):
    """Print the table of the steps with these names, or of all."""
    COVALENT_RADII.update(
        {"O": SPACING / 2, "H": SPACING / 2}
    )  # as in tests: the atoms of toy data touch
    print(
        "| training step | kernels | by part | waits | most frequent operations |\n| --- | ---: | "
        "--- | ---: | --- |"
    )
    with tempfile.TemporaryDirectory() as work:
        for number, name in enumerate(names or STEPS):
            counts = count_step(Path(work) / str(number), name)
            waits = (
                "; ".join(f"{n}: {place}" for place, n in counts.waits.items()) or "0"
            )
            most = _listed(counts.operations, 8)
            most += f"; without a fixed order: {', '.join(counts.atomic)}" * bool(
                counts.atomic
            )
            print(
                f"| {name} | {counts.kernels} | {_listed(counts.parts)} | {waits} | {most} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
