"""Lab 9: several nodes. What must cross the slow link between them, and what happens when one of them is gone?

    python -m labs.lab.nodes                         FSDP over both nodes against HSDP: predict, run, compare
    python -m labs.lab.nodes --mbit 50 --steps 6     over a slower link
    python -m labs.lab.nodes --lose                  kill one node in the middle, bring it back: the run goes on
    python -m labs.lab.nodes --hang                  one rank stops; a flight recorder says which, and where

Two nodes are two of torchrun's own agents with two ranks each. Where Linux lets you, each lives in a network namespace
of its own, and a pair of virtual Ethernet ports joins them: bytes between "nodes" are counted, and the link can be made
slow. Elsewhere both are on loopback, and the lab says so. Read in this order:

    wire       two network namespaces and the link between them
    agents     a torchrun agent on each node, and their end
    traffic    the bytes that must cross the link, from the program of a step
    compare    FSDP against HSDP over the link, predicted and measured
    figure     the same as a picture
    lost       a node is killed and comes back
    hang       a rank that never comes, found in a flight recorder's dump
"""

from labs.lab.nodes.compare import run
from labs.lab.nodes.figure import picture
from labs.lab.nodes.hang import Hang, hang
from labs.lab.nodes.lost import lose_a_node
from labs.lab.nodes.traffic import across_bytes
from labs.lab.nodes.wire import Nodes, two_nodes

__all__ = ["Hang", "Nodes", "across_bytes", "hang", "lose_a_node", "picture", "run", "two_nodes"]
