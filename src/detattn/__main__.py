"""``python -m detattn VERB`` is the command ``detattn VERB``."""

import sys

from .audit.cli import main

sys.exit(main())
