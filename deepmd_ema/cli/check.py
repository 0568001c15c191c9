"""``dp-ema check``."""

from __future__ import annotations

import argparse

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.options import add_device, add_input
from deepmd_ema.dist.launch import find_launch

SUMMARY = "check an input and the data it names, without training"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_input(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--config-only", action="store_true", help="do not read the data that the input names")
    only.add_argument("--time", action="store_true",
                      help="also measure some steps, and say how long the run will take")  # fmt: skip
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    """Print a summary of the input and of its data."""
    from deepmd_ema.config import as_launched, config_summary, config_warnings, ignored_options, load_config
    from deepmd_ema.report.table import facts, render

    config = as_launched(load_config(args.input), find_launch().launched)
    table = facts(f"{args.input}: the options are good", config_summary(config))
    warnings = [f"  warning: {line}" for line in [*ignored_options(config), *config_warnings(config)]]
    print("\n".join([*render(table, "  "), *(f"  {line}" for line in config.notes), *warnings]), flush=True)
    if args.config_only:
        return
    with loading():
        from deepmd_ema.data.run import check_task, choose_validation, length_lines, open_run, split_off
    from deepmd_ema.errors import DataError

    data = open_run(config)
    seed = config.training.seed
    splits = choose_validation(config, data, seed or 0)
    for name, split in splits.items():
        lines = [*split.lines, *(f"warning: {line}" for line in split.warnings)]
        drawn = ["  training.seed is not given: a run draws one, and chooses other frames"] * (seed is None)
        print("\n".join(f"task {name}: {line}" if name else line for line in [*lines, *drawn]), flush=True)
    data = split_off(config, data, splits)
    reports = {name: check_task(task, data[name]) for name, task in config.tasks.items()}
    lengths = length_lines(config, data, reports)
    for name, report in reports.items():
        title = [f"Data of task {name}"] if name else []
        lines = [*report.lines(), *lengths[name], *(f"warning: {line}" for line in report.warnings)]
        print("\n".join([*title, *(f"{'  ' * bool(name)}{line}" for line in lines)]), flush=True)
    problems = [problem for report in reports.values() for problem in report.problems]
    if problems:
        raise DataError(problems)
    if config.optimizer.groups:
        with loading():
            from deepmd_ema.data.run import with_counted_neighbors
            from deepmd_ema.model.build import build_models
            from deepmd_ema.optim.groups import describe_groups
        resolved = with_counted_neighbors(config, {name: r.neighbors for name, r in reports.items() if r.neighbors})
        models = build_models({name: task.model for name, task in resolved.tasks.items()}, resolved.links)
        parameters = dict(models.named_parameters())
        for line in describe_groups(config.optimizer.groups, models.first_names(), parameters):
            print(f"Group: {line}")
    if args.time:
        with loading():
            from deepmd_ema.training.estimate import measure_steps
        print("\n".join(measure_steps(config, args.device).lines()))
