"""What the cache server and the coordinator have in common: addresses, guards, HTTP, reflection, metrics."""
