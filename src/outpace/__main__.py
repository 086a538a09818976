"""``python -m outpace`` is the command ``outpace``."""

import sys

from outpace.cli import main

if __name__ == "__main__":
    sys.exit(main())
