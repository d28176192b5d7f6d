"""``python -m decodekit.bench key=value ...`` is ``decodekit job=bench key=value ...``.

``python -m decodekit.bench report FILE.jsonl`` prints the tables of a stored benchmark again.
"""

import sys

from decodekit.cli import main

words = sys.argv[1:]
sys.exit(main(words if words[:1] == ["report"] else ["job=bench", *words], is_program=True))
