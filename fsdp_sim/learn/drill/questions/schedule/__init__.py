"""The schedule: how many collectives a step has, in which order they are issued, and what changes that."""
