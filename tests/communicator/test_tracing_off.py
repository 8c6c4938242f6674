"""What a launch that is not traced pays for tracing: nothing."""

from communicator import Communicator
from coordinator import Coordinator


def test_a_launch_that_is_not_traced_calls_the_methods_themselves(ranks):
    def untouched(info):
        with Coordinator(info) as coor, Communicator(coor) as comm:
            return {"barrier", "broadcast"} & vars(coor).keys(), comm._recorder

    assert ranks(untouched, 2) == [(set(), None)] * 2
