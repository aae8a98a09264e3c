"""``python -m foldwise``: the command line."""

import sys

from foldwise.studies.cli import main

sys.exit(main())
