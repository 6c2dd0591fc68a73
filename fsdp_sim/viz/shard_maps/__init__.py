"""Who holds what, moment by moment."""
