"""From sequences of token ids to accepted runs: one loop for all strategies."""
