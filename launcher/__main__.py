"""`python -m launcher`: see launcher/cli/__init__.py."""

import sys

from launcher.cli import main

sys.exit(main(sys.argv[1:]))
