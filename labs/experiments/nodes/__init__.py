"""Lab 9: several nodes. What must cross the slow link between them, and what happens when one of them is gone?

    python -m labs.experiments.nodes                         FSDP over both nodes against HSDP: predict, run, compare
    python -m labs.experiments.nodes --mbit 50 --steps 6     over a slower link
    python -m labs.experiments.nodes --lose                  kill one node in the middle, bring it back: the run goes on
    python -m labs.experiments.nodes --hang                  one rank stops; a flight recorder says which, and where

Two nodes are two of torchrun's own agents with two ranks each. Where Linux lets you, each lives in a network namespace
of its own, and a pair of virtual Ethernet ports joins them: bytes between "nodes" are counted, and the link can be made
slow. Elsewhere both are on loopback, and the lab says so. Read in this order:

    namespaces     two network namespaces and the link between them
    agents         a torchrun agent on each node, and their end
    traffic        the bytes that must cross the link, from the program of a step
    fsdp_and_hsdp  FSDP against HSDP over the link, predicted and measured
    figure         the same as a picture
    lost           a node is killed and comes back
    hang           a rank that never comes, found in a flight recorder's dump
"""

from labs.experiments.nodes.figure import picture
from labs.experiments.nodes.fsdp_and_hsdp import run
from labs.experiments.nodes.hang import Hang, hang
from labs.experiments.nodes.lost import lose_a_node
from labs.experiments.nodes.namespaces import Nodes, two_nodes
from labs.experiments.nodes.traffic import across_bytes

__all__ = ["Hang", "Nodes", "across_bytes", "hang", "lose_a_node", "picture", "run", "two_nodes"]
