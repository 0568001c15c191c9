"""What one process answers where many would have to agree."""

import pytest
import torch

from deepmd_ema.errors import UserError
from deepmd_ema.runtime import Runtime
from deepmd_ema.train.parallel import make_strategy


def test_one_process_agrees_with_itself():
    strategy = make_strategy(Runtime(torch.device("cpu")), zero_stage=0)
    strategy.barrier()
    assert strategy.chief
    assert strategy.agree(True)
    assert not strategy.agree(False)
    assert strategy.all_reduce(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_in_one_process_is_refused(stage):
    with pytest.raises(UserError, match=f"training.zero_stage = {stage}: sharding needs several processes"):
        make_strategy(Runtime(torch.device("cpu")), zero_stage=stage)


def test_several_processes_are_refused_for_now():
    with pytest.raises(UserError, match="started as 4 processes"):
        make_strategy(Runtime(torch.device("cpu"), 1, 4), zero_stage=0)
