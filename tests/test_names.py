"""The names that an engineer would search for: no private vocabulary, no pronouns as variables."""

import ast
import re
from pathlib import Path

from tests.programs.syntax_trees import LAYERS, ROOT, nodes, trees

# Words of an earlier, private vocabulary; docs/glossary.md has the field's.
PRIVATE = frozenset(
    """
    accuse accused accuses alike attendant attended blame bury buried climb farewell foresee
    foreseen foresees glimpse homeward honours island knock leash lookout outward parted seat seated
    shelf sights torn vault vigil vitals
    """.split()  # noqa: SIM905
)
PRONOUNS = frozenset(
    {"found", "given", "mine", "theirs", "told", "said", "asked", "known", "wanted"}
)
ORDINARY = {"island", "seat", "seated", "blame"}  # words of plain English, in a text
RIDDLES = ("What ", "Who ", "How ", "Where ", "Which ", "Whether ", "Those ", "The same")


FOREIGN = {
    r"\bso many\b": "give the parameter's name",
    r"\bany more\b": "no longer",
    r"\bbut for\b": "except",
    r"[;,] else [a-z]": "otherwise",
    r"\bor else\b": "or, otherwise",
    r"(^|[.:] )Else ": "Otherwise",
    r"\b(?<!there )(?<!There )(is|are|was) no (?!longer|more|less|doubt|matter)[a-z]": "is not a",
}
"""What gives away that a sentence was thought in another language, and what to write."""

OUTSIDE = ("tests", "examples", "benchmarks")


def _words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def _identifiers(tree: ast.Module) -> set[str]:
    names = set()
    for node in nodes(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.arg, ast.keyword)):
            names.add(node.arg or "")
    return names


def test_no_python_name_is_of_the_private_vocabulary():
    wrong = {}
    for path, tree in trees((*LAYERS, *OUTSIDE)).items():
        names = _identifiers(tree) | set(path.with_suffix("").parts)
        if private := {name for name in names if _words(name) & PRIVATE}:
            wrong[str(path)] = private
    assert wrong == {}


def test_no_text_is_of_the_private_vocabulary():
    private = re.compile(rf"\b({'|'.join(PRIVATE - ORDINARY)})\b")
    files = [path for folder in (*LAYERS, *OUTSIDE) for path in (ROOT / folder).rglob("*.py")]
    files += [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    files += [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]}"
        for path in files
        if path.name not in ("glossary.md", Path(__file__).name)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line.lower())
    ]
    assert wrong == []


def _bound(function: ast.AST) -> set[str]:
    """Names that the function itself binds: arguments and variables."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def test_a_variable_is_named_for_the_thing_and_not_by_a_pronoun():
    wrong = []
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body_lines = node.end_lineno - node.body[0].lineno + 1
                if body_lines > 3 and (pronouns := _bound(node) & PRONOUNS):
                    wrong.append(f"{path}:{node.lineno} {node.name}: {', '.join(sorted(pronouns))}")
    assert wrong == []


def test_a_docstring_begins_with_a_noun_phrase_or_an_imperative():
    wrong = []
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node) or ""
                if docstring.startswith(RIDDLES):
                    wrong.append(f"{path}:{getattr(node, 'lineno', 1)}: {docstring[:60]}")
    assert wrong == []


def test_functions_are_short():
    """The median at most 9 lines, nine in ten under 35."""
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for tree in trees().values()
        for node in nodes(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    assert lengths[len(lengths) // 2] <= 9
    assert lengths[len(lengths) * 9 // 10] <= 35


def _sentences(tree: ast.Module) -> list[str]:
    """The texts of a module: docstrings and messages."""
    texts = (node.value for node in nodes(tree) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str) and " " in text]


def test_no_sentence_gives_a_translation_away():
    """An error said "is no launch", and a help text "after so many seconds"."""
    wrong = []
    for path, tree in trees().items():
        for text in _sentences(tree):
            wrong += [
                f"{path}: {found.group()!r} in {text[:60]!r}; write: {better}"
                for pattern, better in FOREIGN.items()
                for found in [re.search(pattern, text, re.MULTILINE)]
                if found
            ]
    assert wrong == []
