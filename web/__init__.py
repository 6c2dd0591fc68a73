"""The web edition, built by `python -m web.build`; not part of the package that is installed."""
