"""``python -m detattn.audit`` is ``detattn audit``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(["audit", *sys.argv[1:]]))
