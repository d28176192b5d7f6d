"""``backend=triton``: one kernel for any token tree, from its intervals."""
