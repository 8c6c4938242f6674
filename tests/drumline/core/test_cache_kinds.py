"""The package with a transformers that has fewer kinds of caches."""

from __future__ import annotations

import subprocess
import sys

from tests.drumline.conftest import ROOT

OLDER = """
from transformers import cache_utils
for name in ("BaseQuantizedLayer", "Fp8QuantizedLayer", "KVSharingDict"):
    if hasattr(cache_utils, name):
        delattr(cache_utils, name)

import drumline
from drumline.core import pytree
from drumline.kv_cache import owner, proxy

assert proxy.BaseQuantizedLayer is cache_utils.QuantizedLayer
assert issubclass(cache_utils.HQQQuantizedLayer, proxy.BaseQuantizedLayer)
assert not issubclass(cache_utils.DynamicLayer, owner.Fp8QuantizedLayer)
assert not isinstance({}, pytree.KVSharingDict)
assert pytree.flatten({"a": 1}, pytree.Leaves(), id) == ("dict", ("a", ("int",)))
"""


def test_the_package_is_imported_where_transformers_has_fewer_kinds_of_caches():
    """Each of the three names was imported as it is, so `import drumline` failed."""
    done = subprocess.run(
        [sys.executable, "-c", OLDER], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
