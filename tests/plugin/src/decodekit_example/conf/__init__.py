"""Settings files of the plugin."""
