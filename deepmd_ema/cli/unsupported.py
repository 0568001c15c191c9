"""Options and commands of DeePMD-kit, and removed ones, that are not here, with remedies."""

from __future__ import annotations

# by command, and "" for those before the command
OPTIONS = {
    "": {
        "-b --backend --pt --pt-expt": (
            "give the backend before the command, or leave it out: there is one, PyTorch"
        ),
        "--tf --tf2 --jax --pd --dp": "there is one backend, PyTorch: leave it out, or use --pt",
    },
    "train": {
        "--force-load": (
            "weights are loaded whole or not at all, and the message names what does not fit"
        ),
        "-m --mpi-log": "rank 0 speaks for all ranks",
    },
    "freeze": {
        "--hessian": "the .dp file holds the whole model; what is evaluated is up to its reader",
        "-n --node-names -w --nvnmd-weight": "node names and NVNMD are of TensorFlow",
    },
    "compress": {
        "-s --step -e --extrapolate -f --frequency": (
            "tables have the number of terms that their error bound requires"
        ),
        "-c --checkpoint-folder -t --training-script": (
            "the file that is compressed has all that this needs"
        ),
        "-m --mpi-log": "there is one process",
    },
    "test": {
        "--train-data": (
            "give the systems to -s, or an input with them as validation data to --valid-data"
        ),
        "-S --set-prefix": "all sets of a system are read",
        "-r --rand-seed": "frames are taken in order: there is nothing to draw",
        "--shuffle-test": "frames are taken in order, -n N takes the first N",
    },
    "model-devi": {
        "-S --set-prefix": "all sets of a system are read",
        "--sample-layer": (
            "was removed; give several models, averages (--average live A) or checkpoints of one "
            "run"
        ),
        "--seed": "was removed with --sample-layer",
    },
    "posthoc": {
        "--solve": (
            "was removed, since dynamics failed more often; use the best average, or `dp-ema "
            "change-bias` for the bias alone"
        ),
    },
}
COMMANDS = {
    **dict.fromkeys(
        ("transfer", "convert-from", "train-nvnmd"), "it is of the backend TensorFlow"
    ),
    "doc-train-input": "use `dp-ema doc`, or `dp-ema doc --json-schema`",
    "convert-backend": (
        "`dp-ema convert IN OUT` writes .dp, .yaml and .pt files; DeePMD-kit makes the others of "
        "a .dp"
    ),
    "eval-desc": "not here yet",
    "embed": "not here yet",
    "gui": "`dp-ema doc --json-schema` gives an editor what it needs to help with the input",
}
