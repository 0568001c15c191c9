"""What is refused while a run is one process."""

import pytest
import torch

from deepmd_ema.errors import UserError
from deepmd_ema.runtime import Runtime
from deepmd_ema.train.parallel import refuse_several_processes


def test_one_process_that_holds_everything_is_good():
    refuse_several_processes(Runtime(torch.device("cpu")), zero_stage=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_in_one_process_is_refused(stage):
    with pytest.raises(UserError, match=f"training.zero_stage = {stage}: sharding needs several processes"):
        refuse_several_processes(Runtime(torch.device("cpu")), zero_stage=stage)


def test_several_processes_are_refused_for_now():
    with pytest.raises(UserError, match="started as 4 processes"):
        refuse_several_processes(Runtime(torch.device("cpu"), 1, 4), zero_stage=0)
