"""A training run from its request to its last checkpoint, with the tables in its log."""

from __future__ import annotations

import logging
import math
import platform
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepmd_ema.config import (
    RunConfig,
    as_launched,
    config_summary,
    config_warnings,
    ignored_options,
    saved_config,
)
from deepmd_ema.config.labels import ATOM_PREF, ENERGY, LABELS, METRICS, WEIGHTED_FORCE
from deepmd_ema.config.outputs import RECORD
from deepmd_ema.config.schema.averaging import ScheduleFreeProfile
from deepmd_ema.data.run import checked_config
from deepmd_ema.data.source import describe_amount
from deepmd_ema.distributed.launch import Launch, find_launch
from deepmd_ema.distributed.world import World, open_world
from deepmd_ema.errors import DataError
from deepmd_ema.interop.pretrained import local_file
from deepmd_ema.model.metrics import Errors
from deepmd_ema.optim.build import describe_groups
from deepmd_ema.report.facts import describe_errors, metrics_of, show_metric
from deepmd_ema.report.log import set_up_logging
from deepmd_ema.report.loggers import loggers_of
from deepmd_ema.report.record import RunRecord, keeping_warnings
from deepmd_ema.report.table import duration, render_facts
from deepmd_ema.text import command, counted, every_steps
from deepmd_ema.training.outputs import check_outputs, lock_outputs, write_config
from deepmd_ema.training.prepare import Hook, prepare
from deepmd_ema.training.request import DEFAULT_INPUT, TrainRequest
from deepmd_ema.training.restart import (
    check_resumable,
    check_same_start,
    refuse_outside_outputs,
    warn_of_other_input,
)
from deepmd_ema.training.trainer import Callback, Trainer, restart_command
from deepmd_ema.training.weights import (
    Start,
    load_pretrained,
    load_restart,
    load_weights,
)
from deepmd_ema.utils import LIVE, __version__, peak_memory

__all__ = ["Callback", "TrainRequest", "TrainedRun", "run_training", "train"]

logger = logging.getLogger(__name__)


def run_training(
    request: TrainRequest | str | Mapping[str, Any] | None = None,
    *,
    should_update: Mapping[str, Hook] | None = None,
    callback: Callback | None = None,
    launch: Launch | None = None,
    **options: Any,
) -> TrainedRun:
    """Train from scratch, from the weights of a file, or on from a checkpoint.

    ``run_training("input.json", restart="model.ckpt.pt")`` is short for
    ``run_training(TrainRequest("input.json", restart="model.ckpt.pt"))``.

    Args:
        request: the request, its input file, or the values of one; None: see
            :attr:`TrainRequest.input_file`.
        should_update: by name of an average, a function of (step, epoch) that says whether the
            average is updated with the weights of that step; for rules that no option has. It must
            depend on nothing else, or a restart is not exact.
        callback: watches the run.
        launch: rank of this process and number of ranks; read from the environment if None.
        options: the other attributes of the request, if an input is given.

    Returns:
        The files of the run and its last errors.

    Raises:
        UserError: for every mistake in the input, the data or the files.
    """
    # Read the request. The time that the run may take begins here, data and start included.
    began = time.monotonic()
    if not isinstance(request, TrainRequest):
        request = TrainRequest(request, **options)
    elif options:
        raise TypeError(f"run_training: {', '.join(options)} belongs into the request")

    # Keep warnings for the record of the run, join the other processes, and hold locks until the
    # end, whatever it is.
    launch = find_launch() if launch is None else launch
    with (
        keeping_warnings() as warnings,
        open_world(request.device, launch) as world,
        ExitStack() as locks,
    ):
        # Replace names of published models by files: one process of each machine downloads them,
        # which may take long, and the others then find them in the cache.
        files: dict[str, Any] = {
            "finetune": request.finetune,
            "init_model": request.init_model,
        }
        files = {name: file for name, file in files.items() if file is not None}
        with world.all_ranks_ok(world.long_timeout_group):
            if world.local_rank == 0:
                files = {name: local_file(file) for name, file in files.items()}

        # Load the start file and the config on every rank, and compare them: ranks may have read
        # different files under one path.
        with world.all_ranks_ok():
            files = {name: local_file(file) for name, file in files.items()}
            request = replace(request, **files)
            start, config = load_start(request, launch, world)
        check_same_start(start, config, world)

        # Check and lock the files that are written, before the data are read, which may take long:
        # a second run in this folder ends here. A seed is drawn only now, by rank 0 for all.
        def take_outputs() -> int:
            loggers_of(config)  # raises where a package of a logger is missing
            check_outputs(config, request)
            locks.enter_context(lock_outputs(config))
            seed = config.training.seed
            return secrets.randbelow(2**31) if seed is None else seed

        seed = world.broadcast_from_rank0(take_outputs)
        config = replace(config, training=replace(config.training, seed=seed))

        # Warn of options without effect. The config of a checkpoint has every default: what has no
        # effect was listed when it was an input.
        unused = () if request.takes_saved_config else ignored_options(config)
        for line in (*config.notes, *unused):
            logger.warning("%s", line)
        starts_without_tuning = request.restart is None and request.finetune is None
        for name, task in config.tasks.items() if starts_without_tuning else ():
            head, place = task.model.finetune_head, task.place("model")
            if head and (name or request.init_model is None):
                also = " or --init-model" if not name else ""
                logger.warning(
                    '%s.finetune_head = "%s": no effect without --finetune%s',
                    place,
                    head,
                    also,
                )
            if task.model.finetune_bias == "keep":
                logger.warning(
                    '%s.finetune_bias = "keep": no effect without --finetune', place
                )

        # Open and check the data, and build the models with their first weights.
        try:
            prepared = prepare(config, start, world, request.skip_neighbor_stat)
        except DataError as error:
            if not request.takes_saved_config or "no such file" not in str(error):
                raise
            restart = command(
                "dp-ema", "train", "--restart", request.restart, DEFAULT_INPUT
            )
            advice = f"If the data have moved, give an input with their new paths: `{restart}`."
            raise DataError([*error.findings, advice]) from error

        # The first files, once all mistakes of input and data are excluded: files of an earlier
        # run are moved away, then the config and the record of the run are written.
        world.broadcast_from_rank0(
            partial(
                write_config, prepared.config, request.output, is_new=start.step == 0
            )
        )
        record_file = Path(RECORD) if world.is_main else None
        device = describe_device(world.device)
        record = RunRecord(
            record_file, warnings, device, world.size, began, continues=start.step > 0
        )
        with record.ending():
            # Build the parts of the run, then log the table of the start: some of its lines need
            # them.
            with world.all_ranks_ok():
                deadline = began + request.max_time
                file = request.file or request.output
                trainer = Trainer(
                    prepared,
                    start,
                    world,
                    should_update,
                    file,
                    callback,
                    record,
                    deadline,
                )
            remarks = config_warnings(
                prepared.config, trainer.num_steps, prepared.length.steps_per
            )
            logger.info("%s", "\n".join(start_table(trainer)))
            lengths = prepared.length.tasks.values()
            findings = [finding for length in lengths for finding in length.findings]
            for line in (*findings, *remarks):
                logger.warning("%s", line)

            # Train, and collect what is returned while the parts of the run exist.
            trainer.run()
            saver, reporter = trainer.saver, trainer.reporter
            trained = TrainedRun(
                checkpoint=saver.live.link,
                averages={name: series.link for name, series in saver.averages.items()},
                best={
                    best.row.name: best.file
                    for best in trainer.validator.best_weights()
                },
                errors={
                    name: _metrics(errors)
                    for name, errors in reporter.validated.items()
                },
                test={
                    name: _metrics(errors)
                    for name, (_, errors) in reporter.tested.items()
                },
                before={
                    task: _metrics(errors) for task, errors in reporter.before.items()
                },
                step=trainer.step,
                seconds=time.monotonic() - began,
            )
            table = end_table(trainer, trained, trainer.step - start.step)
            # sharded tensors and the writer refer to process groups, which are destroyed next
            del trainer, saver, reporter
        logger.info("%s", "\n".join(table))
        return trained


def train(
    request: TrainRequest | str | Mapping[str, Any] | None = None, **options: Any
) -> TrainedRun:
    """Train as the command line does, with its messages on stderr; for scripts and notebooks.

    ``train("input.json")``, ``train({"model": ...})`` or ``train(restart="model.ckpt.pt")``. The
    arguments are those of :func:`run_training`. Where the program has handlers of log messages,
    these get the messages.

    Raises:
        UserError: for every mistake in the input, the data or the files.
        Interrupted: after Ctrl-C, or when a notebook interrupts the cell, with the current step
            saved.
    """
    log = logging.getLogger("deepmd_ema")
    if not log.hasHandlers():
        set_up_logging()
    elif log.level == logging.NOTSET:
        # the level of the program, often WARNING, would hide the errors of each row
        log.setLevel(logging.INFO)
    return run_training(request, **options)


def load_start(
    request: TrainRequest, launch: Launch, world: World
) -> tuple[Start, RunConfig]:
    """Return the start of a run, and its checked config.

    What the input leaves open is as in the start file.
    """
    # the file to start from, none in a new run
    heads, start = request.heads(), Start()
    if request.restart is not None:
        start = load_restart(request.restart, (world.rank, world.size))
    elif request.finetune is not None:
        start = load_pretrained(request.finetune, heads)
    elif request.init_model is not None:
        start = load_weights(request.init_model, heads.get(""))

    # the config: of the checkpoint, of the input with the models of the file, or of the input; rank
    # 0 reports mistakes of the input together with those of the data
    if (
        request.takes_saved_config
    ):  # its notes are logged when it is compared with the checkpoint
        run = replace(saved_config(start.config, str(start.path), whole=True), notes=())
    elif request.use_pretrain_script:
        run = request.input.with_model(start.model_section).config
    else:
        run = checked_config(request.input) if world.is_main else request.input.config
    restart = request.restart if request.takes_saved_config else None
    config = start.adopt_from_checkpoint(
        as_launched(run, launch.launched, restart, world.size)
    )

    # a restart must continue the same run, and one without an input may write to its folder only
    if request.restart is not None:
        start = check_resumable(start, config, request.allow_config_change)
    if request.takes_saved_config:
        refuse_outside_outputs(start, config)
        warn_of_other_input(start, config)
    return start, config


SHARED = {
    0: "every rank holds everything",
    1: "moments are sharded over the ranks",
    2: "moments and gradients are sharded over the ranks",
    3: "moments, gradients and parameters are sharded over the ranks",
}


def start_table(trainer: Trainer) -> list[str]:
    """Return the summary of ``dp-ema check``, with facts of the parts of a run that are built."""
    prepared = trainer.prepared
    bank = trainer.bank
    num_steps = trainer.num_steps
    config = prepared.config
    stage = prepared.config.training.zero_stage
    world = trainer.world
    per_step = f"{prepared.length.frames_per_step:.6g} frames per step over all ranks"
    several = (
        f"{world.size}; zero_stage {stage}: {SHARED[stage]}; {per_step}; learning rate used as "
        "given"
    )
    pairs = [
        ("ranks", several if world.size > 1 or stage else ""),
        *config_summary(config, num_steps, prepared.length.steps_per),
    ]
    averages = [bank[name].profile for name in bank.names]

    # a line for each task: parameters, frames, and its share of the steps if there are several
    for name, task in prepared.tasks.items():
        trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in task.model.parameters()) - trained
        text = f"{name}: " if name else ""
        text += f"{trained:,} trained parameters"
        if frozen > 0:
            text += f" and {frozen:,} frozen"
        text += f", {describe_amount(task.train)}"
        if name:
            length = prepared.length.tasks[name]
            text += f", {100 * length.share:.3g} % of the steps = {length.epochs:.1f} epochs"
        pairs.append(("training", text))
    # averages with a Python hook, which the summary of the config does not know
    pairs += [
        ("average", f"{p.name}: updated when {p.settings()['should_update']} says so")
        for p in averages
        if p.should_update is not None
    ]
    if (batches := config.training.accumulate) > 1:
        where = " over all ranks" if world.size > 1 else ""
        frames_text = f"{prepared.length.frames_per_step:.6g} frames{where}"
        pairs.append(("step", f"{batches} batches, {frames_text}"))
    parameters = dict(prepared.models.named_parameters())
    lines = describe_groups(
        config.optimizer.groups, prepared.models.first_names(), parameters
    )
    pairs += [("group", line) for line in lines]
    logger.debug("embedding networks: %s", trainer.interpolation.describe())
    # the size of all snapshots on the disk: a copy has its trained parameters in float32, and all
    # other tensors as they are
    trained_names = {n for n, p in parameters.items() if p.requires_grad}
    state = prepared.models.state_dict()
    num_bytes = sum(
        t.numel() * (4 if name in trained_names else t.element_size())
        for name, t in state.items()
    )
    total = 0
    for average in averages:
        if (due := trainer.schedule.snapshots.get(average.name)) is not None:
            files = due.count(average.start_step)
            total += files * num_bytes
            size = f"{counted(files, 'file')} of {num_bytes / 1e6:.2f} MB"
            pairs.append(
                ("snapshots", f"{average.name} {every_steps(due.steps.step)}: {size}")
            )
    if total:
        text = "MB of disk in all, in float32; `dp-ema posthoc` finds the best length from them"
        pairs.append(("snapshots", f"{total / 1e6:,.2f} {text}"))
    # kinds (RMSE or MAE) and units of the errors in the rows of the log, by unit; the stress S is
    # not in the rows
    kinds = set[str]()
    letters_by_unit: dict[str, list[str]] = {}
    for task in prepared.tasks.values():
        if ENERGY in task.model.labels:
            kinds |= {
                name.partition("_")[0].upper() for name in task.loss.display_names
            }
        errors = [error for name in task.model.labels for error in LABELS[name].errors]
        if ATOM_PREF in task.config.labels:
            errors.append(WEIGHTED_FORCE)
        for error in errors:
            letters = letters_by_unit.setdefault(
                error.display_unit or "the unit of the labels", []
            )
            if error.metric not in ("", "S", *letters):
                letters.append(error.metric)
    units = ", ".join(
        f"{' and '.join(letters)} in {unit}"
        for unit, letters in letters_by_unit.items()
        if letters
    )
    text = f"{' or '.join(sorted(kinds)) or 'errors'} of batches, {units}"
    if config.fully_validated:
        text += "; full: RMSE of all validation frames, * lowest so far"
    pairs.append(("rows", text))
    program = f"dp-ema {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return render_facts(f"{program}, on {trainer.record.part.device}", pairs)


def describe_device(device: torch.device) -> str:
    """Return such as ``cuda:0 (NVIDIA H100)``, or ``cpu (2 threads)``."""
    threads = counted(torch.get_num_threads(), "thread")
    return f"{device} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else threads})"


@dataclass(frozen=True)
class TrainedRun:
    """The files of a run that has ended, and its last errors.

    Attributes:
        checkpoint: the newest live weights, from which a run can be restarted.
        averages: the newest weights of each average, by its name.
        best: the best weights by name of the weights, and of the task where there are several
            (``ema``, ``ice ema``).
        errors: of the last full validation by the same names; ``errors["ema"]["F:RMSE"]``, in eV
            and angstrom.
        test: of the test data, by the same names and those of the best weights (``best ema``).
        before: of the weights of a file that the run started with, by task; empty unless full
            validation is on.
        step: optimizer steps of the whole run.
        seconds: of this process, with data and validation.
    """

    checkpoint: Path
    averages: dict[str, Path]
    best: dict[str, Path]
    errors: dict[str, dict[str, float]]
    test: dict[str, dict[str, float]]
    before: dict[str, dict[str, float]]
    step: int
    seconds: float


def _metrics(errors: Errors) -> dict[str, float]:
    """Return the errors of the quantities that some frame has a label of."""
    values = {str(metric): errors.metric(metric) for metric in metrics_of(METRICS)}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def end_table(trainer: Trainer, trained: TrainedRun, steps: int) -> list[str]:
    """Return the files of a run that has ended, its last errors, and what to do next.

    Args:
        trainer: that has taken its last step.
        trained: files and errors.
        steps: that this process has taken.
    """
    config, averages = trainer.prepared.config, trained.averages
    heads = [name for name in config.tasks if name]

    # why the run has ended before its last step; a pair without a text is left out
    why = ""
    if trainer.is_out_of_time:
        why = (
            f"after step {trainer.step:,} of {trainer.num_steps:,}, as the time is over; "
            "everything is saved"
        )
    elif trainer.record.early_end:
        why = f"early, after step {trainer.step:,}: {trainer.record.early_end}"
    pairs = [("stopped", why), ("heads", ", ".join(heads))]

    # files: averages, and the best weights by row of the validation
    pairs += [("averaged", f"{link} ({name})") for name, link in averages.items()]
    for best in trainer.validator.best_weights():
        row = best.row
        shown = f"{row.name}, {row.metric} = {show_metric(row.metric, best.error)}"
        pairs.append(("best", f"{best.file} ({shown})"))

    # last errors, beside those of the loaded weights, from which averages start, too
    when = f"step {trainer.reporter.validated_step:,}"
    if config.training.change_bias_after_training:
        when += " before the bias was fitted again"
    before = trainer.reporter.before
    since = "before -> " if before else ""
    pairs += [
        (
            "errors",
            f"{name}, {since}{when}, MAE / RMSE: "
            f"{describe_errors(errors, before.get(name.rpartition(' ')[0]))}",
        )
        for name, errors in trainer.reporter.validated.items()
    ]
    for name, (step, errors) in trainer.reporter.tested.items():
        pairs.append(
            ("test", f"{name}, step {step:,}, MAE / RMSE: {describe_errors(errors)}")
        )

    # time and memory
    compiler = trainer.validator.models.compiler
    if compiler is not None:
        share = f"{100 * compiler.seconds / trained.seconds:.0f} % of the time"
        pairs.append(("compiled", f"{compiler.describe()}, {share}"))
    writer = trainer.saver.writer
    logger.debug(
        "files of %s written in %s beside training, which waited %s for them (%s) and %.1f %% of "
        "the time for data",
        counted(writer.steps, "step"),
        duration(writer.written_s),
        duration(writer.waited_s),
        counted(writer.waits, "time"),
        100 * trainer.times.waiting_share(),
    )
    device = trainer.world.device
    parts = [
        f"{duration(trained.seconds)} for {counted(steps, 'step')}, validation included"
    ]
    if peak_memory() > 0:  # 0 where the system does not say
        parts.append(f"{peak_memory() / 1e9:.2g} GB at most")
    if device.type == "cuda":
        parts.append(
            f"{torch.cuda.max_memory_reserved(device) / 1e9:.2g} GB of the GPU"
        )
    pairs.append(("time", ", ".join(parts)))

    # Commands: to continue, and for the model of the run, that of an average if there is one; the
    # averaged point of a schedule-free optimizer is the model that it trains. The best file comes
    # before later weights: errors rise again where few frames are learned by heart.
    pairs.append(
        ("continue", restart_command(trainer) if trainer.is_out_of_time else "")
    )
    trained_points = [
        a.name for a in config.training.averaging if isinstance(a, ScheduleFreeProfile)
    ]
    weights = [*trained_points, *averages, LIVE][0]
    model = averages.get(weights, trained.checkpoint)
    # best files have the bias from before it was fitted again
    if not config.training.change_bias_after_training:
        for best in trainer.validator.best_weights():
            if best.row.key == (weights, "") and best.step < trainer.step:
                model = best.file
    validated = [
        name
        for name, task in config.tasks.items()
        if task.data.validation_data is not None
    ]
    if validated:
        head = ["--head", validated[0]] if heads else []
        data = ["--valid-data", trainer.input_file]
        pairs.append(
            ("next", command("dp-ema", "test", "-m", model, *head, *data, "--plot"))
        )
    report = "dp-ema report"
    if any(task.data.validation_fraction is not None for task in config.tasks.values()):
        report += "  (errors and parity of the frames that were split off)"
    pairs.append(("next", report))
    head = ["--head", heads[0]] if heads else []
    pairs.append(("next", command("dp-ema", "freeze", "-c", model, *head)))
    return render_facts(f"trained model: {trained.checkpoint}", pairs)
