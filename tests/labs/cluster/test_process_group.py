"""Ranks find each other, also where others have been before them."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from labs.cluster import process_group as module
from labs.cluster.process_group import RankPlace, RefusedError, call_roll, process_group, ranks_on, tell_refusal


@pytest.fixture
def connect():
    """A client of a store that outlives its ranks, as torchrun's does."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("localhost", server.port, is_master=False, timeout=timedelta(seconds=60))


def roll(connect, ranks, present=None, timeout_s=60.0):
    with ThreadPoolExecutor(ranks) as threads:
        calls = [threads.submit(call_roll, connect(), rank, ranks, timeout_s) for rank in present or range(ranks)]
        return [call.result() for call in calls]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_learn_one_name_and_a_new_one_each_time(connect, ranks):
    names = [roll(connect, ranks) for _ in range(3)]
    assert all(len(set(of_ranks)) == 1 for of_ranks in names)
    assert len({of_ranks[0] for of_ranks in names}) == 3


def test_what_dead_ranks_left_is_not_taken_for_theirs(connect):
    store = connect()
    roll(connect, 3)
    for rank in (1, 2):  # these came before the others were killed, and answered the call of a rank 0 that is dead
        store.set(f"roll/answer/{rank}", "dead/dead")
    store.set("roll/heard", "dead dead/dead")
    assert len(set(roll(connect, 3))) == 1


def test_a_rank_that_does_not_come_is_named(connect):
    roll(connect, 3)
    with pytest.raises(TimeoutError, match="rank 2 did not come within 1 s"):
        roll(connect, 3, present=[0, 1], timeout_s=1.0)


def test_a_refusal_reaches_the_ranks_of_other_nodes(connect, monkeypatch):
    store = connect()
    address = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "RANK": 0, "WORLD_SIZE": 4}
    for name, value in (address | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(call_roll, connect(), rank, 4, 60.0) for rank in (2, 3)]
        tell_refusal(RankPlace(rank=0, world_size=4, local_rank=0, local_world_size=2, torchrun=True))
        for call in waiting:
            with pytest.raises(RefusedError):
                call.result()


def test_without_torchrun_there_is_one_rank():
    assert RankPlace.read({}) == RankPlace()


def test_with_torchrun_its_variables_say_which():
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankPlace.read(env) == RankPlace(3, 4, 1, 2, torchrun=True)
    assert RankPlace.read(env | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2
    assert (
        RankPlace.read(env | {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "9"}).restarts_left == 7
    )


def test_a_group_of_gpus_is_not_bound_to_one(monkeypatch):
    """Of a group that is, torch makes a mesh's groups by splitting it, and one with gloo beside NCCL cannot be."""
    asked, init = [], dist.init_process_group
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **rest: asked.append(backend) or init("gloo", **rest)
    )
    with process_group(RankPlace(), torch.device("cuda", 0), timeout_s=5):
        assert asked == [torch.device("cuda", 0), "cpu:gloo,cuda:nccl"]
        assert dist.group.WORLD.bound_device_id is None


class TestRanksOn:
    """How many ranks a lab starts, and what it says where GPUs are missing. GPUs are faked by name."""

    @pytest.fixture
    def gpus(self, monkeypatch):
        def put(n, visible=True):
            monkeypatch.setattr(module, "gpus", lambda: ["NVIDIA H100"] * n)
            monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)

        return put

    @pytest.mark.parametrize("n", [1, 2, 8])
    def test_one_on_each_gpu_where_they_are_asked_for_and_two_on_cpu_cores(self, gpus, n):
        gpus(n)
        assert (ranks_on("cuda"), ranks_on("cpu"), ranks_on("cpu", 4)) == (n, 2, 4)

    def test_as_many_as_divide_the_rows(self, gpus):
        gpus(6)
        assert ranks_on("cuda", rows=8) == 4

    def test_two_ranks_on_one_gpu_are_refused(self, gpus):
        gpus(1)
        with pytest.raises(ValueError, match="NCCL needs a GPU for each of 2 ranks, and 1 can be used here"):
            ranks_on("cuda", 2)

    def test_a_notebook_is_told_how_to_see_them(self, gpus):
        gpus(8, visible=False)
        with pytest.raises(ValueError, match="notebooks see no GPU; run the lab in a terminal"):
            ranks_on("cuda")

    def test_another_device_is_refused(self):
        with pytest.raises(ValueError, match="device=mps: must be cpu or cuda"):
            ranks_on("mps")
