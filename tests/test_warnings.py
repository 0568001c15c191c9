"""Warnings: those that our code raises are failures of a test, those inside other packages are not."""

import warnings
from contextlib import nullcontext

import pytest

OLD, NUMBERS, FILES = DeprecationWarning, RuntimeWarning, ResourceWarning
CASES = [
    ("deepmd_ema", OLD, True),
    ("deepmd_ema.data.source", OLD, True),
    ("helpers", OLD, True),
    (__name__, UserWarning, True),
    ("ase.atoms", OLD, False),
    ("torch", UserWarning, False),
    ("torch_sim.models.interface", OLD, False),
    ("numpy._core._methods", NUMBERS, True),
    ("torch.serialization", FILES, True),
    ("_pytest.unraisableexception", pytest.PytestUnraisableExceptionWarning, True),
]


@pytest.mark.parametrize(("module", "category", "fails"), CASES)
def test_a_warning_is_a_failure_where_our_code_raises_it(module, category, fails):
    with pytest.raises(category) if fails else nullcontext():
        exec("warn('text', category)", {"__name__": module, "warn": warnings.warn, "category": category})
