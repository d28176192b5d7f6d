"""What is installed: built-in components and those of plugins, by name."""
