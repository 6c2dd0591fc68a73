"""What a collective puts on the wire."""

from functools import cache

RING_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "gather": 1, "scatter": 1, "all_reduce": 2}
"""How often a ring of n ranks sends (n-1)/n of the message: an all-reduce is a reduce-scatter and an all-gather."""


@cache
def ring_share(op: str, group_size: int) -> float:
    """How much of the whole message each rank of a ring sends, and each of its links carries.

    The whole message is an all-gather's output, a reduce-scatter's input, an all-reduce's buffer. What is sent from
    rank to rank in one piece (a broadcast) crosses each link once. (In nccl-tests: the factor of the bus bandwidth.)

    Args:
        op: its name, in the spelling of `Op`, of torch (``all_gather``) or of prose (``all-gather``).

    Example:
        >>> ring_share("all_gather", 8), ring_share("all-reduce", 8), ring_share("BROADCAST", 8), ring_share("send", 1)
        (0.875, 1.75, 1.0, 0.0)
    """
    if group_size <= 1:
        return 0.0
    passes = RING_PASSES.get(op.lower().replace("-", "_"))
    return 1.0 if passes is None else passes * (group_size - 1) / group_size
