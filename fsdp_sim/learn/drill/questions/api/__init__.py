"""The interface: which call does what, in which order, on which ranks, and what each rank then holds."""
