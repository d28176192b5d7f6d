"""``job=verify``: whether the tokens are those of autoregressive decoding, and of the model."""
