"""Two nodes on one machine: what crosses the link, what is left behind (nothing), a lost node, a rank that hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.nodes import across_bytes, hang, lose_a_node, picture, two_nodes
from labs.experiments.nodes.__main__ import NodesOptions, main
from labs.experiments.nodes.agents import started
from labs.experiments.nodes.namespaces import NoNamespacesError, on_loopback
from labs.experiments.nodes.traffic import program_of
from labs.experiments.result import LabResult, ResultRow
from labs.model import empty
from tests.warm import ADDRESS, CLIENT

ROOT = Path(__file__).parents[3]
TWO_BY_TWO = RankPlace(world_size=4, local_world_size=2)
FSDP, HSDP = TrainConfig(api="fsdp2"), TrainConfig(api="hsdp")


@pytest.fixture(scope="module")
def apart():
    """Whether this machine lets us have network namespaces; who needs them skips."""
    try:
        with two_nodes(apart=True):
            return True
    except NoNamespacesError as error:
        return str(error)


def needs_namespaces(apart):
    if apart is not True:
        pytest.skip(f"needs network namespaces: {apart}")


# ---- Bytes ----------------------------------------------------------------------------------------------------------


def test_hsdp_sends_the_model_once_between_two_nodes():
    """2 (N - 1) / N of the gradients with N = 2 copies, over all ranks of a node together."""
    model_bytes = 4 * empty(HSDP.model_config).num_params()
    assert across_bytes(HSDP, TWO_BY_TWO) == model_bytes == across_bytes(HSDP, TWO_BY_TWO, gloo=False)


def test_fsdp_sends_what_its_program_gathers_and_reduces():
    gathered, reduced = (
        sum(i.bytes for i in program_of(FSDP, TWO_BY_TWO) if i.op.name == op) for op in ("ALL_GATHER", "REDUCE_SCATTER")
    )
    assert across_bytes(FSDP, TWO_BY_TWO, gloo=False) == (gathered + reduced) * 3 / 4
    assert across_bytes(FSDP, TWO_BY_TWO) == (gathered + 2 * reduced) * 3 / 4


def test_parameters_that_are_kept_are_not_gathered_again():
    kept = replace(FSDP, reshard_after_forward=False)
    assert across_bytes(kept, TWO_BY_TWO, gloo=False) < across_bytes(FSDP, TWO_BY_TWO, gloo=False)


def test_copies_that_are_not_nodes_are_refused():
    with pytest.raises(ValueError, match="shard_size=1: give the 2 ranks of a node"):
        across_bytes(replace(HSDP, shard_size=1), TWO_BY_TWO)


# ---- The link -------------------------------------------------------------------------------------------------------


def test_bytes_between_namespaces_are_counted_and_slowed(apart):
    needs_namespaces(apart)
    listen = "import socket; s = socket.create_server(('', 5000)); print(flush=True); c = s.accept()[0]\n"
    listen += "while c.recv(65536): pass"
    send = "import socket; socket.create_connection(('10.77.0.2', 5000)).sendall(bytes(2_000_000))"
    with two_nodes(apart=True) as nodes:
        nodes.limit(mbit=20)
        head, other = nodes.nodes
        server = subprocess.Popen([*other.enter, sys.executable, "-c", listen], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        before, start_s = head.sent_bytes(), time.monotonic()
        subprocess.run([*head.enter, sys.executable, "-c", send], check=True)
        assert server.wait(60) == 0
        took_s, sent = time.monotonic() - start_s, head.sent_bytes() - before
        server.stdout.close()
    assert 2_000_000 < sent < 2_400_000  # and headers
    assert took_s > 0.6  # 16 Mbit at 20 Mbit/s, less what the bucket lets through at once


def test_on_loopback_there_is_no_link_to_slow_down():
    nodes = on_loopback("of a test")
    assert "of a test" in nodes.description
    with pytest.raises(NoNamespacesError, match="no link to slow down"):
        nodes.limit(10)


def test_without_the_tools_the_nodes_are_on_loopback_and_it_says_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with two_nodes() as nodes:
        assert not nodes.apart
        assert "no command ip, tc, nsenter, unshare; install iproute2 and util-linux" in nodes.description
    with pytest.raises(NoNamespacesError), two_nodes(apart=True):
        pass


# ---- Nothing is left behind -----------------------------------------------------------------------------------------


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def gone_within(pids: set[int], seconds: float) -> bool:
    give_up_s = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return not alive(pids)


def writing_to(log: Path) -> set[int]:
    """The processes that print into a file: an agent, its ranks, and who waits for them."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/1") == str(log):
                found.add(pid)
    return found


def test_a_failure_in_the_block_ends_the_namespaces(apart):
    needs_namespaces(apart)
    keepers: set[int] = set()

    def interrupted() -> None:
        with two_nodes(apart=True) as nodes:
            keepers.update(node.keeper for node in nodes.nodes if node.keeper)
            assert len(alive(keepers)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not alive(keepers)


LAB = f"""
import sys, time
from pathlib import Path
from labs.cluster import torchrun
from labs.experiments.nodes.agents import started
from labs.experiments.nodes.namespaces import two_nodes
torchrun.TIED = torchrun.TIED.partition("os.execv")[0] + {CLIENT!r}  # tied to this process, and forked
asked = ["--steps=100000", "--n_layer=1", "--seq_len=16"]
with two_nodes() as nodes, started(nodes, asked, Path(sys.argv[1])) as agents:
    agents.until(lambda: bool(agents.steps()), "a step")
    print("training", flush=True)
    time.sleep(600)
"""


@pytest.mark.tail
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_however_the_lab_ends_no_process_is_left(warm_server, tmp_path, number):
    """Ctrl-C unwinds; SIGKILL cannot be noticed by who gets it, so the kernel and the pipes have to do it."""
    lab = subprocess.Popen(
        [sys.executable, "-c", LAB, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", ADDRESS: warm_server}, text=True,
    )  # fmt: skip
    assert lab.stdout is not None
    try:
        assert lab.stdout.readline() == "training\n", (tmp_path / "node0.log").read_text()
        started_by_it = {child.pid for child in psutil.Process(lab.pid).children(recursive=True)}
        for node in range(2):
            on_node = writing_to(tmp_path / f"node{node}.log")
            assert len(on_node) >= 1 + 2  # an agent and its ranks
            started_by_it |= on_node
        lab.send_signal(number)
        lab.wait(90)
        assert gone_within(started_by_it, 90)
    finally:
        lab.kill()
        lab.wait()
        lab.stdout.close()


@pytest.mark.usefixtures("warm_torchrun")
def test_an_agent_that_fails_is_reported_with_its_words(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"agent of node \d ended with status 1: unknown argument '--layers"),
        two_nodes() as nodes,
        started(nodes, ["--layers=3"], tmp_path) as agents,
    ):
        agents.wait()


# ---- The lab --------------------------------------------------------------------------------------------------------


def result_of(fsdp: float, hsdp: float, step: float | None) -> LabResult:
    """FSDP and HSDP: what they sent, by prediction; and steps that were measured, or were not."""
    sent, fast, slow = "sent per node and step", "step on the fast link", "step at 9 Mbit/s"
    rows = []
    for name, mib in (("FSDP", fsdp), ("HSDP", hsdp)):
        rows.append(ResultRow(name, sent, mib, mib if step else None, "MiB"))
        rows += [ResultRow(name, quantity, mib, step and mib * step, "ms") for quantity in (fast, slow)]
    return LabResult("nodes", "measured", tuple(rows), "here")


def test_the_picture_says_what_was_measured():
    """The lab's notebook trains both over the link, and asserts that they sent what was predicted."""
    assert picture(result_of(3.0, 1.0, 100.0)).finding == (
        "FSDP over all ranks sent 3.0 times as much over the link as HSDP, "
        "and at the slow link a step took 300 ms, with HSDP 100 ms."
    )


def test_a_picture_of_predictions_alone_says_so():
    assert picture(result_of(3.0, 1.0, None)).finding.startswith("Predicted: FSDP")


@pytest.mark.tail
@pytest.mark.usefixtures("warm_torchrun")
def test_a_node_that_is_killed_and_comes_back_goes_on_from_the_checkpoint():
    result = lose_a_node()
    for row in result.rows:
        assert row.measured == row.predicted, result.rows


@pytest.mark.tail  # the lab's notebook runs it too
def test_a_rank_that_never_comes_is_named_with_its_unit_once_and_in_words(monkeypatch, capsys):
    found = hang(rank=2, unit="layers.1", step=0)
    assert str(found.findings[0]) == (
        f"rank 2 never came to all-gather #{found.findings[0].seq} (layers.1); ranks 0, 1 and 3 wait in it"
    )
    assert "all_gather(layers.1)" in found.watchdog
    assert sorted(found.dumps) == [0, 1, 2, 3]

    monkeypatch.setattr("labs.experiments.nodes.hang", lambda: found)
    assert main(NodesOptions(hang=True)) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"#\d+", printed) == [f"#{found.findings[0].seq}"]
    assert f"\n  {found.findings[0]}\n" in printed
    assert "outside any collective, and not computing (asleep, or waiting for input): rank 2\n" in printed


def test_asked_wrongly(capsys):
    assert main(NodesOptions(mbit=0)) == 2
    assert "a link carries more than nothing" in capsys.readouterr().err
    assert main(NodesOptions(steps=0)) == 2
