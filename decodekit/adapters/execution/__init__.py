"""How a step is launched, apart from what attention computes: one file per way."""
