"""`kvwire bench coordinator`: a real coordinator process under simulated cache servers."""
