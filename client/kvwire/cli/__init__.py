"""The command `kvwire`. It finds the programs by entry point, so that this portion imports no server."""
