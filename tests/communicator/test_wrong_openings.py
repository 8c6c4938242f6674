"""A mistake in how one rank opens a communicator is told to all, who then open the right one."""

import time

import pytest
import torch

from communicator import Communicator, CommunicatorError
from coordinator import Coordinator

MISTAKES = {
    "checked_calls": (ValueError, "checked_calls='a'", "tcp", {"checked_calls": "a"}),
    "checked_calls below 0": (ValueError, "checked_calls=-1", "tcp", {"checked_calls": -1}),
    "device": (ValueError, "device='gpu'.*'cuda:1'", "tcp", {"device": "gpu"}),
    "device of another kind": (ValueError, r"device=3\.5", "tcp", {"device": 3.5}),
    "timeout_s": (ValueError, "timeout_s=-1", "tcp", {"timeout_s": -1}),
    "option of tcp": (TypeError, "unexpected keyword argument 'speed'", "tcp", {"speed": 1}),
    "option of gloo": (TypeError, "unexpected keyword argument 'speed'", "gloo", {"speed": 1}),
    "option of hybrid": (TypeError, "unexpected keyword.*'speed'", "hybrid", {"speed": 1}),
    "network of hybrid": (ValueError, "between='shm'", "hybrid", {"between": "shm"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_is_told_to_the_others_at_once(ranks, name):
    """They waited in the next call of the opening, up to their deadline."""
    kind, words, backend, wrong = MISTAKES[name]

    def rank(info):
        with Coordinator(info, timeout_s=60) as coor:
            is_wrong = coor.rank == 1
            start = time.monotonic()
            with pytest.raises(kind if is_wrong else CommunicatorError, match=f"(?s){words}"):
                Communicator(coor, backend, **(wrong if is_wrong else {}))
            assert time.monotonic() - start < 20
            with Communicator(coor, backend) as comm:
                return comm.allreduce(torch.ones(1)).item()

    assert ranks(rank, 3, [2, 1] if backend == "hybrid" else None) == [3.0] * 3
