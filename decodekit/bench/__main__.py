"""``python -m decodekit.bench key=value ...`` is ``decodekit job=bench key=value ...``."""

import sys

from decodekit.cli import main

sys.exit(main(["job=bench", *sys.argv[1:]]))
