"""What the documents point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])


def test_the_map_names_functions_that_exist():
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = [pair for row in rows for pair in re.findall(r"`([\w/]+\.\w+)`, `(\w+)", row)]
    assert len(named) > 8
    for path, name in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{path} has no {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
