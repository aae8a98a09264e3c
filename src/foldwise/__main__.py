"""``python -m foldwise``: the command line."""

import sys

from foldwise.cli import main

sys.exit(main())
