"""Which points of a spoken question an answer makes, and by which words: without a network or a large model."""

from fsdp_sim.learn.drill.listening.listen import Heard, Quote, listen, patterns

__all__ = ["Heard", "Quote", "listen", "patterns"]
