"""`python -m communicator`: see communicator/cli.py."""

import sys

from communicator.cli import main

sys.exit(main(sys.argv[1:]))
