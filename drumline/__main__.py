"""`python -m drumline`: see drumline/cli/__init__.py."""

import sys

from drumline.cli import main

sys.exit(main(sys.argv[1:], "python -m drumline"))
