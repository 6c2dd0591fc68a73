"""Proofs: of each rule a function that runs on two ranks, and shows that the trap is one and the fix none."""
