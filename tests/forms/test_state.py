"""A state is one line: it reads back as it was written, says what objects say, and names what is wrong with it."""

import pytest

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.forms import FormState, state_of
from fsdp_sim.spec import Link

PLANS = [
    Plan(),
    Plan(param_dtype="bf16", reduce_dtype="fp32", forward_prefetch=2, backward_prefetch=3, reshard_after_forward=4),
    Plan(api="fsdp1", sharding_strategy="HYBRID_SHARD", shard_size=8, forward_prefetch=True, limit_all_gathers=False),
    Plan(api="fsdp1", backward_prefetch="none", cpu_offload=True),
    Plan(api="ddp", bucket_cap_mb=50.5, grad_accum=4, requires_gradient_sync="last"),
    Plan(wrap=("layers.3", "layers.4"), activation_checkpointing=2, optimizer="sgd", seq_len=256),
    Plan(stack="llm-foundry", cross_entropy="torch"),
]


H100 = Cluster("H100", gpus=16)
OTHERS = [
    Cluster("V100", gpus=8), Cluster("cpu", gpus=8, bandwidth_gbps=4, latency_us=200),
    Cluster("A100", gpus=16, gpus_per_node=4, inter="400 Gb/s RoCE per GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "cluster"), [*((plan, H100) for plan in PLANS), *((Plan(), c) for c in OTHERS)])
def test_the_line_of_objects_means_these_objects(plan: Plan, cluster: Cluster) -> None:
    state = FormState.read(state_of("gpt2-124m", cluster, plan).line)
    assert (state.model, state.cluster, state.plan) == (Model.preset("gpt2-124m"), cluster, plan)


def test_a_model_of_ones_own_is_said_by_its_dimensions() -> None:
    model = Model("my model <b>", n_layer=3, d_model=64, n_head=4, d_ffn=128, vocab=100, bias=False)
    state = FormState.read(state_of(model, Cluster("H100", gpus=8), None).line)
    assert state.model == model


def test_what_no_word_can_say_is_refused_with_the_way_out() -> None:
    mine = Link("mine", bytes_per_s=3e9, family="ethernet")
    with pytest.raises(ValueError, match=r"cluster\.to_file\('mine\.toml'\)"):
        state_of("gpt2-124m", Cluster("H100", gpus=16, inter=mine), None)


def test_a_cluster_file_is_a_word(tmp_path) -> None:
    mine = Cluster("H100", gpus=16, inter=Link("mine", bytes_per_s=3e9, family="ethernet"))
    mine.to_file(tmp_path / "mine.toml")
    assert state_of("gpt2-124m", str(tmp_path / "mine.toml"), None).cluster == mine


@pytest.mark.parametrize(("line", "said"), [
    ("model=gpt2-124m gpu=H100 gpus=8 modle=x", "there is no modle; did you mean model?"),
    ("gpus=8 gpus=16", "gpus is given twice, as 8 and as 16"),
    ("gpus", "write name=value"),
    ("gpus=", "write name=value"),
    ("model='x", "No closing quotation"),
])  # fmt: skip
def test_a_line_that_cannot_be_read_is_answered(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        FormState.read(line)


@pytest.mark.parametrize(("words", "said"), [
    ("gpus=12", "take 8 or 16"),
    ("gpus=8 straggler=fast", "straggler is 'fast'; it must be a number"),
    ("gpus=1 jitter=0.1", "takes several ranks"),
    ("gpus=65536 straggler=2", "take fewer GPUs"),
    ("gpus=8 straggler=-1", "factor is -1.0"),
])  # fmt: skip
def test_an_impossible_plan_is_answered_with_the_remedy(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FormState.read(f"model=gpt2-124m gpu=H100 {words}").simulate().explain()


def test_a_straggler_makes_the_step_longer_and_1_changes_nothing() -> None:
    base = FormState.read("model=gpt2-124m gpu=A100 gpus=8 micro_batch=4")
    alone = simulate("gpt2-124m", Cluster("A100", gpus=8), base.plan).step_time_s
    assert base.with_texts({"straggler": "1"}).simulate().step_time_s == alone
    assert base.with_texts({"straggler": "1.5"}).simulate().step_time_s > 1.1 * alone
    assert base.with_texts({"jitter": "0.1"}).simulate().step_time_s > alone


def test_a_slow_node_slows_what_leaves_it() -> None:
    base = FormState.read("model=gpt2-124m gpu=A100 gpus=16 micro_batch=1")
    assert base.with_texts({"slow_node": "10"}).simulate().step_time_s > base.simulate().step_time_s
