"""Failures: jobs that hang, that die, and that train on with wrong numbers; from what is seen to the cause."""
