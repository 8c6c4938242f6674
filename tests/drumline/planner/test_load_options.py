"""Which arguments of load() may go together."""

import re

import pytest

from drumline.errors import PlanError
from drumline.planner.load_options import BOTH, RULES, SHARDED, WHOLE, LoadOptions
from tests.programs.syntax_trees import ROOT

WAYS = {WHOLE: {}, SHARDED: {"tp": 2}, BOTH: {"tp": 2, "device_map": "auto"}}
GIVEN = {
    "max_memory": {"max_memory": ["1GiB", "2GiB"]},
    "length": {"length": 64},
    "pass_tokens": {"pass_tokens": 64},
    "device": {"device": "cpu"},
    "cuda_graphs": {"cuda_graphs": True},
    "on_failure": {"on_failure": "replan"},
    'device_map="fastest"': {"device_map": "fastest"},
    "a GGUF file": {"gguf": "model.gguf"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.option)
@pytest.mark.parametrize("way", WAYS)
def test_an_option_is_taken_where_it_has_a_meaning_and_refused_elsewhere(rule, way):
    if rule.option.startswith("device_map") and way == SHARDED:
        way = BOTH  # a device_map beside tp= makes stages
    options = LoadOptions(**{**WAYS[way], **GIVEN[rule.option]})
    assert options.way == way
    if way in rule.ways:
        options.check_together()
        return
    name, value = next(iter(GIVEN[rule.option].items()))
    with pytest.raises(PlanError) as error:
        options.check_together()
    text = str(error.value)
    assert str(value).strip("[]") in text and (name in text or name == "gguf")
    assert re.search(r"leave|use|here the device_map says", text), "what to do"


def test_build_on_has_no_effect_on_how_the_model_is_spread():
    """It made load() shard every layer over all ranks, while its help said "without effect"."""
    assert LoadOptions(build_on="meta").way == WHOLE


def test_the_table_in_the_documents_is_the_one_that_is_held():
    page = (ROOT / "docs" / "drumline.md").read_text()
    table = page.split("| option | whole layers |")[1].split("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    answers = {True: "yes", False: "no"}
    assert rows == [[rule.option, *(answers[way in rule.ways] for way in WAYS)] for rule in RULES]
