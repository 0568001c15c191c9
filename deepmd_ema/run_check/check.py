"""Everything that is known about a run before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deepmd_ema.allocator import peak_memory
from deepmd_ema.config import RunConfig, TaskConfig, config_warnings, ignored_options
from deepmd_ema.data.check.report import NEAR_COPIES, SHARED, DataReport
from deepmd_ema.data.collate import MAX_ATOMS_TOGETHER, MAX_CACHE_BYTES
from deepmd_ema.data.loader import MAX_ATOMS
from deepmd_ema.data.run import (
    UNKNOWN_LENGTH,
    RunLength,
    TaskData,
    check_task,
    choose_validation,
    most_slots,
    open_run,
    run_length,
    split_off,
    with_neighbors,
)
from deepmd_ema.data.split import Split, find_near_copies
from deepmd_ema.errors import ConfigError, DataError, UserError
from deepmd_ema.model.build import build_models
from deepmd_ema.optim.groups import describe_groups
from deepmd_ema.run_check.memory import TensorBytes, tensor_bytes
from deepmd_ema.training.estimate import Cost, measure_steps

_PAIR, _ATOM = 6, 60  # bytes of a neighbor and of an atom in the cache
# parts of `numbers_per_pair` that are held at once; measured with water: dpa3 0.8, se_e2_a 0.4 and 0.3
_OF_STEP, _OF_VALIDATION = 0.8, 0.3


class Memory(NamedTuple):
    """Parts of the estimated memory of a run on a CPU, bytes.

    Attributes:
        program: Python, torch and the check of the data.
        tensors: weights, gradients, moments and averages, and their copies in a checkpoint.
        neighbors: lists of neighbors that are kept.
        batch: the largest batch.
    """

    program: int
    tensors: int
    neighbors: int
    batch: int


@dataclass
class RunCheck:
    """Facts about a run before it starts; parts are filled in as they become known.

    Attributes:
        config: of the run; with numbers of neighbors once the data are read.
        seed_is_drawn: whether the input gives no seed.
        splits: validation frames that are split off, by task.
        reports: of the data, by task.
        problems: of the data.
        length: of the run; empty while it is not known.
        groups: of parameters with learning rates of their own, a line each.
        sizes: of tensors.
        memory: estimated.
        cost: measured; None unless it was requested.
    """

    config: RunConfig
    seed_is_drawn: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict)
    reports: dict[str, DataReport] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    length: RunLength = UNKNOWN_LENGTH
    groups: list[str] = field(default_factory=list)
    sizes: TensorBytes | None = None
    memory: Memory | None = None
    cost: Cost | None = None

    def read_data(self) -> None:
        """Read and check the data; problems are kept, those that leave no data to check are raised.

        Raises:
            DataError: if data cannot be opened or split.
        """
        seed = self.config.training.seed
        self.seed_is_drawn = seed is None
        data = open_run(self.config)
        self.splits = choose_validation(self.config, data, seed or 0)
        data = split_off(self.config, data, self.splits)
        self.reports = {name: check_task(task, data[name]) for name, task in self.config.tasks.items()}
        for name, of_task in data.items():
            if of_task.valid and name not in self.splits and not self.reports[name].problems:
                self._find_near_copies(name, of_task)
        self.problems = [problem for report in self.reports.values() for problem in report.problems]
        if not self.problems:
            self._plan(data)

    def _find_near_copies(self, task: str, data: TaskData) -> None:
        """Find validation frames that are near copies of training frames; a split has none."""
        report = self.reports[task]
        found = find_near_copies(*data, len(report.type_map))
        report.suspects = {**report.suspects, NEAR_COPIES: found}
        if found.num_frames > report.suspects[SHARED].num_frames:
            report.warnings.append(f"task {task}: " * bool(task) + found.warning)

    def _plan(self, data: Mapping[str, TaskData]) -> None:
        """Set the length of the run and its memory."""
        try:
            self.length = run_length(self.config, data)
        except UserError as error:
            self.problems = list(error.problems)
            return
        neighbors = {name: of.neighbors for name, of in self.reports.items() if of.neighbors is not None}
        self.config = with_neighbors(self.config, neighbors)
        if groups := self.config.optimizer.groups:
            models = build_models({name: of.model for name, of in self.config.tasks.items()}, self.config.links)
            try:
                self.groups = describe_groups(
                    groups, models.first_names(), dict(models.named_parameters()), self.config.source
                )
            except ConfigError as error:
                self.problems = list(error.problems)
                return
        self.sizes = sizes = tensor_bytes(self.config)
        averages = len(self.config.training.averaging) * sizes.average
        held = sizes.weights + sizes.optimizer + averages
        tasks = self.config.tasks.items()
        kept = sum(_cached_bytes(task, self.reports[name], data[name]) for name, task in tasks)
        batch = max(self._batch_bytes(name, task) for name, task in tasks)
        self.memory = Memory(peak_memory(), 2 * held + sizes.gradients, min(kept, MAX_CACHE_BYTES), batch)

    def _batch_bytes(self, name: str, task: TaskConfig) -> int:
        """Return the memory of the largest batch of training or validation."""
        report, size = self.reports[name], 8 if "float64" in task.model.precisions else 4
        validated = sum(int(scan.type_counts.sum()) for scan in report.validation)
        if not self.config.fully_validated:
            validated = 0
        atoms = max(_OF_STEP * self.length.tasks[name].max_atoms, _OF_VALIDATION * min(MAX_ATOMS, validated))
        return int(size * atoms * most_slots(task, report) * task.model.descriptor.numbers_per_pair)

    def measure(self, device: str | None) -> None:
        """Measure some steps."""
        if self.config.training.numb_steps != 0:
            self.cost = measure_steps(self.config, device)

    def raise_problems(self) -> None:
        """Raise the problems of the data.

        Raises:
            DataError: with all of them.
        """
        if self.problems:
            raise DataError(self.problems)

    @property
    def unused(self) -> list[str]:
        """Options without effect."""
        return ignored_options(self.config)

    @property
    def warnings(self) -> list[str]:
        """Everything that the user should look at."""
        of_splits = [
            f"task {name}: {text}" if name else text for name, split in self.splits.items() for text in split.warnings
        ]
        of_data = [text for report in self.reports.values() for text in report.warnings]
        of_batches = [text for of in self.length.tasks.values() for text in of.warnings]
        of_config = config_warnings(self.config, self.length.num_steps or None, self.length.steps_per or None)
        return [*of_config, *of_batches, *of_splits, *of_data]


def _cached_bytes(task: TaskConfig, report: DataReport, data: TaskData) -> int:
    """Return the memory of the neighbor lists of all frames; most atoms have fewer neighbors than the most."""
    if report.neighbors is None:
        return 0
    total = 0
    for scan, source in zip([*report.training, *report.validation], [*data.train, *data.valid]):
        sizes = source.frame_sizes
        if scan.open_frames == source.num_frames and sizes.max(initial=0) <= MAX_ATOMS_TOGETHER:
            continue
        total += int(sizes.sum()) * (report.neighbors.max_total * _PAIR + _ATOM)
    return total
