"""No folder of the product grows unseen: raising its ceiling is a line of a review."""

import pytest

from tests.programs import budget


def test_no_folder_is_over_its_ceiling():
    assert budget.over_budget() == []


def test_no_ceiling_is_left_of_a_folder_that_is_gone():
    assert budget.ceilings().keys() == budget.sizes().keys()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('"""Of the module."""\n\n# a comment\nx = 1\n', (1, 3)),
        ('def f():\n    """A text."""\n    return "text"  # a word\n', (2, 7)),
        ("x = [\n    1,\n]\n", (3, 6)),
        ("x = f'{a!r} {f\"{b}\":>9} c' 'd'\n", (1, 4)),
        ('x = f"""\n{a}\n\n"""\n', (4, 3)),
        ("x(\n    f'{a}'\n    f'{b}{c}', d,\n)\n", (3, 6)),
    ],
)
def test_what_is_written_for_readers_does_not_count(text, size):
    assert budget.python_size(text) == size


def test_comments_of_native_code_do_not_count():
    assert budget.native_size('// a\nint a = 1; /* b\nc */\nauto s = "d e";\n') == (2, 10)


def test_a_folder_over_its_ceiling_is_named(monkeypatch):
    monkeypatch.setattr(budget, "ceilings", lambda: {**budget.sizes(), "launcher": (1, 10**9)})
    (problem,) = budget.over_budget()
    assert problem.startswith("launcher has ") and "may have 1 and" in problem
