"""A library that is newer than what was read is one warning at load, and no refusal."""

import logging

import pytest

from drumline import model_packages
from drumline.contact import releases


@pytest.fixture
def newest(monkeypatch):
    """Have another version of transformers installed, as far as the warning can see."""
    monkeypatch.setattr(
        releases, "installed", lambda name: {"transformers": "5.25.0"}.get(name, "0.8.1")
    )
    model_packages.warn_of_unread.cache_clear()
    yield
    model_packages.warn_of_unread.cache_clear()


def test_a_release_that_was_not_read_is_one_warning_of_rank_0_and_the_model_runs(
    newest, checkpoints, on_master, caplog
):
    """transformers 5.24 made prompts slower, and nothing said that nobody had read it."""
    caplog.set_level(logging.WARNING, "drumline")
    for _ in range(2):
        on_master(checkpoints.llama()[1], 2, lambda model: model.config)
    (line,) = [r.getMessage() for r in caplog.records if "was not read" in r.getMessage()]
    assert line.startswith("rank 0: transformers 5.25.0 was not read by this drumline (read: 5.21")
    assert line.endswith("pip install 'transformers<5.25'.")


@pytest.mark.parametrize("version", ["5.21.0", "5.24.0", "5.24.3", "5.24.0.dev0"])
def test_a_release_whose_minor_was_read_is_no_warning(version):
    assert releases.unread("transformers", version) is None


@pytest.mark.parametrize("version", ["5.25.0rc1", "5.100.0", "6.0"])
def test_a_later_minor_or_major_is_one(version):
    assert f"transformers {version} was not read" in releases.unread("transformers", version)
