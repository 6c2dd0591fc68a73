"""Many simulations for one question: levers that help, searches that end at the edge, fronts that are fronts."""

import importlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdp_sim.explore
from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.diagnose import Culprit
from fsdp_sim.explore import (
    Sweep,
    changes_that_fit,
    changes_that_help,
    combinations,
    counted,
    front_of,
    largest,
    pareto,
    played_front,
)
from fsdp_sim.explore.changes import levers
from fsdp_sim.explore.largest import _search
from fsdp_sim.explore.sweep import table
from fsdp_sim.simulation import Fit

A100 = Cluster("A100-SXM-40GB", gpus=8)


PLANS = {
    "fsdp2": Plan(seq_len=2048, micro_batch=6, reshard_after_forward=False, shard_size=4),
    "fsdp1": Plan(api="fsdp1", seq_len=2048, micro_batch=2, sharding_strategy="HYBRID_SHARD", shard_size=4),
    "grad op": Plan(api="fsdp1", seq_len=2048, sharding_strategy="SHARD_GRAD_OP"),
    "ddp": Plan(api="ddp", seq_len=2048),
    "zero2": Plan(api="zero2", seq_len=2048),
    "root": Plan(wrap="root", seq_len=2048, attention_impl="math"),
    "no sync": Plan(seq_len=2048, grad_accum=2, requires_gradient_sync="last", forward_prefetch=4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_lever_is_a_plan_that_can_be_simulated_and_costs_no_memory(plan):
    model = replace(Model.preset("llama2-7b"), n_layer=8)
    before = simulate(model, A100, plan)
    saved = {}

    for lever in levers(A100, plan):
        peaks = []
        for setting in lever.settings[:2]:
            of_plan = {key: value for key, value in setting.set.items() if key != "gpus"}
            cluster = replace(A100, gpus=setting.set.get("gpus", 8))
            peaks.append(simulate(model, cluster, replace(plan, **of_plan)).peak_memory_bytes)
        assert peaks == sorted(peaks, reverse=True), lever.name
        saved[lever.name] = before.peak_memory_bytes - peaks[-1]
    sums = 2 * 4 * model.vocab * model.d_model  # of the head's gradient, to which every chunk of the loss adds
    assert saved.pop("loss") >= -sums
    assert min(saved.values()) >= 0, saved  # what a lever saves need not be alive at the peak
    assert saved["sharding" if "sharding" in saved else "checkpointing"] > 0 or saved["wrap"] > 0


def test_a_single_change_is_enough_or_pairs_are_tried():
    model = Model.preset("llama2-7b")
    alone = changes_that_fit(model, A100, Plan(seq_len=4096, micro_batch=2, param_dtype="bf16"))
    pairs = changes_that_fit(Model.preset("llama2-70b"), A100, Plan(seq_len=4096, param_dtype="bf16"))

    assert alone
    assert all(";" not in change.what for change in alone)
    assert pairs
    assert all(change.what.count(";") == 1 for change in pairs)
    for found in (alone, pairs):
        rates = [change.tokens_per_s_per_gpu for change in found]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("name", "gpus", "plan", "change"),
    [
        ("llama3-8b", 8, Plan(seq_len=32768, activation_checkpointing="full", param_dtype="bf16"), {"loss_chunks": 8}),
        (
            "llama3-405b", 16384, Plan(seq_len=8192, activation_checkpointing="full", param_dtype="bf16"),
            {"activation_offload": "streams"},
        ),
        (
            "gemma2-9b", 16, Plan(api="fsdp1", seq_len=4096, param_dtype="bf16", limit_all_gathers=False),
            {"limit_all_gathers": True},
        ),
    ],
    ids=["logits", "checkpoints", "gathers"],
)  # fmt: skip
def test_what_takes_the_memory_is_what_is_changed(name, gpus, plan, change):
    """And as the step is bound by compute it takes no longer."""
    now = simulate(name, Cluster("H100", gpus=gpus), plan)
    found = {tuple(one.set.items()): one for one in changes_that_fit(Model.preset(name), now.cluster, plan)}

    assert now.fit is not Fit.FITS
    assert found[tuple(change.items())].step_time_s < 1.01 * now.step_time_s


def test_where_nothing_helps_there_is_no_change():
    tiny = Cluster("V100-SXM2-16GB", gpus=1)
    model = Model(name="wide", n_layer=1, d_model=65536, n_head=64, d_ffn=262144, vocab=10_000_000, bias=False)

    assert changes_that_fit(model, tiny, Plan(api="ddp", seq_len=2048)) == []


class Fake:
    """In place of a simulation: fits up to an edge."""

    def __init__(self, fits):
        self.fit = Fit.FITS if fits else Fit.DOES_NOT_FIT


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(1, 4000))
def test_the_search_ends_at_the_edge_or_at_the_bound(edge, step, bound):
    bound = max(bound, step)
    value, fits, beyond, too_large = _search(lambda n: Fake(n <= edge), step, bound)

    expected = min(edge, bound) // step * step
    assert value == (expected or None)
    assert (fits is not None) == (value is not None)
    if beyond is None:
        assert value + step > bound
    else:
        assert beyond == expected + step <= bound
        assert too_large.fit is not Fit.FITS


@pytest.mark.parametrize(
    ("what", "grad_accum", "value", "ends"),
    [
        ("layers", 1, 1_000, "the search ends at 1,000"),
        ("layers", 400, 19, "the search ends at 10,000 blocks in a step (layers times grad_accum)"),  # 6 of the encoder
        ("model", 1, "deepseek-v3", "deepseek-v3 is the largest model of the catalogue"),
        ("model", 800, "pythia-160m", "t5-base is larger and refused: 19,200 blocks in a step"),
    ],
)
def test_where_everything_fits_the_search_ends_before_a_step_that_nobody_waits_for(
    what, grad_accum, value, ends, monkeypatch
):
    played = []

    def fits(model, cluster, plan):
        played.append((model.n_layer + model.n_encoder_layer) * plan.grad_accum)
        return Fake(True)

    monkeypatch.setitem(largest.__globals__, "simulate", fits)
    found = largest(what, Model.preset("t5-small"), A100, Plan(grad_accum=grad_accum))

    assert (found.value, found.next) == (value, None)
    assert found.ends.startswith(ends)
    assert max(played) <= 10_000


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_front_is_what_no_point_beats(points):
    front = pareto(points)
    chosen = {points[n] for n in front}

    for point in set(points):
        beaten = any(a <= point[0] and b <= point[1] and (a, b) != point for a, b in points)
        assert (point in chosen) == (not beaten)
    assert len(front) == len(chosen)


@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.lists(st.text("xyz", min_size=1), min_size=1, max_size=4, unique=True),
        max_size=4,
    )
)
def test_combinations_are_all_of_them_the_last_name_fastest(vary):
    found = list(combinations(vary))

    count = 1
    for values in vary.values():
        count *= len(values)
    assert len(found) == count
    places = [[list(vary[name]).index(row[name]) for name in vary] for row in found]
    assert places == sorted(places)


def test_the_table_has_numbers_and_gaps():
    pd = pytest.importorskip("pandas")
    rows = [fsdp_sim.explore.row_of({"model": "gpt2-124m", "gpu": "A100", "gpus": n}) for n in ("8", "12")]
    frame = table(rows)

    assert isinstance(frame, pd.DataFrame)
    assert frame["step_time_s"].tolist()[0] > 0
    assert frame["step_time_s"].isna().tolist() == [False, True]
    assert frame["fit"].tolist()[0] == "fits"
    assert "does not fill nodes" in frame["error"][1]


def test_changes_are_steps_of_which_each_can_be_tried():
    """A micro-batch of 8,192 is not cut into 8,192 of them, each of which would have to be played."""
    model, cluster = Model.preset("gpt2-124m"), Cluster("H100", gpus=8)

    changes = changes_that_fit(model, cluster, Plan(micro_batch=8_192, param_dtype="bf16"))

    assert changes
    assert all(change.set.get("grad_accum", 1) * model.n_layer <= 2_000 for change in changes)
    assert changes_that_fit(model, cluster, Plan(micro_batch=8_192, grad_accum=1_000)) == []


@pytest.mark.parametrize(
    ("gpus", "bandwidth_gbps", "plan"),
    [(512, 100, {}), (64, 100, {"shard_size": 8}), (512, 100, {"api": "fsdp1"}), (16, 50, {"api": "ddp"})],
    ids=str,
)
def test_advice_is_what_was_simulated_and_makes_training_faster(gpus, bandwidth_gbps, plan):
    cluster = Cluster("H100-SXM-80GB", gpus=gpus, bandwidth_gbps=bandwidth_gbps)
    now = simulate("gpt2-1.5b", cluster, Plan(**plan))

    found = changes_that_help(Model.preset("gpt2-1.5b"), now)

    assert found
    for change in found:
        after = simulate("gpt2-1.5b", now.cluster, replace(now.plan, **change.set))
        assert after.fit == change.fit != Fit.DOES_NOT_FIT
        assert change.tokens_per_s_per_gpu == after.tokens_per_s_per_gpu >= 1.01 * now.tokens_per_s_per_gpu


@pytest.mark.parametrize(
    ("name", "plan", "advised"),
    [
        ("phi-4", {"activation_checkpointing": "full"}, {"activation_checkpointing": None, "compile": True}),
        ("gpt2-350m", {"api": "ddp", "micro_batch": 8, "param_dtype": None}, {"param_dtype": "bf16"}),
        ("gpt2-1.5b", {"micro_batch": 8, "activation_offload": "save_on_cpu"}, {"activation_offload": "streams"}),
        ("llama3-8b", {"seq_len": 2048, "wrap": "root"}, {"wrap": "block"}),
    ],
    ids=["recomputes", "fp32", "copies", "one unit"],
)
def test_what_helps_whatever_a_step_waits_for_is_told_too(name, plan, advised):
    now = simulate(name, Cluster("H100", gpus=16), Plan(**{"param_dtype": "bf16", "seq_len": 1024} | plan))
    found = changes_that_help(Model.preset(name), now)

    for field, value in advised.items():
        (change,) = [one for one in found if one.set == {field: value}]
        after = simulate(name, now.cluster, replace(now.plan, **change.set))
        assert after.tokens_per_s_per_gpu == change.tokens_per_s_per_gpu >= 1.01 * now.tokens_per_s_per_gpu


def test_what_does_not_help_is_not_advised():
    """All-gathers stand behind reductions, but the wire is full: another communicator only shares it."""
    now = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=512, bandwidth_gbps=100), Plan(param_dtype="bf16"))
    own_group = replace(now.plan, separate_reduce_scatter_group=True)

    assert Culprit.HEAD_OF_LINE in {blame.culprit for blame in now.explain().culprits}
    assert simulate("llama3-8b", now.cluster, own_group).step_time_s >= 0.99 * now.step_time_s
    found = changes_that_help(Model.preset("llama3-8b"), now)
    assert not any("separate_reduce_scatter_group" in change.set for change in found)


def test_what_has_no_room_alone_may_have_it_with_an_allocator_that_grows_its_segments():
    """And groups of more than a node gather over the network as all ranks would, and all-reduce on top."""
    cluster = Cluster("H100-SXM-80GB", gpus=256, inter="100GbE")
    plan = Plan(seq_len=8192, shard_size=32, activation_checkpointing="full", param_dtype="bf16", reduce_dtype="fp32")
    now = simulate("llama3-70b", cluster, plan)

    found = {tuple(change.set): change for change in changes_that_help(Model.preset("llama3-70b"), now)}

    assert simulate("llama3-70b", cluster, replace(plan, micro_batch=2)).fit is Fit.DOES_NOT_FIT
    assert found["micro_batch", "expandable_segments"].fit == Fit.EDGE
    assert found["shard_size",].set == {"shard_size": None}


def test_one_gpu_without_fsdp_is_told_of_offload_with_it():
    model, plan = Model.preset("qwen2.5-7b"), Plan(api="ddp", seq_len=2048)
    (change,) = changes_that_fit(model, Cluster("A100-SXM-40GB", gpus=1), plan)

    assert change.set["api"] == "fsdp2"
    assert change.set["cpu_offload"]


def test_of_a_large_sweep_the_front_is_certain_and_what_others_may_is_said(monkeypatch):
    vary = {"seq_len": ["4096", "8192", "16384"], "forward_prefetch": ["none", "2"]}
    asked = Sweep({"model": "llama3-8b", "gpu": "H100", "gpus": "8"}, vary)
    each = [row["fit"] for row in asked.rows()]
    monkeypatch.setattr("fsdp_sim.explore.sweep.MOST_PLAYED", 5)

    rows = list(asked.rows())
    front = played_front(rows)

    assert front == front_of(rows)
    assert [rows[place]["fit"] for place in front] == [each[place] for place in front]
    others = [(row["fit"], each[place]) for place, row in enumerate(rows) if place not in front]
    assert {fit for fit, _ in others} == {"may fit", "does not fit"}
    assert all(fit in ("may fit", really) for fit, really in others)
    assert "2 may fit (their tensors do; torch's allocator was played for the front alone)" in counted(rows)


@pytest.mark.parametrize("processes", [2, 3, 16])
def test_plans_of_one_program_are_simulated_by_one_process_and_all_have_as_much_to_do(processes):
    numbers = list(map(str, range(1, 11)))
    vary = {"gpus": numbers, "micro_batch": ["1", "2"], "grad_accum": numbers, "forward_prefetch": ["none", "1"]}
    sweep = Sweep({}, vary)

    owners, programs = list(sweep.owners(0, processes)), {}
    for owner, texts in zip(owners, combinations(vary), strict=True):
        programs.setdefault((texts["gpus"], texts["grad_accum"], texts["forward_prefetch"]), set()).add(owner)
    shares = [owners.count(process) for process in range(processes)]

    assert all(len(own) == 1 for own in programs.values())
    if processes == 2:  # enough of them, whatever the GPUs
        assert all(len(set().union(*(programs[g, a, f] for g in numbers))) == 1 for _, a, f in programs)
    assert max(shares) <= 1.15 * len(owners) / processes
    assert list(sweep.owners(7, processes)) == owners[7:]


def test_plans_of_few_programs_are_shared_out_all_the_same():
    sweep = Sweep({}, {"gpus": ["8", "16"], "micro_batch": list(map(str, range(1, 21)))})
    owners = list(sweep.owners(0, 2))

    assert abs(owners.count(0) - owners.count(1)) <= 2
    assert all(len(set(owners[row : row + 4])) == 2 for row in range(0, 40, 4))


@pytest.mark.slow
def test_many_micro_batches_are_not_simulated_where_two_do_not_fit(monkeypatch):
    """65,536 sequences at once fit nowhere; as 128 micro-batches they do not either, which two of them tell."""
    simulated = []

    def spy(model, cluster, plan, **options):
        sim = simulate(model, cluster, plan, **options)
        simulated.append((plan.grad_accum, sim.fit))
        return sim

    monkeypatch.setattr("fsdp_sim.explore.changes.simulate", spy)

    assert changes_that_fit(Model.preset("gpt2-124m"), Cluster("H100", gpus=8), Plan(micro_batch=65_536)) == []
    many = [k for k, (micro_batches, _) in enumerate(simulated) if micro_batches > 2]
    assert all(simulated[k - 1][0] == 2 and simulated[k - 1][1] is not Fit.DOES_NOT_FIT for k in many)
    assert len(many) < len(simulated) / 4


@pytest.mark.parametrize(("what", "step"), [("micro-batch", 1), ("seq-len", 128)])
@pytest.mark.parametrize("plan", [Plan(grad_accum=7), Plan(grad_accum=7, requires_gradient_sync=False)])
def test_what_is_looked_for_with_two_micro_batches_is_what_all_of_them_find(what, step, plan, monkeypatch):
    model, cluster = Model.preset("gpt2-124m"), Cluster("A100-SXM-40GB", gpus=8)
    model = replace(model, n_layer=2, positions="rope", max_seq_len=None)
    found = largest(what, model, cluster, replace(plan, seq_len=512), multiple_of=step)
    assert {sim.plan.grad_accum for sim in (found.fits, found.too_large) if sim} == {7}

    monkeypatch.setattr(importlib.import_module("fsdp_sim.explore.largest"), "in_short", lambda plan: plan)
    in_full = largest(what, model, cluster, replace(plan, seq_len=512), multiple_of=step)

    assert (found.value, found.next, found.ends) == (in_full.value, in_full.next, in_full.ends)


def test_what_would_help_is_what_its_words_say_and_is_said_once():
    """Two causes of a wait advise gradients without sync in all but the last micro-batch."""
    plan = replace(Plan(param_dtype="bf16", reduce_dtype="fp32"), cpu_offload=True, clip_grad_norm=True)
    found = changes_that_help(Model.preset("llama3-8b"), simulate("llama3-8b", Cluster("H100", gpus=8), plan))

    [without_sync] = [change for change in found if "set_requires_gradient_sync(False)" in change.what]
    assert without_sync.set == {"grad_accum": 2, "requires_gradient_sync": "last"}
