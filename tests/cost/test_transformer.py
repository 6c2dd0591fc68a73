"""The work of a transformer: FLOPs as the formulas have them, units as the plan cuts them."""

from dataclasses import replace

import pytest

from fsdp_sim.cost import Kernel, kept_of, recomputed, workload
from fsdp_sim.schedule import policy_of
from fsdp_sim.spec import Model, Plan

GPT, LLAMA, T5 = Model.preset("gpt2-124m"), Model.preset("llama3-8b"), Model.preset("t5-small")


def test_the_matmuls_of_a_gpt_block_are_24_d_squared_flops_a_token() -> None:
    work = workload(GPT, Plan(micro_batch=2, seq_len=512)).work["layers.0"]

    matmuls = sum(k.flops for k in work.forward if k.kind == "matmul")

    assert matmuls == 24 * GPT.d_model**2 * 1024


def test_the_backward_of_matmuls_is_twice_their_forward() -> None:
    for model in (GPT, LLAMA, T5):
        for work in workload(model, Plan(seq_len=256)).work.values():
            forward, backward = (
                sum(k.flops for k in kernels if k.kind == "matmul") for kernels in (work.forward, work.backward)
            )
            assert backward == 2 * forward


def test_causal_attention_is_half_of_the_square() -> None:
    def attention(model: Model) -> float:
        return sum(
            k.flops for k in workload(model, Plan(seq_len=256)).work["layers.0"].forward if k.kind == "attention"
        )

    bert = Model.preset("bert-base")
    assert attention(bert) == 4 * 256**2 * bert.d_model
    assert attention(GPT) == attention(bert) / 2


def test_grouped_queries_shrink_the_projections_and_not_the_attention() -> None:
    shape = {"name": "m", "n_layer": 1, "d_model": 512, "n_head": 8, "d_ffn": 1024, "vocab": 1000, "ffn_type": "swiglu",
             "norm": "rmsnorm", "bias": False, "positions": "rope"}  # fmt: skip
    many, few = (workload(Model(**shape, n_kv_head=n), Plan(seq_len=64)).work["layers.0"] for n in (8, 2))

    assert [k.flops for k in few.forward if k.kind == "attention"] == [
        k.flops for k in many.forward if k.kind == "attention"
    ]
    matmuls = [sum(k.flops for k in w.forward if k.kind == "matmul") for w in (many, few)]
    assert matmuls[0] - matmuls[1] == 2 * 64 * 512 * 2 * (512 - 128)


def test_the_whole_model_is_six_flops_a_parameter_and_token() -> None:
    made = workload(LLAMA, Plan(seq_len=128))

    flops = sum(w.forward_flops + w.backward_flops for w in made.work.values())
    embedding = LLAMA.vocab * LLAMA.d_model  # is looked up, not multiplied

    assert flops / made.tokens == pytest.approx(6 * (made.param_count - embedding), rel=0.02)


@pytest.mark.parametrize(
    ("wrap", "units", "segments"),
    [
        ("block", 13, ("embed", ..., "head")),
        (1_000_000, 13, ("embed", ..., "head")),
        (1_000_000_000, 1, ("embed", *(f"layers.{i}" for i in range(12)), ..., "head")),
        ("root", 1, ("embed", *(f"layers.{i}" for i in range(12)), ..., "head")),
        (("layers.10", "layers.11"), 3, ("embed", *(f"layers.{i}" for i in range(10)), ..., "head")),
    ],
)
def test_the_plan_says_what_is_a_unit(wrap: object, units: int, segments: tuple) -> None:
    made = workload(GPT, Plan(wrap=wrap, seq_len=64))

    assert len(made.units) == units
    assert made.units[0].segments == segments
    held = sum(p.bytes for u in made.units for p in u.params)
    assert held == 4 * GPT.param_count


def test_every_segment_of_every_unit_has_work() -> None:
    for model in map(Model.preset, Model.presets()):
        made = workload(model, Plan(seq_len=model.seq_len_of_image or 64))
        assert {s for u in made.units for s in u.names_of_segments} == set(made.work)
        assert made.param_count >= model.param_count


def test_an_encoder_decoder_attends_to_its_encoder() -> None:
    made = workload(T5, Plan(seq_len=64))

    attentions = {name: sum(k.kind == "attention" for k in w.forward) for name, w in made.work.items()}

    assert attentions["encoder.0"] == 1
    assert attentions["decoder.0"] == 2


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (GPT, Plan(seq_len=2048), "Plan.seq_len is 2048, but gpt2-124m has learned positions for 1024 tokens"),
        (GPT, Plan(wrap=("layers.99",)), "Plan.wrap names 'layers.99'; gpt2-124m has the blocks layers.0 to layers.11"),
        (GPT, Plan(wrap=("layers.0", "layers.2")), "Plan.wrap leaves out layers.1, which runs between"),
    ],
)
def test_what_a_model_does_not_have_is_an_error(model: Model, plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(model, plan)


def test_a_loss_in_chunks_computes_the_same_in_forward_and_never_has_the_logits_whole() -> None:
    plan = Plan(param_dtype="bf16", micro_batch=4, seq_len=2048)
    whole, chunks = (workload(LLAMA, replace(plan, loss_chunks=n)).work["head"] for n in (1, 8))

    def flops(*kernels: Kernel) -> float:
        return sum(k.flops * k.count for k in kernels)

    logits = 4 * 2048 * LLAMA.vocab
    weight, grad = (2 * n * LLAMA.d_model for n in (LLAMA.vocab, 4 * 2048))
    assert flops(*chunks.forward) == flops(*whole.forward, *whole.backward)
    assert flops(*chunks.backward) == 0
    assert chunks.saved_bytes == weight + grad < whole.saved_bytes
    assert whole.saved_bytes + whole.forward_temporary_bytes >= (2 + 4 + 4) * logits
    assert chunks.saved_bytes + chunks.forward_temporary_bytes < (2 + 4 + 4) * logits / 8 + 3 * (weight + grad)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (GPT, {"loss_chunks": 3}, "loss_chunks is 3, which is no divisor of seq_len 1024"),
        (GPT, {"loss_chunks": 2, "loss_metrics": 1}, "not for logits that are read again"),
        (Model.preset("bert-base"), {"loss_chunks": 2, "seq_len": 512}, "bert-base has no head of a language model"),
    ],
)
def test_a_loss_that_cannot_be_cut_is_refused(model: Model, fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(model, Plan(**fields))


@pytest.mark.parametrize("plan", [Plan(), Plan(lora_rank=4), Plan(fp8="tensorwise")], ids=["plain", "LoRA", "fp8"])
def test_kernels_and_activations_name_the_same_operators(plan: Plan) -> None:
    """What is kept in memory is what is not computed again."""
    for name in Model.presets():
        model = Model.preset(name)
        if model.adaln and plan != Plan():  # of the layer that modulates, adapters and fp8 are not told apart in memory
            continue
        asked = replace(plan, seq_len=model.seq_len_of_image or 128)
        for work in workload(model, asked).work.values():
            if work.is_block:
                ops = [kernel.op for kernel in work.forward if kernel.op for _ in range(kernel.count)]
                assert ops == [output.op for output in work.outputs], name


def test_a_compiler_neither_keeps_nor_computes_again_what_nothing_needs() -> None:
    """Of Llama the output of the last linear layer, which is kept for nothing; as torch's partitioner has it."""
    model = Model.preset("llama3-8b")
    eager, compiled = (Plan(seq_len=128, activation_checkpointing="selective", compile=c) for c in (False, True))
    work = workload(model, eager).work["layers.1"]
    kept = [kept_of(work.outputs, policy_of(plan)).bytes for plan in (eager, compiled)]
    assert kept[0] - kept[1] == work.output_bytes
    full = replace(compiled, activation_checkpointing="full")
    again = sum(k.flops * k.count for k in recomputed(workload(model, full).work["layers.1"], full))
    assert again == work.forward_flops - 2 * 128 * model.d_model * model.d_ffn
