"""The tensors of a segment one by one: as many bytes at a time as `tape.walk` counts."""

from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import INCOMING, OUTGOING, PARAM_GRAD, kept_of, lifetimes
from fsdp_sim.cost.activations import block_activations, embed_activations, head_activations
from fsdp_sim.schedule import Policy, policy_of
from fsdp_sim.spec import Model, Plan

plans = st.builds(
    Plan,
    micro_batch=st.sampled_from([1, 4]),
    seq_len=st.sampled_from([64, 512]),
    param_dtype=st.sampled_from([None, "bf16"]),
    attention_impl=st.sampled_from(["sdpa", "math"]),
    cross_entropy=st.sampled_from(["torch", "fused"]),
)
models = st.sampled_from(["gpt2-124m", "llama3-8b", "bert-base"]).map(Model.preset)
segments = st.sampled_from([embed_activations, block_activations, head_activations])


def played(moves, alive):
    """The most alive at a time; ``alive`` becomes what is left."""
    most = sum(alive.values())
    for number, (which, n_bytes) in enumerate(moves):
        tensor = ("param", number) if which == PARAM_GRAD else which
        if n_bytes:
            assert tensor not in alive
            alive[tensor] = n_bytes
        else:
            alive.pop(tensor)
        most = max(most, sum(alive.values()))
    return most


@given(segments, models, plans, st.booleans())
def test_as_much_is_alive_as_the_walk_counts(segment, model, plan, fused_norm):
    found = segment(model, plan, fused_norm=fused_norm)
    passes = lifetimes(found.tape, checkpointed=False, policy=Policy())
    alive = {}
    assert played(passes.forward, alive) == found.saved_bytes + found.forward_temporary_bytes
    assert sum(alive.values()) == found.saved_bytes
    params = sum(n_bytes for tensor, n_bytes in passes.backward if tensor == PARAM_GRAD)
    alive[INCOMING] = found.output_bytes
    at_first = sum(alive.values())
    most = played(passes.backward, alive)
    assert most == max(at_first, found.saved_bytes + found.backward_temporary_bytes + params)
    gradients = {key for key in alive if not isinstance(key, tuple)}
    assert gradients <= ({OUTGOING} if found.input_bytes else set()) or gradients == {INCOMING}


policies = st.sampled_from([None, "selective", ("mm",), ("addmm", "scaled_dot_product_attention")])


@given(models, plans, policies)
def test_a_checkpointed_block_keeps_what_the_policy_says_and_makes_the_rest_again(model, plan, checkpointing):
    found, policy = block_activations(model, plan), policy_of(Plan(activation_checkpointing=checkpointing))
    passes = lifetimes(found.tape, checkpointed=True, policy=policy)
    alive = {}
    played(passes.forward, alive)
    assert sum(alive.values()) == found.output_bytes + kept_of(found.outputs, policy).bytes
    played(passes.recompute, alive)
    assert sum(alive.values()) == found.saved_bytes
