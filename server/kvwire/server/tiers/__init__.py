"""Lower tiers: what has left the memory, or shall outlive it."""
