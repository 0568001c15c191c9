"""Options and commands of DeePMD-kit that ``dp-ema`` does not have, and what to use instead."""

from __future__ import annotations

# by command, and "" for those before the command
OPTIONS = {
    "": {"-b --backend --pt --pt-expt --tf --tf2 --jax --pd --dp": "there is one backend, PyTorch: leave it out"},
    "train": {
        "-f --init-frz-model": "--init-model model.dp starts from the weights of a frozen model",
        "--force-load": "weights are loaded whole or not at all, and the message names what does not fit",
        "-m --mpi-log": "rank 0 speaks for all ranks",
    },
    "freeze": {
        "--hessian": "the .dp file holds the whole model; what is evaluated is up to its reader",
        "--lower-kind": "the .dp file holds the model, not a graph: convert it with DeePMD-kit",
        "-n -w": "node names are of TensorFlow",
    },
    "test": {
        "--train-data": "give the systems to -s, or an input with them as validation data to --valid-data",
        "-S --set-prefix": "all sets of a system are read",
        "-r --rand-seed": "frames are taken in order: there is nothing to draw",
        "--shuffle-test": "frames are taken in order, -n N takes the first N",
    },
    "model-devi": {"-S --set-prefix": "all sets of a system are read"},
}
COMMANDS = {
    "doc-train-input": "use `dp-ema doc`, or `dp-ema doc --json-schema`",
    "convert-backend": "`dp-ema convert IN OUT` writes .dp, .yaml and .pt files; DeePMD-kit makes the others of a .dp",
    "compress": "`dp-ema freeze --compress -c MODEL -o model.pt2` compiles a model with tables of its networks; for a "
    ".pth convert the frozen .dp file with DeePMD-kit, then `dp --pt compress`",
    "eval-desc": "not here yet",
    "embed": "not here yet",
    "gui": "`dp-ema doc --json-schema` gives an editor what it needs to help with the input",
    "pretrained": "not here yet",
}
