"""What a model file holds, by name: the one list of its kinds and parts.

Files are dictionaries that load with ``torch.load(weights_only=True)``, so parts are numbers, strings, containers and
tensors only.
"""

from __future__ import annotations

KINDS = {
    "training": "live weights, averages, and the state that a restart needs",
    "average": "one average, of the step of the training checkpoint beside it",
    "best": "live weights or an average, of a step that a validation found among the best",
    "snapshot": "a copy of an average that `dp-ema posthoc` combines with others",
    "weights": "made of other files: a combination of snapshots, or weights with another bias",
}

HEAD = {
    "format": "format of the payload, a whole number",
    "version": "version of dp-ema that wrote it",
    "kind": "one of KINDS",
    "weights": "`live`, or the name of an average",
    "step": "optimizer steps behind the weights; None when they are not known",
    "config": "normalized config of the run, with everything that was left to the data",
    "min_nbor_dist": "nearest pair in the training data, angstrom; None when it is not known",
}

PARTS = HEAD | {
    "run": "identifies the trajectory of weights; not in files of 0.1.0",
    "model": "every tensor of the state dict, by name",
    "average": "settings and counters of the average that is in `model`",
    "averaged": "names of the tensors in `model` that are averaged",
    "bias": "what `dp-ema change-bias` did: mode, frames, source",
    "refitted_bias": "output bias fitted after training, by name of the weights; `model` keeps the raw one",
    # of training checkpoints only
    "averages": "state of the AverageBank: settings, counters and tensors by name",
    "optimizer": "state of the optimizer by name of the parameter",
    "streams": "position of every random stream",
    "display": "sums behind the next row of the learning curve",
    "best": "metric and records of the best files",
    "owes_validation": "whether a validation that was due was broken off",
}
