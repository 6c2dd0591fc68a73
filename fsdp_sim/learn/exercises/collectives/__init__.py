"""What travels between ranks, and what it costs."""
