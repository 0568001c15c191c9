"""The commands of ``dp-ema`` and their options, as one table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from deepmd_ema.cli import read
from deepmd_ema.utils import __version__

Option: TypeAlias = tuple[list[str], dict[str, Any]]
"""The arguments of ``add_argument``."""


class Group(NamedTuple):
    """Options below a title; without one, options of which one may be given."""

    options: tuple[Option, ...]
    title: str | None = None


class Command(NamedTuple):
    """A command, which is the function of its name in ``module``.

    Attributes:
        module: module of this package, which is imported when the command runs.
        help: a line.
        options: options in the order of the help.
        keeps_log: whether there is a log beside the results.
        epilog: the last paragraph of the help.
    """

    module: str
    help: str
    options: tuple[Option | Group, ...]
    keeps_log: bool = False
    epilog: str | None = None


def option(flags: str, metavar: str | None, help: str, **settings: Any) -> Option:
    """Return an option with a value, or an argument."""
    return flags.split(), {"metavar": metavar, "help": help, **settings}


def switch(
    flags: str,
    help: str,
    action: str | type[argparse.Action] = "store_true",
    **settings: Any,
) -> Option:
    """Return an option without a value."""
    return flags.split(), {"help": help, "action": action, **settings}


def systems(default: str = "this folder") -> Option:
    """Return the option of systems; ``default`` says what is taken without it."""
    return option(
        "-s --system",
        "SYSTEM",
        f"systems, or folders searched for them (default: {default})",
        type=read.path,
        nargs="+",
        action="extend",
    )


def add_options(
    parser: argparse._ActionsContainer, options: Iterable[Option | Group]
) -> None:
    """Add options to a parser, or to a group of one."""
    for entry in options:
        if not isinstance(entry, Group):
            flags, settings = entry
            parser.add_argument(*flags, **settings)
        elif entry.title is None:
            add_options(parser.add_mutually_exclusive_group(), entry.options)
        else:
            add_options(parser.add_argument_group(entry.title), entry.options)


# choices of `init` and `train` as in config.presets, which takes time to import
TRAINED = ("all", "fitting")
MODELS = ("se_e2_a", "se_atten_v2", "dpa4c")
SIZES = ("S", "M", "L")
KINDS = ("liquid", "molecules", "solid")
SHELLS = ("bash", "zsh", "tcsh", "fish")
EVALUATED = (
    ".pt2 (machine code, which runs when it is loaded: only from whom you trust)"
)

DEVICE = option("--device", "D", "cpu, cuda, cuda:0 (default: CUDA when there is one)")
DEVICE_OF_PT2 = option(
    "--device", "D", "of a .pt2: cpu, cuda (default: CUDA when there is one)"
)
DEEPMD_KIT = option(
    "--dp",
    "PATH",
    "command of the DeePMD-kit that writes .pth, .pte and .pb (default: dp on the PATH)",
    type=read.path,
)
DATAFILE = option(
    "-f --datafile", "FILE", "file with the path of one system per line", type=read.path
)
VALID_DATA = option(
    "--valid-data", "INPUT", "the validation systems of an input.json", type=read.path
)
USE_EMA = switch("--use-ema", "take the averaged weights of a training checkpoint")
HEAD = option(
    "--head --model-branch",
    "NAME",
    "which model of a file that holds several, by its task",
)
WEIGHTS = (
    USE_EMA,
    option(
        "--average --profile",
        "NAME",
        "which average, when there are several; implies --use-ema",
    ),
    HEAD,
)
SEL_TYPE = option(
    "--sel-type",
    "ELEMENT",
    "the elements whose atoms alone have rows in atomic_dipole.npy and "
    "atomic_polarizability.npy (default: found by the number of rows)",
    nargs="+",
)
FOREIGN = (
    option(
        "--format",
        "NAME",
        "of ASE (vasp-out, vasp-xml, db, ...) or dpdata (cp2k/output, ...)",
    ),
    option(
        "--units",
        "LENGTH,ENERGY",
        "of the numbers in the files, such as bohr,hartree, in place of those that "
        "their reader assumes: angstrom, bohr, nm; eV, hartree, rydberg, kcal/mol, kJ/mol",
    ),
)

# before or after the command: where it is after, the default would replace a value that is before
COMMON = (
    switch("--debug", "show the traceback of an error", default=argparse.SUPPRESS),
    option(
        "-v --log-level",
        "LEVEL",
        "DEBUG (also saved files, times), INFO (default), WARNING, ERROR",
        type=read.log_level,
        default=argparse.SUPPRESS,
    ),
    option(
        "-l --log-path",
        "FILE",
        "write the log to a file as well",
        type=read.file,
        default=argparse.SUPPRESS,
    ),
)
BEFORE_COMMAND = (
    Group(
        (
            option(
                "-b --backend",
                "NAME",
                "as for DeePMD-kit: pytorch or pytorch-exportable; it sets the suffix of the "
                "file that freeze and compress write where -o has none, and nothing else",
                type=read.backend,
            ),
            switch(
                "--pt", "-b pytorch", "store_const", dest="backend", const="pytorch"
            ),
            switch(
                "--pt-expt",
                "-b pytorch-exportable",
                "store_const",
                dest="backend",
                const="pytorch-exportable",
            ),
        )
    ),
    switch(
        "--version",
        "show program's version number and exit",
        "version",
        version=f"dp-ema {__version__}",
    ),
)
COMMANDS = {
    "init": Command(
        "inputs",
        "write an input for data, with a reason for each choice",
        (
            option(
                "systems",
                "DATA",
                "training data: folders of systems, .extxyz, .h5, .lmdb; or files that `convert` "
                "reads (OUTCAR, ...), which become a folder first",
                type=read.path,
                nargs="+",
            ),
            option(
                "-o --output",
                "FILE",
                "the input: .yaml with comments, or .json (input.yaml)",
                type=read.file,
                default="input.yaml",
            ),
            option(
                "--validation",
                "DATA",
                "validation data (default: a tenth of the frames, near copies kept together)",
                type=read.path,
                nargs="+",
                action="extend",
                default=[],
            ),
            option(
                "--test",
                "DATA",
                "test data, evaluated once, after the last step",
                type=read.path,
                nargs="+",
                action="extend",
                default=[],
            ),
            option(
                "--model",
                None,
                "which model (default: dpa4c for energies; for other quantities se_e2_a for up to "
                "4 elements, else se_atten_v2)",
                choices=MODELS,
            ),
            option("--size", None, "of the model (M)", choices=SIZES),
            option(
                "--kind",
                None,
                "of the data, which chooses the recipe (default: found by bonds and cells)",
                choices=KINDS,
            ),
            option("--rcut", "R", "cutoff radius in angstrom (6)", type=read.positive),
            option(
                "--property",
                "NAME[:N]",
                "what is predicted instead of energies: dipole, polarizability, dos:N with N "
                "energies, or a property of N numbers (1) in NAME.npy",
                type=read.quantity,
            ),
            SEL_TYPE,
            option(
                "-t --type-map",
                "ELEMENT",
                "the elements, where the data have numbers only",
                nargs="+",
            ),
            option(
                "--finetune",
                "FILE",
                "fine-tune the model of this file, at a lower rate",
                type=read.path,
            ),
            option(
                "--train",
                None,
                "with --finetune: all weights (default), or those of the fitting network alone",
                choices=TRAINED,
            ),
            option(
                "--replay",
                "DATA",
                "with --finetune: data that the model was trained on, or frames that it has "
                "labelled (convert --labels-of), in 30 %% of the steps, so that it forgets less",
                type=read.path,
                nargs="+",
                action="extend",
                default=[],
            ),
            HEAD,
            Group(
                FOREIGN,
                "data of other programs (all data become folders where one of these is given)",
            ),
            Group(
                (
                    option(
                        "--steps",
                        "N",
                        "steps of the run (default: those of the recipe)",
                        type=read.run_steps,
                    ),
                    option(
                        "--hours",
                        "H",
                        "time of the run on this machine; some steps are measured",
                        type=read.positive,
                    ),
                )
            ),
            DEVICE,
        ),
    ),
    "train": Command(
        "train",
        "train a model",
        (
            option(
                "input",
                "INPUT",
                "input.json or input.yaml (default: input.json of this folder; with --restart the "
                "config of the checkpoint)",
                type=read.path,
                nargs="?",
            ),
            Group(
                (
                    option(
                        "-r --restart",
                        "CKPT",
                        "continue exactly from a checkpoint",
                        type=read.path,
                    ),
                    option(
                        "-i --init-model -f --init-frz-model",
                        "FILE",
                        "start from the weights of a .pt (live or averaged) or of a frozen model",
                        type=read.path,
                    ),
                    option(
                        "-t --finetune",
                        "FILE",
                        "fine-tune such a file, or a published model by its name, on other data, "
                        "perhaps of other elements",
                        type=read.path,
                    ),
                )
            ),
            option(
                "--model-branch --head",
                "NAME",
                "which model of a file with several; RANDOM: a fresh fitting network",
            ),
            switch("--use-pretrain-script", "take the section model from that file"),
            option(
                "-o --output",
                "FILE",
                "normalized input (out.json)",
                type=read.file,
                default="out.json",
            ),
            switch(
                "--skip-neighbor-stat", "take sel as given, not counted in the data"
            ),
            switch(
                "--allow-config-change",
                "restart although the input differs from that of the checkpoint",
            ),
            option(
                "--max-time",
                "TIME",
                "save and end after this time, e.g. 90m, 23.5h or 23:30:00; the start counts",
                type=read.seconds,
                default=math.inf,
            ),
            option(
                "--nproc-per-node",
                "N",
                "train on N processes of this machine, as torchrun starts them; gpu: one per "
                "GPU, auto: the same, or one where there is no GPU",
                type=read.processes,
            ),
            DEVICE,
        ),
        keeps_log=True,
        epilog="on several processes: --nproc-per-node N, or `export PET_NO_PYTHON=1` once in the "
        "shell and then `torchrun --nproc_per_node=N dp-ema train INPUT`",
    ),
    "check": Command(
        "inputs",
        "check an input and its data; show plan and cost of the run",
        (
            option("input", "INPUT", "input.json or input.yaml", type=read.path),
            Group(
                (
                    switch(
                        "--config-only", "do not read the data that the input names"
                    ),
                    switch(
                        "--time",
                        "also measure some steps, and say how long the run will take",
                    ),
                )
            ),
            switch("--json", "print one JSON document, described in doc/data.md"),
            DEVICE,
        ),
    ),
    "freeze": Command(
        "models",
        "write a checkpoint as .dp, .pt2, .pth for DeePMD-kit; LAMMPS reads the last two",
        (
            option(
                "-c --checkpoint --checkpoint-folder",
                "CKPT",
                "checkpoint, or the folder of a run with its latest (default: this folder)",
                type=read.path,
                default=".",
            ),
            option(
                "-o --output",
                "FILE",
                "frozen_model.dp (`dp-ema --pt freeze`: frozen_model.pth); a name that ends in "
                ".pt2 is compiled, which takes minutes; .pth, .pte and .pb are written by "
                "DeePMD-kit",
                type=read.file,
                default="frozen_model",
            ),
            DEVICE_OF_PT2,
            switch(
                "--compress",
                "of a .pt2: tables of the embedding networks instead of the networks, or not "
                "(default: on a CPU, where they are faster)",
                argparse.BooleanOptionalAction,
            ),
            option(
                "--lower-kind",
                None,
                "of a .pt2, as DeePMD-kit calls it: nlist is the one that is written",
                choices=("nlist", "graph"),
            ),
            DEEPMD_KIT,
            *WEIGHTS,
        ),
        keeps_log=True,
    ),
    "compress": Command(
        "models",
        "write a frozen .pt2 or .pth file again with tables of its embedding networks",
        (
            option(
                "-i --input",
                "FILE",
                "a .pt2, or a .pth or .pte, which an installed DeePMD-kit compresses "
                "(frozen_model.pth)",
                type=read.path,
                default="frozen_model",
            ),
            option(
                "-o --output",
                "FILE",
                "of the same kind (frozen_model_compressed.pth)",
                type=read.file,
                default="frozen_model_compressed",
            ),
            DEVICE_OF_PT2,
            DEEPMD_KIT,
        ),
        keeps_log=True,
    ),
    "test": Command(
        "evaluate",
        "errors of a model on labelled frames, and its physics: dynamics and bonds",
        (
            option(
                "-m --model",
                "MODEL",
                f"a .pt checkpoint or a frozen .dp, .yaml or {EVALUATED} (frozen_model.dp)",
                type=read.path,
                default="frozen_model.dp",
            ),
            Group((systems(), DATAFILE, VALID_DATA)),
            option(
                "-n --numb-test",
                "N",
                "frames of each system, from its first (0: all)",
                type=read.frames,
                default=0,
            ),
            option(
                "-d --detail-file",
                "PREFIX",
                "write PREFIX.e.out, .f.out, .v.out, ... per frame",
                type=read.file,
            ),
            option(
                "-o --output",
                "FILE",
                "a new .extxyz: all frames with predictions as ASE names them (energy, forces, "
                "stress), and labels as REF_energy, REF_forces, REF_stress",
                type=read.file,
            ),
            switch("-a --atomic", "test atomic energies as well"),
            option(
                "--plot",
                "PNG",
                "parity plots (parity.png)",
                type=read.file,
                nargs="?",
                const="parity.png",
            ),
            switch("--compile", "compile the model first: for many frames; needs g++"),
            switch(
                "--physics", "dynamics, bond scans and cutoff as well (doc/physics.md)"
            ),
            option(
                "--temperature",
                "K",
                "with --physics: of the run without thermostat, half of the other (300)",
                type=read.positive,
            ),
            option(
                "--md-steps",
                "N",
                "with --physics: steps of each run (1 ps)",
                type=read.steps,
            ),
            option(
                "--time-step",
                "FS",
                "with --physics: in femtoseconds (0.5 with hydrogen, else 1)",
                type=read.positive,
            ),
            switch("--json", "print one JSON document instead of tables"),
            *WEIGHTS,
            DEVICE,
        ),
        keeps_log=True,
    ),
    "model-devi": Command(
        "evaluate",
        "deviations of several models from each other",
        (
            option(
                "-m --models",
                "MODEL",
                f".pt checkpoints, folders of runs, frozen files: .dp, .yaml or {EVALUATED}",
                type=read.path,
                nargs="+",
                action="extend",
                required=True,
            ),
            Group((systems(), VALID_DATA)),
            option(
                "-o --output",
                "FILE",
                "table of all frames (model_devi.out)",
                type=read.file,
                default="model_devi.out",
            ),
            option(
                "-f --frequency",
                "N",
                "steps between two frames, for the column step (1)",
                type=read.steps,
                default=1,
            ),
            switch(
                "--real_error --real-error",
                "root mean square errors of the models, not their deviations",
            ),
            switch("--atomic", "write the deviation of the force of each atom as well"),
            option(
                "--relative",
                "LEVEL",
                "divide by the length of the force plus LEVEL, in eV/angstrom",
                type=read.positive,
            ),
            option(
                "--relative_v --relative-v",
                "LEVEL",
                "divide by the length of the virial per atom plus LEVEL, in eV",
                type=read.positive,
            ),
            USE_EMA,
            option(
                "--average --profile",
                "NAME",
                "which averages, each a model, and `live` for the trained weights; "
                "implies --use-ema",
                nargs="+",
            ),
            HEAD,
            DEVICE,
        ),
        keeps_log=True,
    ),
    "neighbor-stat": Command(
        "evaluate",
        "shortest distance and most neighbors of data",
        (
            Group((systems(), DATAFILE, VALID_DATA)),
            option(
                "-r --rcut",
                "RCUT",
                "cutoff radius in angstrom",
                type=read.positive,
                required=True,
            ),
            option(
                "-t --type-map",
                "ELEMENT",
                "the elements, in the order of the numbers (default: those of type_map.raw)",
                nargs="+",
            ),
            switch("--mixed-type", "count neighbors of all elements together"),
        ),
    ),
    "report": Command(
        "evaluate",
        "one page about a run: errors of all weights, curves, parity, worst frames, averages, time",
        (
            option(
                "folder",
                "RUN",
                "the folder of a run, which may still be training (this folder)",
                type=read.path,
                nargs="?",
                default=".",
            ),
            systems("the test data of the input"),
            option(
                "-o --output",
                "HTML",
                "the page, with all pictures in it (report.html)",
                type=read.file,
                default="report.html",
            ),
            option(
                "-n --numb-test",
                "N",
                "most frames of the validation, test and training data each (0: all, and as "
                "many for training as for validation)",
                type=read.frames,
                default=0,
            ),
            option(
                "--average",
                "NAME",
                "the average of which details are shown (the first one)",
            ),
            option("--title", "TEXT", "of the page (name of the folder)"),
            DEVICE,
        ),
    ),
    "posthoc": Command(
        "evaluate",
        "the average of any length or shape, from the snapshots of a run",
        (
            option(
                "run_dir",
                "RUN_DIR",
                "the folder in which the run was started",
                type=read.path,
            ),
            option(
                "--sigma-rel",
                "S",
                "lengths: 0.05, several, or a range: 0.02:0.2, 0.02:0.2:9 (9 lengths)",
                nargs="+",
                action="extend",
            ),
            option(
                "--shapes",
                "SHAPE",
                "decays of the learning rate over the last part of the run: linear, cosine, "
                "1-sqrt, linear:0.2 (over the last 20 %%), or none (default: all, unless "
                "--sigma-rel is given)",
                nargs="+",
                action="extend",
            ),
            option(
                "--step",
                "N",
                "the last step to average over (default: newest snapshot)",
                type=int,
            ),
            option(
                "--metric",
                "M",
                "what best means: E:RMSE, F:RMSE, V:RMSE, S:RMSE, ...:MAE, or overall, the mean "
                "RMSE of E, F and V as a part of that of the live weights (overall)",
                default="overall",
            ),
            Group((systems("validation data of the run"), VALID_DATA)),
            option(
                "-o --output",
                "FILE",
                "model of the best average (RUN_DIR/model_posthoc.pt)",
                type=read.file,
            ),
            option(
                "--plot",
                "PNG",
                "errors over the length (RUN_DIR/posthoc.png)",
                type=read.file,
            ),
            option(
                "--table", "CSV", "all numbers (RUN_DIR/posthoc.csv)", type=read.file
            ),
            HEAD,
            DEVICE,
        ),
        keeps_log=True,
    ),
    "change-bias": Command(
        "models",
        "the energy of each element in a model, from data or given",
        (
            option(
                "input",
                "INPUT",
                "a .pt checkpoint, the folder of a run, or a .dp or .yaml file",
                type=read.path,
            ),
            Group(
                (
                    systems(),
                    DATAFILE,
                    option(
                        "-b --bias-value",
                        "EV",
                        "the bias itself, one energy in eV per element in the order of type_map",
                        type=float,
                        nargs="+",
                    ),
                )
            ),
            option(
                "-n --num-frames --numb-batch",
                "N",
                "frames of each system, from its first (0: all)",
                type=read.frames,
            ),
            option(
                "-m --mode",
                None,
                "change (default): add a fit of label minus prediction; set: fit the labels",
                choices=("change", "set"),
            ),
            option(
                "-o --output",
                "OUT",
                "default: <stem>_updated<suffix> beside INPUT",
                type=read.file,
            ),
            *WEIGHTS,
            DEVICE,
        ),
        keeps_log=True,
    ),
    "convert": Command(
        "models",
        "a model file as another kind of file, or data of any format as deepmd/npy folders or "
        "extended XYZ",
        (
            option(
                "input",
                "IN",
                "a model: a .pt of dp-ema or DeePMD-kit, the folder of a run, a .dp, a .yaml; or "
                "data: what `train` reads (folders, a.xyz#energy=REF_energy), and files that ASE "
                "reads",
                type=read.path,
                nargs="+",
            ),
            option(
                "-o --output",
                "OUT",
                "what is written, without -o the last of IN: of a model a .dp, a .yaml, a .pt2, "
                "a .pt (see --to), or a .pth (by an installed DeePMD-kit); of data a new folder, "
                "or a new .xyz or .extxyz",
                type=read.path,
            ),
            Group(
                (
                    option(
                        "--to",
                        None,
                        "whose .pt is written: a file of dp-ema with the weights of a model "
                        "(default), or a checkpoint of DeePMD-kit (backend pt) with all models of "
                        "IN, or that of --head",
                        choices=("dp-ema", "deepmd"),
                    ),
                    *WEIGHTS,
                    DEEPMD_KIT,
                ),
                "models",
            ),
            Group(
                (
                    option(
                        "--labels-of",
                        "MODEL",
                        "write energies, forces and virials of a model in place of the labels of "
                        "IN, which needs none; --use-ema, --average and --head choose its weights",
                        type=read.path,
                    ),
                    option(
                        "--validation",
                        "SHARE",
                        "keep this share of the frames of each kind apart, near copies together",
                        type=read.share,
                    ),
                    option(
                        "--seed",
                        "N",
                        "of the random choice of these frames (1)",
                        type=read.seed,
                    ),
                    switch(
                        "--mixed",
                        "one system for all frames of one size (real_atom_types.npy), not per "
                        "composition",
                    ),
                    SEL_TYPE,
                    *FOREIGN,
                ),
                "data",
            ),
        ),
        keeps_log=True,
    ),
    "pretrained": Command(
        "models",
        "list published models that can be fine-tuned, or download one",
        (
            option(
                "names",
                "NAME",
                "a model to download; `download NAME` is the same",
                nargs="*",
            ),
            option(
                "-o --cache-dir",
                "FOLDER",
                "where the file is written (~/.cache/deepmd/pretrained/models, which "
                "DeePMD-kit has too)",
                type=read.path,
            ),
        ),
    ),
    "show": Command(
        "models",
        "what is in a checkpoint or a frozen file, or how far a run is",
        (
            option(
                "file",
                "FILE",
                "a .pt checkpoint, a frozen .dp or .yaml; or the folder of a run, also while it "
                "trains",
                type=read.path,
            ),
            Group(
                (
                    switch(
                        "--config", "print the whole config as JSON, and nothing else"
                    ),
                    switch("--json", "of a run: print its status as JSON"),
                )
            ),
        ),
    ),
    "plot": Command(
        "evaluate",
        "learning curves as a picture",
        (
            option(
                "files",
                "FILE",
                "lcurve.out, val.log, val_ema.log, ..., or folders of runs",
                type=read.path,
                nargs="+",
            ),
            option(
                "-o --output", "PNG", "curves.png", type=read.file, default="curves.png"
            ),
            switch("--log-steps", "a logarithmic axis of steps"),
        ),
    ),
    "doc": Command(
        "inputs",
        "the manual of the input",
        (
            option(
                "option",
                "OPTION.PATH",
                "one option or section, as training.ema_decay",
                nargs="?",
            ),
            switch("--json-schema", "a JSON schema for editors"),
        ),
    ),
    "completion": Command(
        "main",
        "completion of commands, options and files, for a shell",
        (option("shell", None, "which shell; its script is printed", choices=SHELLS),),
        epilog='bash: eval "$(dp-ema completion bash)" in ~/.bashrc; doc/commands.md has the '
        "others.",
    ),
}
