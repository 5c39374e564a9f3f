"""How events get from the journal to those who want them."""
