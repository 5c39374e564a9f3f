"""The commands that are loaded by name from `kvwire.cli.app`."""
