"""Meshes are read from what users write, or refused: never ignored."""

import pytest

from drumline.core.mesh import Mesh, read_mesh
from drumline.errors import PlanError


def test_the_last_axis_varies_fastest():
    mesh = Mesh({"dp_shard": 2, "tp": 3})
    assert [mesh.coordinate(rank)["tp"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [mesh.coordinate(rank)["dp_shard"] for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_group_holds_the_ranks_that_differ_along_its_axes_only():
    mesh = Mesh({"pp": 2, "dp_shard": 2, "tp": 2})
    assert mesh.group(5, "tp") == (4, 5)
    assert mesh.group(5, "dp_shard") == (5, 7)
    assert mesh.group(5, "pp", "tp") == (0, 1, 4, 5)


def test_ranks_may_lie_in_any_order():
    mesh = Mesh({"tp": 2, "dp_shard": 2}, (3, 1, 2, 0))
    assert mesh.coordinate(0) == {"tp": 1, "dp_shard": 1}
    assert mesh.group(3, "tp") == (3, 2)


def test_axes_along_which_ranks_do_not_ascend_are_known():
    """torch sorts the ranks of a process group: FSDP2 put rows together in another order."""
    axes = {"dp_shard": 2, "tp": 2}
    assert not Mesh(axes).descending_axes and not Mesh(axes, (0, 2, 1, 3)).descending_axes
    assert Mesh(axes, (1, 0, 3, 2)).descending_axes == {"tp"}
    assert Mesh(axes, (0, 3, 2, 1)).descending_axes == {"dp_shard", "tp"}


def test_the_name_that_transformers_gives_an_axis_is_understood():
    assert read_mesh({"fsdp": 2, "tp": 2}, 4).axes == {"dp_shard": 2, "tp": 2}


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ({"tp": 3}, "3 places and the launch 4"),
        ({"rows": 4}, "rows"),
        ({"tp": 4, "pp": 0}, "0 ranks along 'pp'"),
        (4, "not a mesh"),
        ({"fsdp": 2, "dp_shard": 4}, "each axis once"),
        ({"tp": 4.7}, "whole sizes"),
        ({"tp": "four"}, "whole sizes"),
        ({"tp": None}, "whole sizes"),
        (Mesh({"tp": 4}, (0, 1, 2, 4)), "places"),
    ],
)
def test_a_mesh_that_cannot_be_used_is_refused(mesh, says):
    with pytest.raises(PlanError, match=says):
        read_mesh(mesh, 4)
