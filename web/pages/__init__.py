"""The pages of the site: the course, the reference, and the search over both. `write` makes them."""

from web.pages.build import write

__all__ = ["write"]
