"""What a transformer keeps: sums that can be done by hand, and what torch keeps of real modules of these dimensions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from torch import nn

from fsdp_sim.cost import kept_of
from fsdp_sim.cost.activations import block_activations, embed_activations, head_activations
from fsdp_sim.cost.tape import Activations, Step, Tape, walk
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.schedule import policy_of
from fsdp_sim.spec import Block, Model, Plan
from tests.measure.llama import Llama
from tests.measure.mem_tracker import gpt_of, tokens_of

GPT = Model("gpt", n_layer=3, d_model=256, n_head=4, d_ffn=1024, vocab=1000, max_seq_len=128)
LLAMA = Model(
    "llama", n_layer=3, d_model=256, n_head=8, n_kv_head=2, d_ffn=704, vocab=1000, ffn_type="swiglu", norm="rmsnorm",
    bias=False, positions="rope", tied_embeddings=False,
)  # fmt: skip
BF16 = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=4, seq_len=128)
TRAFFIC = {"input_bytes", "output_bytes", "forward_temporary_bytes", "backward_temporary_bytes"}
FP32 = Plan(micro_batch=2, seq_len=96)
MATH, MATH_FP32 = (dataclasses.replace(plan, attention_impl="math") for plan in (BF16, FP32))


# ---------------------------------------------------------------------- by hand


def test_a_gpt_block_keeps_sixteen_times_its_width_for_each_token() -> None:
    """Two norms, qkv (3), attention's output, the stream, up (4) and its gelu (4), the output: 16 D numbers of bf16;
    and in fp32 two statistics of each norm and one number per head."""
    tokens = 4 * 128
    assert block_activations(GPT, BF16).saved_bytes == tokens * (16 * 256 * 2 + 4 * (2 * 2 + 4))


def test_grouped_queries_keep_fewer_keys_and_values() -> None:
    tokens, kept = 4 * 128, block_activations(LLAMA, BF16).saved_bytes
    wide = dataclasses.replace(LLAMA, n_kv_head=8)
    assert block_activations(wide, BF16).saved_bytes - kept == tokens * 2 * (8 - 2) * 32 * 2


def test_attention_that_is_not_fused_keeps_the_probabilities_of_every_pair_of_tokens() -> None:
    """In fp32, 4 heads of 128 x 128 for each of 4 sequences; and queries, keys and values in fp32 too."""
    more = block_activations(GPT, MATH).saved_bytes - block_activations(GPT, BF16).saved_bytes
    of_fused = 4 * 128 * (3 * 256 * 2 + 4 * 4)
    assert more == 4 * 4 * 4 * 128**2 + 4 * 128 * 3 * 256 * 4 - of_fused


def test_relu_keeps_its_output_alone_where_gelu_keeps_its_input_too() -> None:
    relu = dataclasses.replace(GPT, ffn_type="relu")
    less = block_activations(GPT, BF16).saved_bytes - block_activations(relu, BF16).saved_bytes
    assert less == 4 * 128 * 1024 * 2


def test_attention_to_an_encoder_adds_a_norm_queries_keys_values_an_output_and_the_stream() -> None:
    more = block_activations(GPT, BF16, Block(cross=True)).saved_bytes - block_activations(GPT, BF16).saved_bytes
    assert more == 4 * 128 * (6 * 256 * 2 + 4 * (2 + 4))


def test_the_loss_keeps_the_log_probabilities_in_its_own_dtype() -> None:
    logits = 4 * 128 * 1000
    assert head_activations(GPT, BF16).logits_bytes == 4 * logits + 4
    in_bf16, uncast = (
        dataclasses.replace(GPT, dtype="bf16"),
        dataclasses.replace(BF16, cross_entropy="shifted_uncast"),
    )
    assert head_activations(GPT, uncast).logits_bytes == 4 * logits + 4, "beside autocast"
    assert head_activations(in_bf16, uncast).logits_bytes == 2 * logits + 2


@pytest.mark.parametrize(
    ("checkpointing", "kept"),
    [
        ("full", ()),
        ("selective", ("qkv", "attention", "up")),
        (("addmm",), ("qkv", "proj", "up", "down")),
        (("mm",), ()),  # its linear layers have biases
        (("scaled_dot_product_attention",), ("attention",)),
    ],
)
def test_a_policy_keeps_outputs_of_operators(checkpointing: Any, kept: tuple[str, ...]) -> None:
    d = 256 * 2
    bytes_of = {"qkv": 3 * d, "attention": d + 4 * 4, "proj": d, "up": 4 * d, "down": d}
    policy = policy_of(Plan(activation_checkpointing=checkpointing))
    assert kept_of(block_activations(GPT, BF16).outputs, policy).bytes == 4 * 128 * sum(bytes_of[of] for of in kept)


def test_the_walk_counts_what_is_alive() -> None:
    """x -> a (10, not kept) -> b (20, kept) -> y (5); the last step makes 7 bytes of gradients."""
    steps = [Step(("x",), ("a",)), Step(("a",), ("b",)), Step(("b",), ("y",), ("b",), param_bytes=7)]
    seen = walk(Tape({"x": 1, "a": 10, "b": 20, "y": 5}, steps))
    assert seen._replace(tape=None) == Activations(
        saved_bytes=25,  # b and y
        input_bytes=1,
        output_bytes=5,
        forward_temporary_bytes=30 - 25,  # a and b, while b is made
        backward_temporary_bytes=20 + 5 + 20 + 7 - 25 - 7,  # b, the gradients of y and of b, and those of parameters
        saves_input=False,
    )


# ---------------------------------------------------------------------- what torch keeps


@pytest.mark.parametrize("plan", [BF16, FP32, MATH, MATH_FP32], ids=["bf16", "fp32", "math", "math-fp32"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("fused_norm", [True, False], ids=["gpu", "cpu"])
def test_a_real_module_keeps_and_needs_as_much(model: Model, plan: Plan, fused_norm: bool) -> None:
    build = functools.partial(gpt_of, model) if model.bias is True else functools.partial(Llama, model, norm=nn.RMSNorm)
    traced = model_from_module(
        build, tokens_of(plan), plan=plan, device="gpu" if fused_norm else "cpu", progress=False
    ).work
    for segment, ours in {
        "embed": embed_activations(model, plan, fused_norm=fused_norm),
        "layers.1": block_activations(model, plan, fused_norm=fused_norm),
        "head": head_activations(model, plan, fused_norm=fused_norm),
    }.items():
        work = traced[segment]
        slack = 0.01 * work.saved_bytes + 2 * plan.seq_len * 32 * 4  # statistics of norms, and tables of positions
        assert set(ours._fields) == {"saved_bytes", "outputs", "logits_bytes", "saves_input", "tape", *TRAFFIC}
        for output, theirs in zip(ours.outputs, work.outputs, strict=True) if work.is_block else ():
            assert output == (theirs.op, *(pytest.approx(n, abs=slack) for n in theirs[1:3]), output.needed), segment
        for field in set(ours._fields) - {"saves_input", "tape", "outputs"}:
            if fused_norm or field not in TRAFFIC:
                held = plan.attention_impl == "math" and field == "forward_temporary_bytes"  # by C++, in its own order
                near = pytest.approx(getattr(work, field), abs=max(slack, 0.1 * work.saved_bytes * held))
                assert getattr(ours, field) == near, (segment, field)
