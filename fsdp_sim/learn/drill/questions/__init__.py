"""The templates, topic by topic: a folder for each of `TOPICS`, a function for each question."""
