"""``job=bench``: strategies and ``transformers`` itself, compared in one process, alternating."""
