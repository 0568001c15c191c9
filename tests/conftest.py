"""Fixtures that every test may use: tiny systems with exact toy labels."""

import gc
import logging
import os
import sys
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")
# of torch: where sizes are symbols a look-up takes longer than the computation, and compiling twice
# as long
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import pytest
from helpers import SPACING, trains_in, write_system

from deepmd_ema.data.check.bonds import COVALENT_RADII

# a child that a test forks never collects what its parent left: to delete a process group needs
# threads that it lacks
os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """After a test the environment is as before, no thread continues, and no process group is
    open.
    """
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)
    environment.pop("PYTEST_CURRENT_TEST", None)
    left = dict(os.environ)
    if current is not None:
        os.environ["PYTEST_CURRENT_TEST"] = current
    changed = {
        k
        for k in {*left, *environment}
        if left.get(k) != environment.get(k) and not k.lstrip("_").startswith("TORCH")
    }
    assert not changed, f"the test changed the environment: {changed}"
    started = [
        t
        for t in threading.enumerate()
        if t not in threads and t.name.startswith("dp-ema")
    ]
    assert not started, f"threads continue: {started}"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), (
        "a process group is open"
    )


_OWN_RADII = {name: COVALENT_RADII[name] for name in ("O", "H")}


@pytest.fixture(autouse=True, scope="session")
def _atoms_of_toy_data_touch():
    """O and H of the toy data are as large as their lattice is wide; as real ones they would look
    given in bohr.

    Also in fixtures of a module, whose checks are remembered by its tests.
    """
    COVALENT_RADII.update(dict.fromkeys(_OWN_RADII, SPACING / 2))


@pytest.fixture
def real_radii():
    """Elements of this test have their own covalent radii."""
    COVALENT_RADII.update(_OWN_RADII)
    yield
    COVALENT_RADII.update(dict.fromkeys(_OWN_RADII, SPACING / 2))


@pytest.fixture(autouse=True)
def _no_command_has_set_up_logging():
    """Remove the handlers and levels that the command of an earlier test (``-v ERROR``) has set."""
    logger = logging.getLogger("deepmd_ema")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of a test, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def water_like(tmp_path_factory):
    """A periodic system: 16 frames of 12 atoms (O, H), two sets, all labels."""
    return write_system(
        tmp_path_factory.mktemp("data") / "water_like",
        frames=16,
        natoms=12,
        seed=1,
        sets=2,
    )


@pytest.fixture(scope="session")
def water_like_valid(tmp_path_factory):
    """Validation frames of the same kind as ``water_like``: 6 frames."""
    return write_system(
        tmp_path_factory.mktemp("data") / "water_like_valid",
        frames=6,
        natoms=12,
        seed=2,
    )


@pytest.fixture(scope="session")
def open_like(tmp_path_factory):
    """An open system (nopbc) of another size: 9 frames of 7 atoms, energies and forces only."""
    return write_system(
        tmp_path_factory.mktemp("data") / "open_like",
        frames=9,
        natoms=7,
        seed=3,
        pbc=False,
    )


@pytest.fixture(scope="session")
def mixed_like(tmp_path_factory):
    """A deepmd/npy/mixed system: 10 periodic frames of 10 real and 2 virtual atoms."""
    return write_system(
        tmp_path_factory.mktemp("data") / "mixed_like",
        frames=10,
        natoms=10,
        seed=4,
        mixed=True,
        virtual=2,
        sets=2,
    )


@pytest.fixture
def start(request, tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own, with the ``OPTIONS`` of the module of
    the test.

    It is called as start(name, num_steps, options, **how).
    """
    return trains_in(
        tmp_path,
        monkeypatch,
        ([water_like], [water_like_valid]),
        request.module.OPTIONS,
    )


# modules that start processes, compile, kill, or train for seconds: `-m "not slow"` leaves them out
SLOW_MODULES = {
    "test_accumulate",
    "test_added_averages",
    "test_bias",
    "test_change_bias",
    "test_checkpoint_schema",
    "test_cli",
    "test_compile",
    "test_compile_ranks",
    "test_data_check",
    "test_data_loader",
    "test_deepmd_checkpoints",
    "test_deepmd_kit",
    "test_distill",
    "test_dpgen",
    "test_early_stop",
    "test_estimate",
    "test_fake_descriptor",
    "test_files",
    "test_filled",
    "test_finetune",
    "test_interpolation",
    "test_kill",
    "test_loggers",
    "test_mixed_batches",
    "test_optim_muon",
    "test_parallel",
    "test_parallel_faults",
    "test_parallel_launch",
    "test_posthoc",
    "test_pt2",
    "test_replay",
    "test_report_plots",
    "test_run_report",
    "test_sharded_checkpoint",
    "test_short_range",
    "test_stat_file",
    "test_test_data",
    "test_torch_sim",
    "test_train",
    "test_train_averages",
    "test_train_quantities",
    "test_train_sharing",
    "test_train_tasks",
    "test_validation_fraction",
}
SLOW_LAWS = (
    "test_every_option_of_a_descriptor_has_right_derivatives_and_is_in_its_tree",
    "test_the_written_out_gradient_is_that_of_automatic_differentiation",
    "test_parameter_gradients_of_a_loss_of_all_outputs_are_right",
    "test_frames_may_lack_elements_or_neighbors",
    "test_parameter_gradients_of_the_hessian_are_right",
    "test_a_step_does_not_wait_for_the_device_and_all_tensors_are_on_it",
)


def pytest_collection_modifyitems(items):
    """Mark slow tests; leave out those marked ``gpu`` where there is no CUDA device."""
    import torch
    from toy_models import VARIANTS  # of descriptors: the laws of these are slow

    pretended = torch.cuda.is_available() and torch.version.cuda is None
    for item in items:
        model = (
            item.callspec.params.get("descriptor")
            if hasattr(item, "callspec")
            else None
        )
        if (
            item.module.__name__ in SLOW_MODULES
            or item.originalname in SLOW_LAWS
            or str(model) in VARIANTS
        ):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(
                    reason="no GPU: python tests/pretend_cuda -m pytest -m gpu pretends one"
                )
            )
        elif pretended and (real := item.get_closest_marker("real_gpu")):
            item.add_marker(
                pytest.mark.skip(reason=f"needs a real GPU: {real.args[0]}")
            )
        elif not pretended and item.get_closest_marker("pretended_gpu"):
            item.add_marker(
                pytest.mark.skip(reason="shows what the pretended device does")
            )
