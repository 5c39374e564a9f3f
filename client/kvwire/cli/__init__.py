"""The command `kvwire`. Programs that need a server find it by entry point, so that this portion imports
none."""
