"""Micro-batches that leave memory as they found it are played once, and what is held is the same."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.engine import allocator as module
from fsdp_sim.engine.allocator import pools
from fsdp_sim.engine.caching_allocator import CachingAllocator
from fsdp_sim.engine.tensors import Move, _Writer, tensors
from fsdp_sim.timeline import Lane

MODEL = Model(name="small", n_layer=4, d_model=64, n_head=4, d_ffn=256, vocab=512)
PLANS = st.fixed_dictionaries({
    "api": st.sampled_from(["fsdp2", "fsdp2", "fsdp1", "ddp", "zero1", "zero2"]),
    "grad_accum": st.sampled_from([1, 2, 3, 5, 9]), "micro_batch": st.sampled_from([1, 5, 32]),
    "param_dtype": st.sampled_from([None, "bf16"]), "reduce_dtype": st.sampled_from([None, "fp32", "bf16"]),
    "activation_checkpointing": st.sampled_from([None, "full", "selective", 2]),
})  # fmt: skip
FSDP2 = st.fixed_dictionaries({
    "reshard_after_forward": st.sampled_from([None, True, False, 2]), "shard_size": st.sampled_from([None, 4]),
    "cpu_offload": st.booleans(), "requires_gradient_sync": st.sampled_from([True, "last"]),
    "activation_offload": st.sampled_from([None, "streams"]),
})  # fmt: skip


def one_by_one(allocator, pieces, alive, start_s=0.0):
    module._play(allocator, chain.from_iterable(pieces), alive, start_s)


@settings(max_examples=60, deadline=None)
@given(PLANS, FSDP2, st.booleans(), st.sampled_from([None, 1.02, 1.2, 3.0]))
def test_what_is_held_is_what_it_is_with_each_micro_batch_played(plan, fsdp2, expandable, room):
    try:
        sim = simulate(
            MODEL, Cluster("A100-SXM-40GB", gpus=8), Plan(**plan | (fsdp2 if plan["api"] == "fsdp2" else {}))
        )
    except ValueError:  # settings that exclude each other
        return
    limit = None if room is None else int(sim.peak_memory_bytes * room)
    asked = sim.program, sim.workload.work, sim.run, module.Allocator(limit, expandable, 2**20)
    found = pools(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "play", one_by_one)
        patch.setattr(_Writer, "_state", lambda writer: object())  # no two micro-batches find the same
        assert found == pools(*asked)


def test_of_many_micro_batches_that_are_alike_few_are_played(monkeypatch):
    plan = Plan(grad_accum=40, param_dtype="bf16", reduce_dtype="fp32")
    sim = simulate(MODEL, Cluster("A100-SXM-40GB", gpus=8), plan)
    played = []
    plain = module._play

    def counted(allocator, moves, alive, start_s):
        played.append(moves)
        plain(allocator, moves, alive, start_s)

    monkeypatch.setattr(module, "_play", counted)
    pools(sim.program, sim.workload.work, sim.run)
    steps = 3
    found = tensors(sim.program, sim.workload.work, sim.run)
    assert len(found.before_optimizer) == plan.grad_accum
    assert len(played) <= steps * 6


def test_a_piece_that_leaves_something_behind_is_played_each_time():
    leak = [Move(1, 2**21, Lane.COMPUTE)]
    allocator, alive = CachingAllocator(), {}
    module.play(allocator, [leak] * 5, alive)
    assert allocator.active_bytes == 5 * 2**21
