"""``python -m decodekit`` is the command line."""

import sys

from decodekit.cli import main

sys.exit(main())
