"""Communication: what a collective sends, what a step sends, through which link, and how long that takes."""
