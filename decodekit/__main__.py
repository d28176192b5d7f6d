"""``python -m decodekit`` is the command line."""

import sys

from decodekit.cli.main import main

sys.exit(main())
