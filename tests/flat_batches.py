"""Labelled batches without neighbors, for tests of what is measured and not of what is
predicted.
"""

import numpy as np
import torch

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import LABELS

COMPARED = tuple(
    name for name, label in LABELS.items() if label.symbol
)  # of energies and what follows from them


def flat_batch(frames, num_types=2, names=COMPARED):
    """Return the batch of ``frames``: dicts with ``types``, ``box`` (or None) and labels by name;
    atoms sorted by type.

    ``names`` are the labels that the batch has; a frame without one of them has zeros there.
    """
    types = np.concatenate([f["types"] for f in frames])
    frame = np.repeat(np.arange(len(frames)), [len(f["types"]) for f in frames])
    order = np.argsort(types, kind="stable")
    labels, found = {}, {}
    for name in names:
        labels[name] = torch.tensor(join(frames, name, order))
        found[name] = torch.tensor(
            [float(f.get(name) is not None) for f in frames], dtype=torch.float64
        )
    none = torch.zeros(len(types), 0, dtype=torch.int64)
    boxes = [np.zeros((3, 3)) if f.get("box") is None else f["box"] for f in frames]
    return Batch(
        type_counts=tuple(np.bincount(types, minlength=num_types).tolist()),
        slots=(0,),
        atom_type=torch.tensor(types[order]),
        atom_frame=torch.tensor(frame[order]),
        atom_order=torch.tensor(order),
        num_atoms=torch.tensor([len(f["types"]) for f in frames]),
        coord=torch.zeros(len(types), 3, dtype=torch.float64),
        box=torch.tensor(np.stack(boxes)),
        periodic=torch.tensor([f.get("box") is not None for f in frames]),
        neighbor=none,
        vector=torch.zeros(len(types), 0, 3, dtype=torch.float64),
        reverse=none,
        labels=labels,
        has_label=found,
        frames=tuple(f.get("source", ("toy", k)) for k, f in enumerate(frames)),
        sizes=tuple(len(f["types"]) for f in frames),
    )


def join(frames, name, order):
    """Return one quantity of all frames as it is in a batch, zeros where a frame does not have
    it.
    """
    parts = []
    for f in frames:
        empty = np.zeros(LABELS[name].shape_of(len(f["types"])))
        parts.append(
            np.asarray(empty if f.get(name) is None else f[name], float).reshape(
                empty.shape
            )
        )
    return (
        np.concatenate(parts)[order] if LABELS[name].per_atom else np.concatenate(parts)
    )


def random_frame(rng, natoms, box=None, names=COMPARED, **more):
    """Return a frame with random types and labels."""
    frame = {"types": rng.integers(0, 2, natoms), "box": box}
    labels = {
        name: rng.normal(size=LABELS[name].shape_in_frame(natoms)) for name in names
    }
    if "atom_pref" in labels:
        labels["atom_pref"] = np.abs(labels["atom_pref"])
    return frame | labels | more


def predicted(frames, batch):
    """Return the numbers of ``frames`` in the order of ``batch``, as if a model had predicted
    them.
    """
    order = batch.atom_order.numpy()
    return {
        n: torch.tensor(join(frames, n, order)) for n in COMPARED if n != "atom_pref"
    }
