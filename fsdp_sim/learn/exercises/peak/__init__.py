"""The most memory alive at once."""
