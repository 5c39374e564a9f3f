"""`kvwire bench peer`: what servers get from each other, and what it costs when hints are wrong."""
