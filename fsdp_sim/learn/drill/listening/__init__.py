"""Which points of a spoken question an answer makes, and by which words: without a network or a large model."""

from fsdp_sim.learn.drill.listening.listen import Heard, Quote, follow_ups, listen, listen_on, patterns

__all__ = ["Heard", "Quote", "follow_ups", "listen", "listen_on", "patterns"]
