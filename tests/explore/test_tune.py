"""`tune`: it finds the best of all plans, or next to it; what is to hold is not changed; each price is simulated."""

import itertools
from dataclasses import replace
from random import Random

import pytest

from fsdp_sim import Cluster, Model, Plan, simulate, tune
from fsdp_sim.explore import space_of
from fsdp_sim.explore.bounds import Bounds
from fsdp_sim.explore.search import Outcome, Search
from fsdp_sim.schedule import SDPA
from fsdp_sim.simulation import Fit

SMALL = Model("small", n_layer=4, d_model=1024, n_head=16, d_ffn=4096, vocab=50304, bias=False)
A100 = Cluster("A100-SXM-40GB", gpus=16, bandwidth_gbps=50)
START = Plan(micro_batch=2, grad_accum=4, seq_len=1024, param_dtype="bf16", reduce_dtype="fp32")
ALIKE = ("forward_prefetch", "backward_prefetch", "separate_reduce_scatter_group", "compile", "requires_gradient_sync")
SPACE = ("shard_size", "reshard_after_forward", "activation_checkpointing", "micro_batch", "compile")


@pytest.fixture(scope="module")
def space_and_outcomes():
    """All plans of a space, each simulated."""
    space = space_of(SMALL, A100, START, vary=SPACE)
    outcomes = {}
    for plan in {space.plan(point) for point in itertools.product(*map(range, space.sizes))} - {None}:
        sim = simulate(SMALL, A100, plan)
        outcomes[plan] = Outcome(1 / sim.tokens_per_s_per_gpu, sim.peak_memory_bytes)
    return space, outcomes


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_search_finds_the_best_of_all_plans_with_few_looks(space_and_outcomes, share):
    space, outcomes = space_and_outcomes
    limit = 1.001 * sorted(one.bytes for one in outcomes.values())[int(share * len(outcomes))]
    search = Search(space, outcomes.get, Bounds(SMALL, A100, {}))

    search.run(limit)

    found, best = outcomes[search.best(limit)], min(one.seconds for one in outcomes.values() if one.bytes <= limit)
    assert found.bytes <= limit
    assert found.seconds <= 1.005 * best
    assert len(search.seen) < len(outcomes) / 4  # of 5% in spaces of thousands of plans: tests/bench/bench_tune.py


def test_of_too_many_plans_the_best_is_found_too(space_and_outcomes, monkeypatch):
    """The fastest of all, which fits only with checkpointing and smaller micro-batches than the start's."""
    space, outcomes = space_and_outcomes
    limit = 1.001 * sorted(one.bytes for one in outcomes.values())[len(outcomes) // 10]
    monkeypatch.setattr("fsdp_sim.explore.search.WHOLE", 0)
    monkeypatch.setattr("fsdp_sim.explore.search.MOST", 10)
    search = Search(space, outcomes.get, Bounds(SMALL, A100, {}))

    search.run(limit)

    best = min(one.seconds for one in outcomes.values() if one.bytes <= limit)
    assert outcomes[search.best(limit)].seconds <= 1.005 * best
    assert len(search.seen) < len(outcomes) / 2


def test_values_that_are_better_only_together_are_found():
    """Each alone is slower than none, so that no plan beside the best shows the way."""
    space = space_of(SMALL, A100, START, vary=["reshard_after_forward", *ALIKE])

    def look(plan):
        helps = (plan.reshard_after_forward is True) + (plan.forward_prefetch == 2)
        return Outcome((1.0, 1.1, 0.8)[helps], 1.0)

    search = Search(space, look, lambda plan, most=None: Outcome(0.7, 0.5))
    search.run(1.0)

    best = search.best(1.0)
    assert (best.reshard_after_forward, best.forward_prefetch) == (True, 2)
    assert len(search.seen) < len(space) / 4


def test_a_plan_that_waits_for_the_network_is_bounded_by_what_it_sends():
    """By all-gathers or by reduce-scatters: both may be in flight at once."""
    slow = replace(A100, bandwidth_gbps=1)
    sim = simulate(SMALL, slow, START)

    assert Bounds(SMALL, slow, {})(START).seconds * sim.tokens_per_s_per_gpu > 0.5


def test_the_best_fits_and_its_prices_are_those_of_simulations():
    found = tune(SMALL, A100, START, vary=SPACE)

    sim = simulate(SMALL, A100, found.best.plan)
    assert sim.fit is Fit.FITS
    assert (sim.step_time_s, sim.peak_memory_bytes) == (found.best.step_time_s, found.best.peak_memory_bytes)
    assert found.best.step_time_s < found.start.step_time_s
    assert found.worth
    for one in found.worth:
        without = replace(found.best.plan, **one.before)
        assert one.after == {name: getattr(found.best.plan, name) for name in one.after}
        assert one.without.step_time_s == simulate(SMALL, A100, without).step_time_s
    times = [one.step_time_s for one in found.front]
    memory = [one.peak_memory_bytes for one in found.front]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


def test_what_is_learnt_is_held():
    found = tune(SMALL, A100, START, global_batch=256)

    for plan in (found.best.plan, *(one.plan for one in found.front)):
        assert plan.micro_batch * plan.grad_accum * A100.gpus == 256
        for name in ("seq_len", "param_dtype", "reduce_dtype", "optimizer", "fp8", "clip_grad_norm", "lora_rank"):
            assert getattr(plan, name) == getattr(START, name)


def test_a_limit_of_memory_is_kept():
    least = tune(SMALL, A100, START, vary=SPACE).front[-1].peak_memory_bytes

    found = tune(SMALL, A100, START, vary=SPACE, memory_limit_bytes=1.5 * least)

    assert all(one.peak_memory_bytes <= 1.5 * least for one in (found.best, *found.front))


def test_where_nothing_fits_the_nearest_plan_and_what_would_help_are_told():
    found = tune("llama3-8b", Cluster("4090", gpus=2), replace(START, seq_len=2048), vary=["micro_batch", "compile"])

    assert found.best is None
    assert not found.nearest.fits
    assert found.would_fit


def test_ctrl_c_keeps_the_best_so_far():
    def interrupt(count, best):
        if count == 5:
            raise KeyboardInterrupt

    found = tune(SMALL, A100, START, vary=SPACE, on_simulated=interrupt)

    assert found.interrupted
    assert found.simulations == 5
    assert found.best.fits


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"vary": ["fp8"]}, "fp8 changes what is learnt"),
        ({"vary": ["seq_len"], "allow": ["seq_len"]}, "seq_len has no values of its own to try"),
        ({"vary": ["shard_sise"]}, "a plan has no shard_sise to vary or hold; did you mean shard_size?"),
        ({"vary": {"compile": ["yes"]}}, "Plan.compile is 'yes'; it must be True or False"),
        ({"vary": ["sharding_strategy"]}, "nothing varies"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes is -1; it must be a number > 0, or None"),
        ({"memory_limit_bytes": float("nan")}, "memory_limit_bytes is nan; it must"),
        ({"global_batch": 100}, "the global batch is 100, which 16 GPUs cannot share in micro-batches of 2"),
        ({"global_batch": 2**24}, "if these were tokens take 16,384"),
    ],
)
def test_what_is_impossible_is_refused(asked, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        tune(SMALL, A100, START, **asked)


def test_each_change_of_the_api_can_be_put_back_so_that_it_is_priced() -> None:
    """Units of the embedding and the head are fsdp2's alone."""
    start = replace(START, api="zero2")
    space = space_of(SMALL, A100, start, vary={"api": ["fsdp2"], "wrap": ["embed_block_head"]})
    both = space.with_fields(start, {"api": "fsdp2", "wrap": "embed_block_head"})

    assert both is not None
    assert both.wrap == "embed_block_head"
    assert space.with_fields(both, {"api": "zero2"}) == start


def test_experts_are_shared_out_where_a_model_has_them():
    """Eight experts cut into 64 shards are padded eightfold."""
    asked = Plan(seq_len=4096, param_dtype="bf16", reduce_dtype="fp32", activation_checkpointing="full")
    found = tune("mixtral-8x7b", Cluster("H100", gpus=64), asked, vary=["expert_parallel", "activation_checkpointing"])

    assert found.best.plan.expert_parallel == 8
    assert [value for (value,) in found.space.levers["expert_parallel"][1]] == [1, 2, 4, 8]
    assert "expert_parallel" not in space_of(SMALL, Cluster("H100", gpus=4), START).levers


def test_operators_whose_outputs_are_kept_are_those_that_the_model_has():
    kept = {
        name: [value for (value,) in space_of(Model.preset(name), A100, START).levers["activation_checkpointing"][1]]
        for name in ("gpt2-124m", "llama3-8b", "gpt-oss-20b")
    }

    assert kept["llama3-8b"] == [None, "selective", 2, "full", (SDPA,), ("mm", SDPA)]
    assert kept["gpt2-124m"][-1] == ("addmm", SDPA)  # its linear layers have biases
    assert kept["gpt-oss-20b"][-1] == ("addmm", "_grouped_mm", SDPA)


def test_activations_that_go_to_the_cpu_extend_the_front():
    vary = ("activation_checkpointing", "activation_offload")
    least, without = (tune(SMALL, A100, START, vary=vary, hold=held).front[-1] for held in ((), vary[1:]))

    assert least.plan.activation_offload
    assert least.peak_memory_bytes < without.peak_memory_bytes


BOUNDED = {
    "gpt": (SMALL, A100, START),
    "compared with torch's defaults": ("llama3-8b", Cluster("H100", gpus=8), Plan(grad_accum=4, seq_len=2048)),
    "experts": ("mixtral-8x7b", Cluster("H100", gpus=64), replace(START, seq_len=2048)),
    "adapters": ("llama3-8b", Cluster("A100-SXM-80GB", gpus=8), replace(START, lora_rank=16)),
    "activations on the CPU": (
        "llama3-8b",
        Cluster("H100", gpus=8),
        replace(START, seq_len=8192, activation_offload="streams"),
    ),
    "fsdp1": ("gpt2-1.5b", Cluster("4090", gpus=4), replace(START, api="fsdp1")),
}


@pytest.mark.parametrize("job", BOUNDED)
def test_no_plan_takes_less_than_its_bound(job):
    model, cluster, start = BOUNDED[job]
    model = Model.preset(model) if isinstance(model, str) else model
    space, bound = space_of(model, cluster, start), Bounds(model, cluster, {})
    random = Random(job)
    tight = []
    for plan in filter(None, (space.plan([random.randrange(size) for size in space.sizes]) for _ in range(12))):
        try:
            sim = simulate(model, cluster, plan)
            rate, n_bytes = sim.tokens_per_s_per_gpu, sim.peak_memory_bytes
        except ValueError:
            continue
        least = bound(plan)
        assert least.seconds * rate <= 1 + 1e-9, plan
        assert least.bytes <= n_bytes, plan
        tight.append(least.seconds * rate)
    assert max(tight) > 0.6  # it says something
