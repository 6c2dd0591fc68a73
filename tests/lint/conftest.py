"""Ranks that stay alive between the proofs."""

from tests.mini.conftest import pytest_runtest_teardown, ranks

__all__ = ["pytest_runtest_teardown", "ranks"]
