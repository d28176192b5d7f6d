"""``backend=invariant``: attention whose bits do not depend on the other rows of a pass."""
