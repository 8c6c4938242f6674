"""JSON values and line records between processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.records import json_values, pipe_records

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(values)
def test_values_arrive_equal(value):
    assert json_values.loads(json_values.dumps(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {"a": {3}}, [object()], {"__bytes__": "x"}])
def test_values_that_would_arrive_different_are_errors(value):
    with pytest.raises(TypeError):
        json_values.dumps(value)


@given(st.lists(st.binary(), max_size=6))
def test_line_buffer_returns_the_same_lines_for_any_chunks(parts):
    buffer = pipe_records.LineBuffer()
    lines = [line for part in parts for line in buffer.feed(part)]
    assert b"\n".join([*lines, buffer.take()]) == b"".join(parts)
