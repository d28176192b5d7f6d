"""The command line and its jobs; nothing else imports it."""
