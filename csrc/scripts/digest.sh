#!/bin/sh
# Prints a digest of all that the native parts are built from.
cd "$(dirname "$0")/../.."
find csrc setup.py -type f -not -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum
