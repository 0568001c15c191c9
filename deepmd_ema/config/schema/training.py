"""The sections ``training`` and ``validating``."""

from __future__ import annotations

from typing import ClassVar

from deepmd_ema.config.fields import (
    Check,
    WithoutEffect,
    file_name,
    not_negative,
    not_negative_int,
    option,
    positive,
    positive_int,
    section,
)
from deepmd_ema.config.schema.averaging import (
    AVERAGES,
    EmaShorthand,
    EmaValidationShorthand,
)
from deepmd_ema.config.schema.loggers import LOGGERS, Logger
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.config.schema.text_options import (
    BatchSizeRule,
    Metric,
    SystemProbability,
)
from deepmd_ema.config.unsupported import REMOVED_METRICS

# angstrom, longer than any bond: a larger value would leave out every frame
_MAX_PAIR_DISTANCE = 5.0
# modes of torch.compile that make CUDA graphs
MODES_OF_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def _is_probs(value: list[float]) -> bool:
    # negative ones share the rest, which may be 0; without any the others must add up to 1
    positive = [p for p in value if p >= 0]
    return (
        len(value) > 0
        and sum(positive) <= 1 + 1e-8
        and (len(positive) < len(value) or sum(positive) > 1 - 1e-8)
    )


def _is_pattern(value: str) -> bool:
    # Path.rglob takes no absolute pattern, and ** as a whole part of the path only
    parts = value.split("/")
    return (
        bool(value.strip("./ "))
        and parts[0] != ""
        and all(part == "**" or "**" not in part for part in parts)
    )


@section
class TestDataConfig:
    """Frames that nothing in a run depends on."""

    systems: list[str] = option(
        check=Check(
            lambda v: len(v) > 0 and (isinstance(v, str) or all(s.strip() for s in v)),
            "a folder or a list of folders",
        ),
        also=(str,),
        convert=lambda v: [v] if isinstance(v, str) else v,
        doc="Folders of systems (`deepmd/npy` or mixed), folders to search for them, HDF5 files "
        "`file.h5` and `file.h5#/group`, extended XYZ `train.extxyz` and "
        "`train.extxyz#energy=REF_energy,force=REF_forces`, or LMDB `data.lmdb`. Paths are "
        "relative to the working directory.",
    )
    rglob_patterns: list[str] | None = option(
        None,
        "Patterns that folders of systems must match when parent folders are searched.",
        Check(
            lambda v: all(map(_is_pattern, v)),
            'patterns of paths below the folders of systems, e.g. ["water*", "*/bulk"], none of '
            "them beginning with /",
        ),
    )


@section
class _Data(TestDataConfig):
    """Options of training and of validation data."""

    batch_size: int | list[int] | BatchSizeRule = option(
        BatchSizeRule("auto"),
        "Frames of a batch: a number; one number per system; `auto:N`: as few frames as have N "
        "atoms (`auto` is `auto:32`); `max:N`: as many frames as have at most N atoms; "
        "`filter:N`: the same, and systems of more than N atoms are left out; `mixed:N`: N frames "
        "of any systems; `mix:N`: as many as have at most N atoms.",
        Check(BatchSizeRule.is_readable, BatchSizeRule.wants),
        convert=lambda v: BatchSizeRule(v) if isinstance(v, str) else v,
        unit="frames",
    )
    auto_prob: SystemProbability = option(
        SystemProbability("prob_sys_size"),
        "Probability with which a system is drawn: `prob_uniform`: the same for all; "
        "`prob_sys_size`: by its number of batches; `prob_sys_size;0:2:0.7;2:5:0.3`: blocks of "
        "systems with weights, by size within a block.",
        Check(SystemProbability.is_readable, SystemProbability.wants),
        alias=("auto_prob_style",),
        convert=SystemProbability,
    )
    sys_probs: list[float] | None = option(
        None,
        "Probability of each system, instead of `auto_prob`; negative: a share of the rest by "
        "number of batches.",
        Check(
            _is_probs,
            "probabilities that add up to 1; negative ones share what the others leave",
        ),
        alias=("sys_weights",),
    )


@section
class TrainingDataConfig(_Data):
    """The training frames, and how they are drawn."""

    min_pair_dist: float = option(
        0.0,
        "Frames with two atoms closer than this are left out of training. 0 leaves none out; "
        "atoms closer than 0.3 angstrom are then an error.",
        Check(
            lambda v: 0 <= v <= _MAX_PAIR_DISTANCE,
            f"a number >= 0 and <= {_MAX_PAIR_DISTANCE:g}",
        ),
        unit="angstrom",
    )
    frame_weights: bool = option(
        False,
        "Whether weights of frames that the data have multiply their terms of the loss: `weight` "
        "all of them, `energy_weight`, `force_weight` and `virial_weight` one. Only in dp-ema.",
    )


@section
class ValidationDataConfig(_Data):
    """The validation frames."""

    numb_btch: int = option(
        1,
        "Batches of each validation that is displayed.",
        positive_int,
        alias=("numb_batch",),
    )


@section
class TaskDataConfig:
    """The data of a task."""

    training_data: TrainingDataConfig = option(doc="Data to train on.")
    validation_data: ValidationDataConfig | None = option(None, "Data to validate on.")
    validation_fraction: float | None = option(
        None,
        "Fraction of the frames of `training_data` that is split off to validate on, instead of "
        "`validation_data`: of every kind of calculation, near copies together, by "
        "`training.seed`. Only in dp-ema.",
        Check(lambda v: 0 < v < 0.5, "a number > 0 and < 0.5"),
    )
    stat_file: str | None = option(
        None,
        "Cache of the statistics: an HDF5 file (`.h5`, `.hdf5`), otherwise a folder.",
        file_name,
    )
    stat_file_mode: str = option(
        "update",
        "`read` only reads `stat_file`, which must be complete.",
        choices=("update", "read"),
    )


@section
class CompileConfig:
    """Options of `torch.compile`."""

    backend: str = option(
        "inductor",
        "Which compiler of torch makes the code.",
        choices=("inductor", "aot_eager", "cudagraphs"),
    )
    mode: str = option(
        "default",
        "What inductor tries: `reduce-overhead` runs CUDA graphs, `max-autotune` compares "
        "kernels, slowly.",
        choices=(
            "default",
            "reduce-overhead",
            "max-autotune",
            "max-autotune-no-cudagraphs",
        ),
    )
    dynamic: bool = option(
        True,
        "Whether one graph serves all numbers of atoms, neighbors and frames. `false` makes one "
        "for each size, rounded up to 2, 3, 4, 6, 8, 12, ...: for CUDA graphs, and for data of "
        "few sizes.",
    )
    cache_dir: str | None = option(
        None,
        "Folder where code is kept for later runs; null: that of torch.",
        file_name,
    )

    @property
    def makes_cuda_graphs(self) -> bool:
        """Whether the code runs as CUDA graphs on a GPU."""
        return self.backend == "cudagraphs" or self.mode in MODES_OF_CUDA_GRAPHS


@section
class TrainingOptions:
    """Length of a run, and what it writes."""

    shorthand = EmaShorthand
    without_effect: ClassVar[WithoutEffect] = {
        "time_training": (True, "times are always shown"),
        "mixed_precision": (
            None,
            "the precision is that of descriptor and fitting_net",
        ),
    }

    numb_steps: int | None = option(
        None,
        "Number of optimizer steps, perhaps 0. Exactly one of `numb_steps` and `numb_epoch` is "
        "given.",
        not_negative_int,
        alias=("stop_batch", "num_step", "num_steps", "numb_step"),
        unit="steps",
    )
    numb_epoch: float | None = option(
        None,
        "Number of passes over the training data, instead of `numb_steps`; may be a fraction.",
        positive,
        alias=("num_epoch", "num_epochs", "numb_epochs"),
        unit="epochs",
    )
    seed: int | None = option(
        None,
        "Seed of every random stream (initial parameters, order of frames); null draws one for "
        "each run.",
        not_negative_int,
    )
    disp_file: str = option("lcurve.out", "File of the learning curve.", file_name)
    disp_freq: int = option(
        1000, "Steps between two lines of `disp_file`.", positive_int, unit="steps"
    )
    save_freq: int = option(
        1000,
        "Steps between two checkpoints; 0 or less writes only the last one.",
        unit="steps",
    )
    save_ckpt: str = option(
        "model.ckpt", "Prefix of checkpoint files; may have a folder.", file_name
    )
    save_dir: str | None = option(
        None,
        "Folder of the numbered checkpoints; null: that of `save_ckpt`, where the link to the "
        "newest is.",
    )
    max_ckpt_keep: int = option(5, "Checkpoints kept; less than 1 keeps all.")
    ckpt_keep_ratio: float | None = option(
        None,
        "Fraction of all checkpoints of the run that is kept, instead of `max_ckpt_keep` and "
        "`ema_ckpt_keep`.",
        Check(lambda v: 0 < v < 1, "a number > 0 and < 1"),
    )
    checkpoint_format: str = option(
        "gathered",
        "How checkpoints, averages, snapshots and best weights are written: `gathered`: each is a "
        "file that rank 0 writes; `sharded`: each is a folder to which every rank writes its own "
        "part, so that no rank needs memory for the whole. Commands read both, and a run restarts "
        "from either. Only in dp-ema.",
        choices=("gathered", "sharded"),
    )
    averaging: list[Profile] = option(
        [],
        "Averages of the weights that are tracked at once, each with a `name`. `enable_ema` adds "
        "one named `ema`, the first of the list. Only in dp-ema.",
        registry=AVERAGES,
        default_type="ema",
    )
    change_bias_after_training: bool = option(
        False,
        "Whether the energy bias of each element is fitted to the training data once more after "
        "the last step, for the live weights and for each average with its own weights.",
    )
    disp_training: bool = option(True, "Whether lines are written to `disp_file`.")
    disp_avg: bool = option(
        False,
        "Whether training errors of a line are averaged over its interval instead of those of one "
        "batch.",
    )
    tensorboard: bool = option(
        False, "Whether to write files for TensorBoard (extra `tensorboard`)."
    )
    tensorboard_log_dir: str = option(
        "log", "Folder of the TensorBoard files.", file_name
    )
    tensorboard_freq: int = option(
        1, "Steps between two TensorBoard points.", positive_int, unit="steps"
    )
    loggers: list[Logger] = option(
        [],
        "What else records the errors: TensorBoard, Weights & Biases (extra `wandb`), MLflow "
        "(extra `mlflow`). A restart continues their runs. Only in dp-ema.",
        registry=LOGGERS,
    )
    gradient_max_norm: float = option(
        0.0,
        "Gradients with a larger norm are scaled down to it; 0: no clipping.",
        not_negative,
    )
    accumulate: int = option(
        1,
        "Batches of a step, which are evaluated one after the other: the gradient is that of one "
        "batch with all their frames, in the memory of one of them. All options in steps count "
        "these steps. Only in dp-ema.",
        positive_int,
        unit="batches",
    )
    enable_compile: bool = option(
        False,
        "Whether models are compiled with `torch.compile`, all tasks of one structure in one "
        "graph. It takes minutes at the first start.",
        removed={
            "auto": (
                "Use true for long runs, on GPUs mostly: the first start takes minutes; or false."
            )
        },
    )
    compile_options: CompileConfig = option(
        CompileConfig(), "How models are compiled. Only in dp-ema."
    )
    enable_tf32: bool = option(
        False,
        "Whether training steps multiply float32 matrices in TF32 on a GPU, with 10 bits of each "
        "factor behind the binary point instead of 23. Validation and files are not affected.",
    )
    cuda_graphs: bool | None = option(
        None,
        "Whether a step on a GPU is launched as one CUDA graph, captured at the third use of a "
        "shape; batches are then filled up to few shapes. null: where it can be and nothing is "
        "compiled. Only in dp-ema.",
    )
    zero_stage: int = option(
        0,
        "What is sharded over the ranks: 0: nothing; 1: the optimizer state; 2: also gradients; "
        "3: also parameters. It changes memory, not results. A process that no launcher has "
        "started trains with 0.",
        Check(lambda v: v in (0, 1, 2, 3), "0, 1, 2 or 3"),
    )

    @property
    def writes_shards(self) -> bool:
        """Whether every process writes its own part of a checkpoint."""
        return self.checkpoint_format == "sharded"


@section
class TrainingConfig(TrainingOptions, TaskDataConfig):
    """Length and data of the run, and what it writes."""


@section
class TasksData:
    """The data of several tasks, and how often each task is trained."""

    data_dict: dict[str, TaskDataConfig] = option(doc="Data of each task, by its name.")
    model_prob: dict[str, float] = option(
        {},
        "Probability of each task to be the one that a step trains; empty: by the number of its "
        "training systems.",
        Check(
            lambda v: not v or (min(v.values()) >= 0 and sum(v.values()) > 0),
            'numbers >= 0, not all 0, by task, e.g. {"water": 0.7, "ice": 0.3}',
        ),
    )
    num_epoch_dict: dict[str, float] = option(
        {},
        "Passes over the training data of each task, from which `numb_steps` and `model_prob` "
        "then follow.",
        Check(
            lambda v: not v or min(v.values()) > 0,
            'numbers > 0 by task, e.g. {"water": 20, "ice": 50}',
        ),
        unit="epochs",
    )


@section
class MultiTaskTrainingConfig(TrainingOptions, TasksData):
    """Length and data of a run of several tasks, and what it writes."""


@section
class EarlyStopConfig:
    """When a run ends before its last step, because errors of full validation no longer fall."""

    patience: int = option(
        check=positive_int,
        unit="full validations",
        doc="Full validations without improvement after which the run ends, as it does after the "
        "last step.",
    )
    metric: Metric | None = option(
        None,
        "The error that must fall; null: `validation_metric`.",
        Check(Metric.is_readable, Metric.wants),
        convert=Metric,
        removed=REMOVED_METRICS,
    )
    min_delta: float = option(
        0.0,
        "An error is an improvement if it is lower than at the last improvement by more than "
        "this, in eV/atom (E, V), eV/angstrom (F) or eV/angstrom^3 (S).",
        not_negative,
    )
    weights: str | None = option(
        None,
        "The weights whose errors count: `live`, or the name of an average with full validation; "
        "null: all of them, and an improvement of any one, in any task, is enough.",
    )


@section
class ValidatingConfig:
    """Full validation: errors over all validation data at regular steps; best weights are kept."""

    shorthand = EmaValidationShorthand

    full_validation: bool = option(
        False, "Whether the live weights are validated on all validation data."
    )
    validation_freq: int = option(
        5000,
        "Steps between two full validations; the last step of a run is validated in any case.",
        positive_int,
        unit="steps",
    )
    save_best: bool = option(
        True, "Whether the best weights are kept in `best.ckpt-*` (`best_ema.ckpt-*`)."
    )
    save_best_dir: str | None = option(
        None, "Folder of the best weights; null: the folder of `save_ckpt`."
    )
    max_best_ckpt: int = option(1, "Best weights kept.", positive_int)
    validation_metric: Metric = option(
        Metric("E:MAE"),
        "The error that ranks weights, such as E:MAE or F:RMSE; models of other quantities have "
        "their own.",
        Check(Metric.is_readable, Metric.wants),
        convert=Metric,
        unavailable="F[RM]:|f[rm]:",
        removed=REMOVED_METRICS,
    )
    early_stop: EarlyStopConfig | None = option(
        None, "When the run ends before its last step; null: never. Only in dp-ema."
    )
    full_val_file: str = option(
        "val.log",
        "File of full validation; averaged weights have `_ema` before the last dot.",
        file_name,
    )
    compiled_infer: bool | None = option(
        None, "Whether validation runs compiled code; null: as training does."
    )
    tf32_infer: bool = option(
        False,
        "Whether validation multiplies float32 matrices in TF32 on a GPU. `dp-ema test` has other "
        "errors then.",
    )
    amp_infer: bool = option(
        False,
        "Whether validation computes blocks of `dpa4` in bfloat16 on a GPU, as training does with "
        "`use_amp`. Its errors are then not those of `dp-ema test`.",
    )
    full_val_start: float = option(
        0.5,
        "First step of full validation; below 1 a fraction of the run; 1 is never.",
        not_negative,
    )
    test_data: TestDataConfig | None = option(
        None,
        "Data that are evaluated once, after the last step, with the live weights, averages that "
        "are validated (all if nothing is) and the best weights. Only in dp-ema.",
    )
    test_data_dict: dict[str, TestDataConfig] = option(
        {},
        "The same by task, in an input of several tasks; not each must have some. Only in dp-ema.",
    )
