"""Memory: states, shards, units that come whole, activations, and what fits."""
