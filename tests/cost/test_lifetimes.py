"""The tensors of a segment one by one: as many bytes at a time as `tape.walk` counts."""

from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import INCOMING, OUTGOING, PARAM_GRAD, lifetimes
from fsdp_sim.cost.activations import block_activations, embed_activations, head_activations
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
    passes = lifetimes(found.tape, checkpointed=False, selective=False)
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


@given(models, plans, st.booleans())
def test_a_checkpointed_block_keeps_its_output_and_makes_the_rest_again(model, plan, selective):
    found = block_activations(model, plan)
    passes = lifetimes(found.tape, checkpointed=True, selective=selective)
    alive = {}
    played(passes.forward, alive)
    also_kept = found.selective_bytes if selective else 0
    assert sum(alive.values()) == found.output_bytes + also_kept
    played(passes.recompute, alive)
    assert found.saved_bytes <= sum(alive.values()) <= found.saved_bytes + also_kept
