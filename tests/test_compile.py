"""``torch.compile(run, dynamic=True)``: no graph break, few graphs, the numbers of eager mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from toy_models import TRICLINIC, batch_of, toy_atoms, toy_model

from deepmd_ema.model.build import DESCRIPTORS
from deepmd_ema.model.energy import run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]  # dynamo's own; compiling takes time

SMALL = {"neuron": [2], "axis_neuron": 2, "nlayers": 1}
SMALLER = {"dpa2": {"use_three_body": False}}  # the block of se_e3_tebd
# the first batch has equal numbers everywhere, so that a graph that took them for one number would be wrong later
SLOW = ("dpa2", "hybrid")
SIZES = [(3, 3, 3), (4, 3, 2), (2, 5, 3), (5, 4, 3)]


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def batch_with(model, counts):
    coord, _ = toy_atoms(0, sum(counts))
    return batch_of(model, (coord, np.repeat(np.arange(3), counts), TRICLINIC))


def outputs_and_gradients(call, model, batch):
    model.zero_grad()
    out = call(model, batch)
    sum(value.square().sum() for value in out.values()).backward()
    return [*(v.detach() for v in out.values()), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("descriptor", sorted(DESCRIPTORS))
def test_models_of_one_structure_share_a_graph_for_batches_of_many_sizes(descriptor):
    """A graph of 3+3+3 atoms would give wrong energies for 4+3+2 if it had these numbers baked in.

    Models of messages had a graph for each number of atoms: the filling of a padding was a number of the graph.
    """
    compiled = torch.compile(run, dynamic=True, backend="aot_eager")
    for seed in (3, 4):
        _, model = toy_model(descriptor, SMALL | SMALLER.get(descriptor, {}), {"neuron": [2]}, seed=seed)
        model.train()
        for counts in SIZES[descriptor in SLOW :]:  # whose graphs take so long that a second one is not waited for
            batch = batch_with(model, counts)
            assert batch.type_counts == counts
            found = outputs_and_gradients(compiled, model, batch)
            for a, b in zip(found, outputs_and_gradients(run, model, batch), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert sum(counters["graph_break"].values()) == 0
    assert counters["stats"]["unique_graphs"] <= 2  # the second one where the first assumed equal numbers
