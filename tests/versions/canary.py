"""The next release before users meet it: the names that drumline takes and it changed, and tests.

    python -m tests.versions.canary [--record]    (`make canary`, `make canary RECORD=1`)

Installs the newest of everything, previews too. --record writes what the names look like in .venv
to names_read.json, once somebody has read the changes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.versions import environments, matrix, names

OPTIONS = "drumline/contact/loading/generation_options.json"

READ = Path(__file__).with_name("names_read.json")
NEWEST = matrix.FOLDER / "newest-of-all"


def look(python: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        environments.run(python, environments.ROOT / "tests" / "versions" / "names.py")
    )
    return found


def changes(read: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A line for each name that does not look as it did when it was read, with its place."""
    for name, found in now["names"].items():
        place, before = found["place"], read["names"].get(name)
        if "gone" in found:
            yield f"{place}: {name} is gone"
        elif before is None:
            yield f"{place}: {name} was never recorded"
        else:
            yield from (f"{place}: {name}{line}" for line in _differences(before, found))
    for option in sorted({*now["options of generate()"]} ^ {*read["options of generate()"]}):
        change = "new" if option in now["options of generate()"] else "gone"
        yield f"{OPTIONS}: the option {option} of generate() is {change}"


def _differences(before: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    calls, calls_now = _calls(before), _calls(found)
    for name in sorted({*calls, *calls_now}):
        then, text = calls.get(name, "not there"), calls_now.get(name, "not there")
        if then != text and text != names.UNKNOWN:  # nothing is known of what C++ has added
            yield f"{name}: {then} -> {text}"
    if calls == calls_now and before.get("source") != found.get("source"):
        yield ": other code, same signatures"


def _calls(name: dict[str, Any]) -> dict[str, str]:
    own = {"": name["signature"]} if "signature" in name else {}
    return own | {f".{method}": text for method, text in name.get("methods", {}).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        found = look(Path(sys.executable))
        for each in found["names"].values():
            del each["place"]
        READ.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    python = environments.build(NEWEST, newest=True)
    read, now = json.loads(READ.read_text()), look(python)
    for library, version in now["versions"].items():
        print(f"{library} {version}, read in {read['versions'][library]}")
    lines = list(changes(read, now))
    print("\n".join(lines) or "No name looks otherwise than when it was read.", flush=True)
    matrix.compile_backend(python)
    return not matrix.counts(python, f"@{matrix.CONTACT_TESTS}", matrix.USES).hold


if __name__ == "__main__":
    sys.exit(main())
