"""Two nodes on one machine: two network namespaces, joined by a pair of virtual Ethernet ports.

A namespace has interfaces, addresses and ports of its own, so processes in one reach those in the other only over the
pair, as over a cable. Its transmit queue can be given a rate.

[Note: nothing to clean up]  The namespaces have no name. Each lives as long as a process in it does, and the process
that keeps it (``cat``) ends when nobody can write to its input any more: also when this process is killed. The pair
goes with the namespaces. They belong to a user namespace, so that no root is needed where Linux allows that.

Source: network_namespaces(7), user_namespaces(7), veth(4), tc-tbf(8).
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the two nodes; they exist inside the namespaces only."""

PORT = 29500
_TOOLS = ("ip", "tc", "nsenter", "unshare")
_START_S = 10.0


class NoNamespacesError(Exception):
    """This machine does not let us have network namespaces; says why."""


@dataclass(frozen=True)
class Node:
    """One of the two.

    Attributes:
        enter: what a command has to begin with to run on this node.
        address: at which the other reaches it.
        interface: the name of the network interface that has the address.
        keeper: the process whose network this is; None on loopback.
    """

    enter: tuple[str, ...]
    address: str
    interface: str
    keeper: int | None = None

    def sent_bytes(self) -> int:
        """Bytes that have left the node, with the headers of Ethernet, IP and TCP."""
        for line in Path(f"/proc/{self.keeper}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface:
                return int(numbers.split()[8])
        raise OSError(f"the link {self.interface} is gone: the namespace of process {self.keeper} has ended")


@dataclass(frozen=True)
class Nodes:
    """Two nodes.

    Attributes:
        nodes: the head node is the first: ranks meet at its address and port.
        apart: whether each has a network of its own.
        description: where they are, in a sentence for the reader.
    """

    nodes: tuple[Node, Node]
    port: int
    apart: bool
    description: str

    def sent_bytes(self) -> int:
        """Bytes that have crossed the link, both ways together."""
        return sum(node.sent_bytes() for node in self.nodes)

    def limit(self, mbit: float) -> None:
        """Let each node send at most so many Mbit/s over the link.

        Raises:
            NoNamespacesError: this kernel cannot, or the nodes share a network.
        """
        if not self.apart:
            raise NoNamespacesError("both nodes are on loopback, which has no link to slow down")
        rate = f"{round(mbit * 1e6)}bit"
        for node in self.nodes:
            _do(*node.enter, "tc", "qdisc", "replace", "dev", node.interface, "root", "tbf", "rate", rate,
                "burst", "128kb", "latency", "200ms")  # fmt: skip


@contextmanager
def two_nodes(*, apart: bool | None = None) -> Iterator[Nodes]:
    """Two nodes, which are gone after the block.

    Args:
        apart: each in a network namespace, or both on loopback; by default in namespaces where that works.

    Raises:
        NoNamespacesError: ``apart`` is True and it does not work here.
    """
    with ExitStack() as stack:
        try:
            nodes = on_loopback("you asked for that") if apart is False else stack.enter_context(_namespaces())
        except NoNamespacesError as error:
            if apart:
                raise
            nodes = on_loopback(str(error))
        yield nodes


def on_loopback(why: str) -> Nodes:
    """Two nodes that share this machine's loopback."""
    port = _free_port()
    node = Node(enter=(), address="127.0.0.1", interface="lo")
    description = f"Two agents on loopback, not in network namespaces ({why}): bytes between them cannot be counted."
    return Nodes((node, node), port, apart=False, description=description)


def _free_port() -> int:
    """One that nobody has, nor gets by chance before the agents have started: systems give out higher ones."""
    for port in random.sample(range(15_000, 30_000), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports of 127.0.0.1 is free; end what holds them (ss -tlnp lists it)")


@contextmanager
def _namespaces() -> Iterator[Nodes]:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoNamespacesError(f"no command {', '.join(missing)}; install iproute2 and util-linux")
    with ExitStack() as stack:
        first = stack.enter_context(_kept("unshare", "--user", "--map-root-user", "--net"))
        user = ("nsenter", f"--target={first}", "--user", "--preserve-credentials")
        second = stack.enter_context(_kept(*user, "unshare", "--net"))
        pair = [
            Node(("nsenter", f"--target={pid}", "--user", "--preserve-credentials", "--net"), address, f"node{i}", pid)
            for i, (pid, address) in enumerate(zip((first, second), ADDRESSES, strict=True))
        ]
        nodes = Nodes(
            (pair[0], pair[1]), PORT, apart=True, description="Two agents, each in a network namespace of its own."
        )
        _do(*pair[0].enter, "ip", "link", "add", pair[0].interface, "type", "veth",
            "peer", "name", pair[1].interface, "netns", str(second))  # fmt: skip
        for node in pair:
            _do(*node.enter, "ip", "address", "add", f"{node.address}/24", "dev", node.interface)
            _do(*node.enter, "ip", "link", "set", node.interface, "up")
            _do(*node.enter, "ip", "link", "set", "lo", "up")
        yield nodes


@contextmanager
def _kept(*unshare: str) -> Iterator[int]:
    """A process in new namespaces, which ends with this one; yields its id."""
    keeper = subprocess.Popen(
        [*unshare, "sh", "-c", "echo; exec cat >/dev/null"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert keeper.stdin
    assert keeper.stdout
    assert keeper.stderr
    try:
        if not keeper.stdout.readline():  # nothing was started: unshare or nsenter has said why
            raise NoNamespacesError(_last_line(keeper.stderr.read()))
        yield keeper.pid
    finally:
        keeper.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(_START_S)
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
        keeper.stderr.close()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command[command.index('--net') + 1 :])}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "it ended without a word"
