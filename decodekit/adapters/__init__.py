"""Model adapters, one package or file each: how an architecture runs a token tree."""
