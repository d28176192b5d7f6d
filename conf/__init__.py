"""The settings files of decodekit, installed as the package ``decodekit.conf``."""
