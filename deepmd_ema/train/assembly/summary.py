"""What a run says when it has ended: its files, its last errors, how long it took, and what to do with the model."""

from __future__ import annotations

from collections.abc import Iterator

from deepmd_ema.checkpoint.writer import WriterTimes
from deepmd_ema.config import RunConfig
from deepmd_ema.errors import counted
from deepmd_ema.report.progress import describe_errors, duration
from deepmd_ema.report.table import Table, facts
from deepmd_ema.report.tables import show_metric
from deepmd_ema.train.loop.trainer import Trainer


def end_table(trainer: Trainer, config: RunConfig, input_file: str, steps: int, seconds: float) -> Table:
    """Return the files of a run that has ended, its last errors, and what to do next.

    Args:
        trainer: that has taken its last step.
        config: of the run.
        input_file: as the user has named it.
        steps: that this process has taken.
        seconds: that it took in all.
    """
    saver = trainer.saver
    averages = {name: series.link for name, series in saver.averages.items()}
    heads = [name for name in config.tasks if name]
    pairs = [("heads", ", ".join(heads)), *(("averaged", f"{link} ({name})") for name, link in averages.items())]
    pairs += [("best", line) for line in _best_lines(trainer)]
    refitted = " before the bias was fitted again" * config.training.change_bias_after_training
    when = f"step {trainer.reporter.validated_step:,}{refitted}"
    pairs += [
        ("errors", f"{name}, {when}, MAE / RMSE: {describe_errors(errors)}")
        for name, errors in trainer.reporter.validated.items()
    ]
    compiler = trainer.validator.models.compiler
    if compiler is not None:
        pairs.append(("compiled", f"{compiler.describe()}, {100 * compiler.seconds / seconds:.0f} % of the time"))
    pairs.append(("saving", _describe_saving(saver.writer.times)))
    pairs.append(("time", f"{duration(seconds)} for {counted(steps, 'step')}, data and validation included"))
    pairs.append(("waiting", f"for data {100 * trainer.times.waiting_share():.1f} % of the time of training"))
    model = next(iter(averages.values()), saver.link)
    validated = [name for name, task in config.tasks.items() if task.validation_data is not None]
    if validated:
        head = f" --head {validated[0]}" * bool(heads)
        pairs.append(("next", f"dp-ema test -m {model}{head} --valid-data {input_file} --plot"))
    pairs.append(("next", f"dp-ema freeze -c {model}" + (f" --head {heads[0]}" if heads else "")))
    return facts(f"trained model: {saver.link}", pairs)


def _describe_saving(times: WriterTimes) -> str:
    if not times.steps:
        return ""
    late = f", {counted(times.waits, 'time')} for files of an earlier step" if times.waits else ""
    return (
        f"files of {counted(times.steps, 'step')} written in {duration(times.written_s)} beside training, which waited "
        f"{duration(times.waited_s)} for them{late}"
    )


def _best_lines(trainer: Trainer) -> Iterator[str]:
    for row in trainer.validator.rows:
        if row.best is not None and row.best.records:
            value, step = row.best.records[0]
            shown = show_metric(row.best.metric, value)
            yield f"{row.best.path(step)} ({row.name}, {row.best.metric} = {shown})"
