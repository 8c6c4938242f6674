"""What `make versions` and `make canary` say of versions, without installing any."""

import datetime
import json
import sys
from pathlib import Path

import pytest

from tests.versions import canary, environments, matrix, names

ROOT = Path(__file__).parents[1]


def test_the_contact_tests_are_there():
    lines = (ROOT / matrix.CONTACT_TESTS).read_text().splitlines()
    assert lines and all((ROOT / line.partition("::")[0]).exists() for line in lines)
    assert (ROOT / matrix.USES).exists()
    assert (
        "tests/test_transformers_contact.py" in lines
    )  # no import fails where an override is gone


def test_every_name_that_is_taken_was_recorded():
    """Five were not, and a release could have changed them unseen."""
    assert {name for name, _ in names.taken()} == {*json.loads(canary.READ.read_text())["names"]}


@pytest.fixture
def pages(tmp_path, monkeypatch):
    page = tmp_path / "versions.md"
    page.write_text(f"Before.\n\n{matrix.MARKS[0]}\n{matrix.MARKS[1]}\n\nAfter.\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    return page


def test_a_row_that_ran_is_written_in_order_beside_those_that_did_not(pages):
    first, second = matrix.ROWS[0].name, matrix.ROWS[1].name
    matrix.write({second: [second, "3.11.7", "2.12.1"]})
    matrix.write({first: [first, "3.11.7", "2.11.0"]})
    matrix.write({second: [second, "3.11.9", "2.12.1"]})
    lines = pages.read_text().splitlines()
    assert [line for line in lines if line.startswith(("| torch", "Before", "After"))] == [
        "Before.",
        f"| {first} | 3.11.7 | 2.11.0 |",
        f"| {second} | 3.11.9 | 2.12.1 |",
        "After.",
    ]


def test_a_matrix_that_was_stopped_goes_on_with_the_rows_that_did_not_run(pages, monkeypatch):
    """It takes an hour, and each row writes what it found."""
    done, *rest = [row.name for row in matrix.ROWS]
    monkeypatch.setattr(
        matrix, "run", lambda row, _: ([row.name, str(datetime.date.today())], True)
    )
    monkeypatch.setattr(sys, "argv", ["matrix", done])
    assert matrix.main() == 0 and done in matrix.table()
    ran = []
    monkeypatch.setattr(matrix, "run", lambda row, _: (ran.append(row.name) or [row.name], True))
    monkeypatch.setattr(sys, "argv", ["matrix", "--resume"])
    environments_of_rest = {row.folder for row in matrix.ROWS if row.name in rest}
    assert matrix.main() == 0 and len(ran) == len(environments_of_rest) < len(rest)
    assert set(matrix.table()) >= {done, *rest}  # rows that ask for the same ran once


@pytest.mark.parametrize(
    ("torch", "failed", "holds"),
    [("2.15.0", 0, True), ("2.14.1", 0, False), ("2.15.0", 1, False)],
)
def test_a_row_fails_with_a_test_and_with_a_version_that_it_did_not_ask_for(
    monkeypatch, torch, failed, holds
):
    """pip was capped by a machine's constraint, and a row said 2.15 of what had run with 2.14."""
    row = matrix.Row("torch-2.15.0", {"torch": "2.15.0", "transformers": "5.24.0"}, "3.11")
    versions = {"Python": "3.11.7", "torch": torch, "transformers": "5.24.0"}
    monkeypatch.setattr(environments, "build", lambda *args: Path("python"))
    monkeypatch.setattr(matrix, "compile_backend", lambda python: None)
    monkeypatch.setattr(matrix, "installed", lambda python, *names: versions)
    monkeypatch.setattr(matrix, "counts", lambda *args: matrix.Counts(9, failed, not failed))
    cells, found = matrix.run(row)
    assert found is holds and cells[:4] == ["torch-2.15.0", *versions.values()]
    assert ("**1 failed**" in cells[4]) == bool(failed)


def test_a_name_that_changed_is_told_with_its_place():
    read = {
        "names": {
            "lib.Cache": {"methods": {"update": "(self, keys)", "crop": "(self)"}, "source": "a"},
            "lib.same": {"signature": "()", "source": "a"},
            "lib.body": {"signature": "()", "source": "a"},
            "lib.gone": {"signature": "()", "source": "a"},
        },
        "options of generate()": ["do_sample", "old"],
    }
    now = {
        "names": {
            "lib.Cache": {"methods": {"update": "(self, states)", "crop": "(self)"}, "source": "b"},
            "lib.same": {"signature": "()", "source": "a"},
            "lib.body": {"signature": "()", "source": "b"},
            "lib.gone": {"gone": True},
            "lib.new": {"signature": "()", "source": "a"},
        },
        "options of generate()": ["do_sample", "new"],
    }
    for line, name in enumerate(now["names"], 1):
        now["names"][name]["place"] = f"contact.py:{line}"
    assert list(canary.changes(read, now)) == [
        "contact.py:1: lib.Cache.update: (self, keys) -> (self, states)",
        "contact.py:3: lib.body: other code, same signatures",
        "contact.py:4: lib.gone is gone",
        "contact.py:5: lib.new was never recorded",
        "drumline/contact/loading/generation_options.json: the option new of generate() is new",
        "drumline/contact/loading/generation_options.json: the option old of generate() is gone",
    ]
