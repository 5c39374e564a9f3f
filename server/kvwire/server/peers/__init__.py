"""Sharing with other servers of the fleet: what is read from them, and how they are reached."""
