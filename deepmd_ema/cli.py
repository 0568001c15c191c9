"""The command ``dp-ema``: one function per sub-command, and one place where mistakes become messages."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from deepmd_ema import __version__
from deepmd_ema.dist.launch import find_launch, speaker
from deepmd_ema.errors import ConfigError, DataError, Interrupted, RankLostError, UserError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = {"0": "ERROR", "1": "WARNING", "2": "INFO", "3": "DEBUG"}
MOST_SHOWN = 25  # problems on one screen; `dp-ema check` shows all
EXIT_BUG, EXIT_USER, EXIT_PIPE = 1, 2, 141

# modules of optional extras, and how to get them
INSTALL = {
    "torch": "pip install torch",
    "h5py": "pip install h5py",
    "ase": "pip install 'dp-ema[ase]'",
    "matplotlib": "pip install 'dp-ema[plot]'",
    "lmdb": "pip install 'dp-ema[lmdb]'",
    "msgpack": "pip install 'dp-ema[lmdb]'",
    "tensorboard": "pip install 'dp-ema[tensorboard]'",
}

# what DeePMD-kit's command takes and this one does not, by name, so that nobody has to guess
_NO_TASKS = "a run has one task here, and a model one head"
NOT_HERE = {
    "": dict.fromkeys(
        ("-b", "--backend", "--pt", "--pt-expt", "--tf", "--tf2", "--jax", "--pd", "--dp"),
        "there is one backend, PyTorch: leave it out",
    ),
    "train": {
        "-t": "fine-tuning is not here yet; --init-model starts from the weights of a file",
        "--finetune": "fine-tuning is not here yet; --init-model starts from the weights of a file",
        "-f": "a frozen model cannot be trained; give the checkpoint to --init-model",
        "--init-frz-model": "a frozen model cannot be trained; give the checkpoint to --init-model",
        "--use-pretrain-script": "copy the model section into the input; `dp-ema show --config CKPT` prints it",
        "--model-branch": _NO_TASKS,
        "--force-load": "weights are loaded whole or not at all, and the message names what does not fit",
        "-m": "rank 0 speaks for all ranks",
        "--mpi-log": "rank 0 speaks for all ranks",
    },
    "freeze": {
        "--head": _NO_TASKS,
        "--model-branch": _NO_TASKS,
        "--hessian": "the .dp file holds the whole model; what is evaluated is up to its reader",
        "--lower-kind": "the .dp file holds the model, not a graph: convert it with DeePMD-kit",
        "-n": "node names are of TensorFlow",
        "-w": "node names are of TensorFlow",
    },
    "test": {
        "--train-data": "give the systems to -s, or an input with them as validation data to --valid-data",
        "-S": "all sets of a system are read",
        "--set-prefix": "all sets of a system are read",
        "-r": "frames are taken in order: there is nothing to draw",
        "--rand-seed": "frames are taken in order: there is nothing to draw",
        "--shuffle-test": "frames are taken in order, -n N takes the first N",
        "--head": _NO_TASKS,
        "--model-branch": _NO_TASKS,
    },
    "change-bias": {"--model-branch": _NO_TASKS},
}
PEER_COMMANDS = {
    "doc-train-input": "use `dp-ema doc`, or `dp-ema doc --json-schema`",
    "neighbor-stat": "`dp-ema check INPUT` prints the nearest pair and the most neighbors",
    "convert-backend": "`dp-ema freeze` writes a .dp file, which DeePMD-kit's `dp convert-backend` takes",
    "compress": "convert the frozen .dp file with DeePMD-kit, then `dp --pt compress`",
    "model-devi": "not here yet; `dp model-devi` takes the frozen files once they are converted",
    "eval-desc": "not here yet",
    "embed": "not here yet",
    "gui": "`dp-ema doc --json-schema` gives an editor what it needs to help with the input",
    "pretrained": "not here yet",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for the user's mistakes, 1 for ours, 128 + n for signal n."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        args = _parse(words)
        args.run(args)
        sys.stdout.flush()
    except Interrupted as error:
        return _leave(error, str(error), 128 + error.signal_number, debug)
    except RankLostError as error:
        return _leave(error, _one_screen(error, words), EXIT_BUG, debug)  # the rank that has ended knows whose fault
    except UserError as error:
        return _leave(error, _one_screen(error, words), EXIT_USER, debug)
    except KeyboardInterrupt as error:
        return _leave(error, "dp-ema: stopped by Ctrl-C", 130, debug)
    except BrokenPipeError:
        # the reader of the pipe has left: nothing more can be said, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except ModuleNotFoundError as error:
        top = (error.name or "").split(".")[0]
        if top in INSTALL:
            return _leave(error, f"dp-ema: this needs {top}, which is not installed. {INSTALL[top]}", EXIT_USER, debug)
        return _leave(error, _bug(error, debug), EXIT_BUG, debug)
    except Exception as error:
        return _leave(error, _bug(error, debug), EXIT_BUG, debug)
    return 0


def _leave(error: BaseException, message: str, code: int, debug: bool) -> int:
    sys.stdout.flush()
    if _says(error):
        if debug:
            import traceback

            traceback.print_exception(error)
        print(message, file=sys.stderr, flush=True)
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # other ranks are gone, and closing what joins this one to them would wait for them
    return code


def _says(error: BaseException) -> bool:
    """Whether this process tells the error; of several that have the same one, only one does."""
    told: bool | None = getattr(error, "says", None)
    if told is not None:
        return told
    return speaker().rank == 0 or not isinstance(error, ConfigError | Interrupted | KeyboardInterrupt)


def _bug(error: Exception, debug: bool) -> str:
    text = " ".join(str(error).split()) or "no message"
    line = f"{_head()}: {type(error).__name__}: {text[:400]}"
    return line if debug else f"{line}\nThis should not happen. Run again with --debug for the traceback."


def _one_screen(error: UserError, words: Sequence[str]) -> str:
    """Return the problems of an error as one screen: a line alone, or a numbered list."""
    head, problems = _head(), error.problems
    if len(problems) == 1:
        return f"{head}: {problems[0]}"
    where = next((w for w in words if w.endswith((".json", ".yaml", ".yml"))), None)
    place = f" in {where}" if where and isinstance(error, ConfigError) else ""
    place = f" in the data of {where}" if where and isinstance(error, DataError) else place
    shown = problems if words[:1] == ["check"] else problems[:MOST_SHOWN]
    lines = [f"{head}: {len(problems)} problems{place}"]
    lines += [f"{number:3d}. {problem}" for number, problem in enumerate(shown, 1)]
    if len(shown) < len(problems):
        lines.append(f"     and {len(problems) - len(shown)} more; `dp-ema check` shows all")
    return "\n".join(lines)


def _head() -> str:
    launch = speaker()
    return "dp-ema" if launch.size == 1 else f"dp-ema (rank {launch.rank})"


def _train(args: argparse.Namespace) -> None:
    _start_logging(args)
    if find_launch().launched:
        # torch's own remarks, on every rank, would hide the one message that matters; read when torch is loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from deepmd_ema.train.assemble import run_training

    run_training(
        args.input,
        restart=args.restart,
        init_model=args.init_model,
        output=args.output,
        device=args.device,
        skip_neighbor_stat=args.skip_neighbor_stat,
        allow_config_change=args.allow_config_change,
    )


def _check(args: argparse.Namespace) -> None:
    from deepmd_ema.config import config_summary, config_warnings, ignored_options, load_config

    config = load_config(args.input)
    print(f"{args.input}: the options are good")
    lines = [*config_summary(config), *config.notes]
    lines += [f"warning: {line}" for line in [*ignored_options(config), *config_warnings(config)]]
    print("\n".join(f"  {line}" for line in lines), flush=True)
    if args.config_only:
        return
    from deepmd_ema.data.run import check_run, length_lines, open_run
    from deepmd_ema.errors import DataError

    data = open_run(config)
    reports = check_run(config, data)
    for name, report in reports.items():
        lines = [*report.lines(), *length_lines(config, config.tasks[name], data[name].train, report)]
        print("\n".join([*lines, *(f"warning: {line}" for line in report.warnings)]), flush=True)
    problems = [problem for report in reports.values() for problem in report.problems]
    if problems:
        raise DataError(problems)


def _freeze(args: argparse.Namespace) -> None:
    _start_logging(args)
    from deepmd_ema.export import freeze
    from deepmd_ema.infer.load import load_model

    loaded = load_model(args.checkpoint, use_average=args.use_ema or args.profile is not None, profile=args.profile)
    print(freeze(loaded, args.output).text())


def _test(args: argparse.Namespace) -> None:
    _start_logging(args)
    from deepmd_ema.infer.evaluate import run_test, systems_to_test

    systems, patterns = systems_to_test(args.system, args.datafile, args.valid_data)
    run_test(
        args.model,
        systems,
        rglob_patterns=patterns,
        num_frames=args.numb_test,
        detail=args.detail_file,
        atomic=args.atomic,
        plot=args.plot,
        use_average=args.use_ema,
        profile=args.profile,
        device=args.device,
        say=print,
    )


def _posthoc(args: argparse.Namespace) -> None:
    _start_logging(args)
    from deepmd_ema.infer.evaluate import systems_to_test
    from deepmd_ema.infer.posthoc import run_posthoc

    systems, patterns = args.system, None
    if args.valid_data is not None:
        systems, patterns = systems_to_test(None, None, args.valid_data)
    run_posthoc(
        args.run_dir,
        args.sigma_rel,
        args.step,
        metric=args.metric,
        systems=systems,
        rglob_patterns=patterns,
        output=args.output,
        plot=args.plot,
        table=args.table,
        device=args.device,
        say=print,
    )


def _change_bias(args: argparse.Namespace) -> None:
    _start_logging(args)
    from deepmd_ema.infer.change_bias import CHANGE, Asked, write_changed
    from deepmd_ema.infer.evaluate import systems_to_test

    if args.bias_value is not None:
        if args.mode is not None or args.numb_batch is not None:
            raise UserError("-b: the bias is what you give; -m and -n are for a fit to data. Leave them out.")
        asked = Asked(values=args.bias_value)
    else:
        systems, _ = systems_to_test(args.system, args.datafile, None)
        asked = Asked(args.mode or CHANGE, systems, num_frames=args.numb_batch or 0, source=args.datafile or "")
    done = write_changed(args.input, asked, args.output, args.use_ema, args.profile, args.device)
    print(done.text())


def _show(args: argparse.Namespace) -> None:
    from deepmd_ema.infer.show import describe

    print(describe(args.file, whole_config=args.config))


def _plot(args: argparse.Namespace) -> None:
    from deepmd_ema.infer.plots import plot_curves

    print(f"wrote {plot_curves(args.files, args.output, args.log_steps)}")


def _doc(args: argparse.Namespace) -> None:
    from deepmd_ema.config.manual import json_schema_text, manual

    print(json_schema_text() if args.json_schema else manual(args.option))


def _start_logging(args: argparse.Namespace) -> None:
    from deepmd_ema.report import set_up_logging

    set_up_logging(args.log_level, args.log_path, is_main=find_launch().rank == 0)


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake with one screen instead of a page of usage, and knows -1e2 for a number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # that of Python before 3.14 takes -1e2 for an option
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        found = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if found is None:
            raise UserError(f"{message}. `{self.prog} --help` shows what it takes.")
        name = found.group(1)
        if name in PEER_COMMANDS:
            raise UserError(f"{name} is a command of DeePMD-kit: {PEER_COMMANDS[name]}.")
        raise UserError(f"the command {name!r} is unknown. {did_you_mean(name, list(COMMANDS))}")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _build_parser()
    if not words:
        parser.print_help()
        raise SystemExit(EXIT_USER)
    args, rest = parser.parse_known_args(list(words))
    _refuse_unknown(args, rest)
    return args


def _refuse_unknown(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Answer what the parser did not know: options of DeePMD-kit by name, others with the nearest that is known."""
    if not rest:
        return
    refused = NOT_HERE[""] | NOT_HERE.get(args.command, {})
    options = sorted(s for action in args.parser._actions for s in action.option_strings if s.startswith("--"))
    problems = []
    for word in rest:
        name = word.split("=")[0]
        if name in refused:
            problems.append(f"{args.command} {name}: {refused[name]}.")
        elif name.startswith("-") and name.lstrip("-"):
            problems.append(f"{args.command} has no option {name}. {did_you_mean(name, options)}")
    raise UserError(problems or f"{args.command} does not know what to do with: {' '.join(rest)}")


def _build_parser() -> _Parser:
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("-v", "--log-level", type=_level, metavar="LEVEL", help="DEBUG, INFO (default), WARNING, ERROR")
    common.add_argument("-l", "--log-path", metavar="FILE", help="write the log to a file as well")
    parser = _Parser(prog="dp-ema", description="Train Deep Potential models with averaged weights.",
                     parents=[common], allow_abbrev=False, argument_default=argparse.SUPPRESS)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dp-ema {__version__}")
    parser.set_defaults(debug=False, log_level="INFO", log_path=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, (line, options, run) in COMMANDS.items():
        sub = commands.add_parser(name, help=line, description=line, parents=[common], allow_abbrev=False)
        options(sub)
        sub.set_defaults(run=run, parser=sub)
    return parser


def _level(text: str) -> str:
    name = LEVELS.get(text, text.upper())
    if name not in LEVELS.values():
        raise argparse.ArgumentTypeError(f"{text!r} is none of DEBUG, INFO, WARNING, ERROR")
    return name


def _train_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("input", metavar="INPUT", help="input.json or input.yaml")
    start = sub.add_mutually_exclusive_group()
    start.add_argument("-r", "--restart", metavar="CKPT", help="continue exactly where a checkpoint stands")
    start.add_argument("-i", "--init-model", metavar="CKPT", help="start from the weights of a live or averaged file")
    sub.add_argument("-o", "--output", metavar="FILE", default="out.json", help="normalized input (out.json)")
    sub.add_argument("--skip-neighbor-stat", action="store_true", help="take sel as given, not counted in the data")
    sub.add_argument("--allow-config-change", action="store_true",
                     help="restart although the input differs from that of the checkpoint")  # fmt: skip
    _device(sub)


def _check_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("input", metavar="INPUT", help="input.json or input.yaml")
    sub.add_argument("--config-only", action="store_true", help="do not read the data that the input names")


def _freeze_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("-c", "--checkpoint", "--checkpoint-folder", metavar="CKPT", default=".",
                     help="checkpoint, or the folder of a run with its latest (default: this folder)")  # fmt: skip
    sub.add_argument("-o", "--output", metavar="FILE", default="frozen_model.dp", help="frozen_model.dp")
    sub.add_argument("--use-ema", action="store_true", help="freeze the averaged weights of a training checkpoint")
    sub.add_argument("--profile", metavar="NAME", help="which average, when there are several; implies --use-ema")


def _test_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("-m", "--model", metavar="MODEL", default="frozen_model.dp",
                     help="a .pt checkpoint or a frozen .dp or .yaml (frozen_model.dp)")  # fmt: skip
    what = sub.add_mutually_exclusive_group()
    what.add_argument("-s", "--system", metavar="SYSTEM", nargs="+", action="extend",
                      help="systems, or folders searched for them (default: this folder)")  # fmt: skip
    what.add_argument("-f", "--datafile", metavar="FILE", help="file with the path of one system per line")
    what.add_argument("--valid-data", metavar="INPUT", help="the validation systems of an input.json")
    sub.add_argument("-n", "--numb-test", metavar="N", type=int, default=0,
                     help="frames of each system, from its first (0: all)")  # fmt: skip
    sub.add_argument("-d", "--detail-file", metavar="PREFIX", help="write PREFIX.e.out, .f.out, .v.out, ... per frame")
    sub.add_argument("-a", "--atomic", action="store_true", help="test atomic energies as well")
    sub.add_argument("--plot", metavar="PNG", nargs="?", const="parity.png", help="parity plots (parity.png)")
    _which_average(sub)
    _device(sub)


def _posthoc_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR", help="the folder in which the run was started")
    sub.add_argument("--sigma-rel", metavar="S", nargs="+", action="extend",
                     help="lengths: 0.05, several, or a range: 0.02:0.2, 0.02:0.2:9 (9 that can be told)")  # fmt: skip
    sub.add_argument("--step", metavar="N", type=int, help="the last step to average over (default: newest snapshot)")
    sub.add_argument("--metric", metavar="M", default="overall",
                     help="what best means: E:RMSE, F:RMSE, V:RMSE, S:RMSE, ...:MAE, or overall, the mean RMSE of E, F "
                     "and V as a part of that of the live weights (overall)")  # fmt: skip
    what = sub.add_mutually_exclusive_group()
    what.add_argument("-s", "--system", metavar="SYSTEM", nargs="+", action="extend",
                      help="systems, or folders searched for them (default: validation data of the run)")  # fmt: skip
    what.add_argument("--valid-data", metavar="INPUT", help="the validation systems of an input.json")
    sub.add_argument("-o", "--output", metavar="FILE", help="model of the best length (RUN_DIR/model_posthoc.pt)")
    sub.add_argument("--plot", metavar="PNG", help="errors over the length (RUN_DIR/posthoc.png)")
    sub.add_argument("--table", metavar="CSV", help="all numbers (RUN_DIR/posthoc.csv)")
    _device(sub)


def _change_bias_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("input", metavar="INPUT", help="a .pt checkpoint, the folder of a run, or a .dp or .yaml file")
    what = sub.add_mutually_exclusive_group()
    what.add_argument("-s", "--system", metavar="SYSTEM", nargs="+", action="extend",
                      help="systems, or folders searched for them (default: this folder)")  # fmt: skip
    what.add_argument("-f", "--datafile", metavar="FILE", help="file with the path of one system per line")
    what.add_argument("-b", "--bias-value", metavar="EV", type=float, nargs="+",
                      help="the bias itself, one energy in eV per element in the order of type_map")  # fmt: skip
    sub.add_argument("-n", "--numb-batch", metavar="N", type=_count,
                     help="frames of each system, from its first (0: all)")  # fmt: skip
    sub.add_argument("-m", "--mode", choices=("change", "set"),
                     help="change (default): add a fit of label minus prediction; set: fit the labels")  # fmt: skip
    sub.add_argument("-o", "--output", metavar="OUT", help="default: <stem>_updated<suffix> beside INPUT")
    _which_average(sub)
    _device(sub)


def _which_average(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--use-ema", action="store_true", help="the averaged weights of a training checkpoint")
    sub.add_argument("--profile", metavar="NAME", help="which average, when there are several; implies --use-ema")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected a number of frames, 0 for all")
    return int(text)


def _show_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("file", metavar="FILE", help="a .pt checkpoint or a frozen .dp or .yaml")
    sub.add_argument("--config", action="store_true", help="print the whole config as JSON, and nothing else")


def _plot_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("files", metavar="FILE", nargs="+", help="lcurve.out, val.log, val_ema.log, ...")
    sub.add_argument("-o", "--output", metavar="PNG", default="curves.png", help="curves.png")
    sub.add_argument("--log-steps", action="store_true", help="a logarithmic axis of steps")


def _doc_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("option", metavar="OPTION.PATH", nargs="?", help="one option or section, as training.ema_decay")
    sub.add_argument("--json-schema", action="store_true", help="a JSON schema for editors")


def _device(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", metavar="D", help="cpu, cuda, cuda:0 (default: CUDA when there is one)")


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "train": ("train a model", _train_options, _train),
    "check": ("check an input and the data it names, without training", _check_options, _check),
    "freeze": ("write a checkpoint as a .dp file that DeePMD-kit reads", _freeze_options, _freeze),
    "test": ("errors of a model on labelled frames", _test_options, _test),
    "posthoc": ("the average of any length, from the snapshots of a run", _posthoc_options, _posthoc),
    "change-bias": ("the energy of each element in a model, from data or given", _change_bias_options, _change_bias),
    "show": ("what is in a checkpoint or a frozen file", _show_options, _show),
    "plot": ("learning curves as a picture", _plot_options, _plot),
    "doc": ("the manual of the input", _doc_options, _doc),
}
