"""Helpers that several tests share; `tests` is on the path, so write `from support import leaks`."""
