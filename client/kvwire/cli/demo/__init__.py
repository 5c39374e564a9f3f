"""`kvwire demo`: a real model, a real document, two engine processes, one cache server between them."""
