"""Whiteboard questions of interviews on FSDP, done on real ranks."""
