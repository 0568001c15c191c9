"""Commands that evaluate: test, model-devi, neighbor-stat, report, posthoc, plot."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from deepmd_ema.cli.loading import loading
from deepmd_ema.cli.streams import say, say_error
from deepmd_ema.errors import UserError
from deepmd_ema.files import TABLE, check_output
from deepmd_ema.report.table import without_nan
from deepmd_ema.utils import keep_freed_memory

if TYPE_CHECKING:
    from deepmd_ema.commands.physics import PhysicsReport
    from deepmd_ema.infer.evaluate import ErrorReport


def test(args: argparse.Namespace) -> None:
    """Print the errors, and the physics where requested, and write the requested files."""
    names = ("temperature", "md_steps", "time_step")
    options = {
        name: value for name in names if (value := getattr(args, name)) is not None
    }
    if options and not args.physics:
        problems = [
            f"--{name.replace('_', '-')}: no effect without --physics."
            for name in options
        ]
        raise UserError(
            [f"{problem} Add it, or leave this out." for problem in problems]
        )
    keep_freed_memory()
    with loading():
        from deepmd_ema.commands.physics import PhysicsOptions, measure_physics
        from deepmd_ema.commands.predicted_frames import refuse_frames, write_frames
        from deepmd_ema.infer.evaluate import measure, refuse_details

    # outputs that cannot be written are refused before minutes of evaluation
    if args.detail_file is not None:
        refuse_details(args.detail_file)
    if args.output is not None:
        refuse_frames(args.output)
    if args.plot is not None:
        from deepmd_ema.report.plots import picture_file

        picture_file(args.plot, "--plot")
    weights = (args.use_ema, args.average, args.head, args.device)
    report = measure(
        args.model,
        args.systems,
        args.numb_test,
        args.atomic,
        *weights,
        args.patterns,
        args.compile,
    )
    # text appears at once, because dynamics may take long; JSON is one document
    if not args.json:
        say(report.text())
    physics = None
    if args.physics:
        physics = measure_physics(
            args.model, report, PhysicsOptions(**options), *weights
        )
    if args.json:
        say(json.dumps(_document(report, physics), indent=2), is_fitted=False)
    elif physics is not None:
        say(physics.text())
    written = [] if args.detail_file is None else report.write_details(args.detail_file)
    written += [] if args.output is None else [write_frames(report, args.output)]
    written += [] if args.plot is None else [report.plot(args.plot)]
    if written:
        (say_error if args.json else say)(f"wrote {', '.join(map(str, written))}")


def _document(report: ErrorReport, physics: PhysicsReport | None) -> dict[str, Any]:
    """Return errors, in the units of ``labels.QUANTITIES``, and physics, as values of JSON."""
    systems = {name: errors.summary() for name, errors in report.by_system.items()}
    return {
        "model": str(report.info.path),
        "weights": report.info.describe(),
        "errors": without_nan(report.total.summary()),  # without a label
        "systems": without_nan(systems),
        "physics": None if physics is None else physics.document(),
    }


def model_devi(args: argparse.Namespace) -> None:
    """Write the table and print the models and the largest deviations."""
    with loading():
        from deepmd_ema.commands.deviation import DeviationOptions, measure_deviation

    check_output(args.output, "-o", TABLE, args.models)
    options = DeviationOptions(
        args.real_error, args.atomic, args.relative, args.relative_v, args.frequency
    )
    report = measure_deviation(
        args.models,
        args.systems,
        options,
        args.use_ema,
        args.average or (),
        args.head,
        args.device,
        args.patterns,
    )
    say(report.text())
    say(f"wrote {report.write(args.output)}")


def neighbor_stat(args: argparse.Namespace) -> None:
    """Print the numbers."""
    with loading():
        from deepmd_ema.infer.evaluate import describe_neighbors

    say(
        describe_neighbors(
            args.systems, args.rcut, args.type_map, args.mixed_type, args.patterns
        )
    )


def report(args: argparse.Namespace) -> None:
    """Write the page."""
    keep_freed_memory()
    with loading():
        from deepmd_ema.commands.page import write_report

    systems = args.systems if args.system else ()
    remarks = write_report(
        args.folder,
        args.output,
        args.numb_test,
        args.device,
        args.average,
        systems,
        args.title,
    )
    say("\n".join([f"wrote {args.output}", *remarks]))


def posthoc(args: argparse.Namespace) -> None:
    """Print the errors over the length, and write the best average, the table and the picture."""
    with loading():
        from deepmd_ema.commands.posthoc.run import run_posthoc

    systems = args.systems if args.system or args.valid_data else None
    run_posthoc(
        args.run_dir,
        args.sigma_rel,
        args.step,
        shapes=args.shapes,
        metric=args.metric,
        systems=systems,
        rglob_patterns=args.patterns,
        output=args.output,
        plot=args.plot,
        table=args.table,
        head=args.head,
        device=args.device,
        say=say,
    )


def plot(args: argparse.Namespace) -> None:
    """Draw the curves."""
    from deepmd_ema.report.plots import plot_curves

    say(f"wrote {plot_curves(args.files, args.output, args.log_steps)}")
