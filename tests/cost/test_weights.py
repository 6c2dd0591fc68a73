"""What a plan makes of a model's weights, frozen, with adapters, quantised, in fp8: their work, bytes and units."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import Work, Workload, workload
from fsdp_sim.schedule import Param, build
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Memory, Op, Phase

LLAMA, GPT, T5 = Model.preset("llama3-8b"), Model.preset("gpt2-124m"), Model.preset("t5-small")
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=2, seq_len=512)
TOKENS = 1024


def made(model: Model = LLAMA, **fields: object) -> Workload:
    return workload(model, replace(PLAN, **fields))


def matmul_flops(work: Work, backward: bool = True, dtype: str | None = None) -> float:
    kernels = work.backward if backward else work.forward
    return sum(k.flops * k.count for k in kernels if k.kind == "matmul" and dtype in (None, k.dtype))


def test_quantised_experts_are_linear_layers_one_after_the_other() -> None:
    mixtral = Model.preset("mixtral-8x7b")
    attention = {"lora_rank": 8, "lora_targets": ("wq", "wv")}
    whole, packed = (made(mixtral, base_quantization=how, **attention) for how in (None, "nf4"))
    experts = [
        sum(math.prod(p.shape) for unit in work.units for p in unit.params if "experts." in p.name)
        for work in (whole, packed)
    ]
    whole_block, block = whole.work["layers.0"], packed.work["layers.0"]

    assert experts[1] * 4 == experts[0]  # four bits of sixteen
    assert sum(k.kind == "matmul" and mixtral.d_ffn in k.shape for k in block.forward) == 3 * (mixtral.n_expert or 0)
    assert matmul_flops(block, backward=False) == matmul_flops(whole_block, backward=False)
    assert block.saved_bytes == pytest.approx(
        whole_block.saved_bytes, rel=0.001
    )  # a whole expert is there for a moment


def test_experts_in_a_loop_are_cut_by_their_own_rows_adapted_and_gathered_in_fp8() -> None:
    """As `nn.Linear` of their own are: eight experts on 32 ranks need no padding (transformers before 5)."""
    mixtral, n = Model.preset("mixtral-8x7b"), 8 * 3
    d, width, rank = mixtral.d_model, mixtral.d_ffn, 16
    fp8 = {"fp8": "tensorwise", "fp8_all_gather": True}
    grouped, loop, adapted, in_fp8 = (
        made(mixtral, **fields)
        for fields in (
            {}, {"experts_impl": "loop"}, {"experts_impl": "loop", "lora_rank": rank}, {"experts_impl": "loop", **fp8}
        )
    )  # fmt: skip

    def experts(work: Workload) -> list[Param]:
        return [p for p in work.units[1].params if p.name.startswith("experts.")]

    assert [p.padded_bytes(32) // p.bytes for p in experts(grouped)] == [4, 4]
    assert [p.padded_bytes(32) // p.bytes for p in experts(loop)] == [1] * n
    assert sum(p.bytes for p in experts(loop)) == sum(p.bytes for p in experts(grouped))
    lora = [p for p in experts(adapted) if "lora" in p.name]
    assert sum(math.prod(p.shape) for p in lora) == n * rank * (d + width)
    assert {p.requires_grad for p in experts(adapted) if p not in lora} == {False}
    more = matmul_flops(adapted.work["layers.1"], backward=False) - matmul_flops(loop.work["layers.1"], backward=False)
    rows_of_experts, of_attention = TOKENS * 2 * 3 * (d + width), TOKENS * (4 * d + 2 * d + 2 * d // 4)
    assert more == 2 * rank * (rows_of_experts + of_attention)
    assert {p.gather_dtype for p in experts(in_fp8)} == {"fp8"}


@pytest.mark.parametrize(("targets", "adapted"), [
    (("w1",), {"gate"}), (("experts.down",), {"down"}), (("gate_proj", "down_proj"), {"gate", "down"}),
    (("wq",), set()),
])  # fmt: skip
def test_adapters_of_experts_in_a_loop_are_where_their_names_say(targets, adapted) -> None:
    work = made(Model.preset("mixtral-8x7b"), experts_impl="loop", lora_rank=8, lora_targets=targets)
    names = {p.name.split(".")[2] for p in work.units[1].params if p.name.startswith("experts.") and "lora" in p.name}
    assert names == adapted


def test_experts_of_one_tensor_are_no_linear_layers_to_adapt() -> None:
    with pytest.raises(ValueError, match=r"'experts.up', which is no linear layer of a block .*attn.wo$"):
        made(Model.preset("mixtral-8x7b"), lora_rank=8, lora_targets=("experts.up",))


# -- frozen


def test_a_frozen_matrix_has_the_gradient_of_its_input_and_none_of_its_own() -> None:
    whole, frozen = (made(freeze=freeze).work["layers.1"] for freeze in (None, ("layers.*.ffn",)))
    ffn = 2 * TOKENS * 3 * LLAMA.d_model * LLAMA.d_ffn

    assert matmul_flops(frozen) == matmul_flops(whole) - ffn
    assert frozen.forward == whole.forward
    assert whole.saved_bytes - frozen.saved_bytes == 2 * TOKENS * (LLAMA.d_model + LLAMA.d_ffn)  # inputs of the ffn


def test_nothing_is_computed_backward_below_the_first_parameter_that_trains() -> None:
    sim = simulate(
        "gpt2-124m",
        Cluster("H100", gpus=8),
        replace(PLAN, freeze=("embed", "layers.0", "layers.1", "layers.2.attn_norm")),
    )

    backward = [i.unit for i in sim.program.ops if i.op is Op.BWD]
    reduced = {i.unit for i in sim.program.ops if i.op is Op.REDUCE_SCATTER}
    first, second = sim.workload.work["layers.2"], sim.workload.work["layers.3"]

    assert backward == ["head", *(f"layers.{i}" for i in range(11, 1, -1))]
    assert reduced == {"root", *(f"layers.{i}" for i in range(2, 12))}  # the root trains its last norm
    qkv = 2 * TOKENS * 768 * 3 * 768  # the first has no input that needs a gradient
    assert matmul_flops(second) - matmul_flops(first) == qkv


@given(st.sets(st.sampled_from(["attn", "ffn", "attn_norm", "ffn_norm", "*.weight", "*.bias"]), min_size=1),
       st.sampled_from([GPT, LLAMA, T5]))  # fmt: skip
def test_freezing_more_never_takes_more(parts: set[str], model: Model) -> None:
    whole = made(model)
    some = made(model, freeze=tuple(f"*layers.*.{p}" if model is not T5 else f"*coder.*.{p}" for p in parts
                                    if model.bias or p != "*.bias") or ("head.norm",))  # fmt: skip

    assert 0 < some.trained_of_dtype.total() < whole.trained_of_dtype.total() == whole.param_count == some.param_count
    for name, work in some.work.items():
        assert work.backward_flops <= whole.work[name].backward_flops
        assert work.saved_bytes <= whole.work[name].saved_bytes
        assert work.forward == whole.work[name].forward


# -- LoRA and QLoRA


def test_adapters_are_all_that_trains_and_all_that_the_optimizer_and_the_network_reduce() -> None:
    plan = replace(PLAN, lora_rank=16, lora_targets=("q_proj", "v_proj"))  # peft's names, or ours
    work = workload(LLAMA, plan)
    d, kv = LLAMA.d_model, LLAMA.kv_heads * LLAMA.d_head
    of_block = 16 * (d + d) + 16 * (d + kv)

    assert work.trained_of_dtype.total() == 32 * of_block
    assert work.units == workload(LLAMA, replace(plan, lora_targets=("wq", "attn.wv"))).units
    assert work.param_count == LLAMA.param_count + work.trained_of_dtype.total()
    program = build(work.units, plan, 8)
    assert {i.bytes for i in program.ops if i.op is Op.REDUCE_SCATTER} == {4 * of_block}
    assert program.state_bytes[Memory.OPTIMIZER, "layers.0"] == 8 * of_block // 8
    assert (Memory.OPTIMIZER, "root") not in program.state_bytes


@pytest.mark.parametrize("model", [GPT, LLAMA, T5], ids=lambda model: model.name)
def test_an_adapter_adds_its_two_small_products_three_times(model: Model) -> None:
    rank, base, lora = 8, made(model), made(model, lora_rank=8)
    name = list(base.work)[-2]  # a block that has trained ones before it
    adapters = sum(math.prod(p.shape) for u in lora.units if u.name == name for p in u.params if p.requires_grad)

    forward, backward = 2 * TOKENS * adapters, 4 * TOKENS * adapters
    assert matmul_flops(lora.work[name], False) == matmul_flops(base.work[name], False) + forward
    assert matmul_flops(lora.work[name]) == matmul_flops(base.work[name]) / 2 + backward
    assert rank == min(min(p.shape) for u in lora.units for p in u.params if p.requires_grad)


def test_a_quantised_base_is_gathered_in_half_a_byte_a_number_and_made_whole_before_every_matmul() -> None:
    plan = replace(PLAN, lora_rank=8, base_quantization="nf4")
    work, plain = workload(LLAMA, plan), workload(LLAMA, replace(PLAN, lora_rank=8))
    linear = sum(math.prod(p.shape) for p in plain.units[1].params if not p.requires_grad and len(p.shape) > 1)
    norms, adapters = 2 * LLAMA.d_model, sum(math.prod(p.shape) for p in plain.units[1].params if p.requires_grad)
    program = build(work.units, plan, 8)

    gathers = {i.bytes for i in program.ops if i.op is Op.ALL_GATHER and i.unit == "layers.0"}
    assert gathers == {linear // 2 + 2 * (norms + adapters)}
    held = program.state_bytes[Memory.SHARDED, "layers.0"]
    assert held == (linear // 2 + 4 * (norms + adapters)) // 8 + linear // 16  # every rank has all scales
    for backward in (False, True):
        kernels = [(w.backward if backward else w.forward) for w in (work.work["layers.1"], plain.work["layers.1"])]
        more = sum(k.bytes * k.count for k in kernels[0]) - sum(k.bytes * k.count for k in kernels[1])
        copies = 0 if backward else 2 * 2 * TOKENS * sum(p.shape[0] for p in work.units[1].params if "B" in p.name)
        assert more == linear * (0.5 + 4 / 64 + 2) + copies
    assert work.work["layers.1"].backward_flops == plain.work["layers.1"].backward_flops


def test_double_quantisation_keeps_a_quarter_of_the_scales() -> None:
    once, twice = (
        made(lora_rank=8, base_quantization=how).units[1].buffer_bytes for how in ("nf4", "nf4_double_quant")
    )
    assert twice / once == pytest.approx(1 / 4 + 1 / 256, rel=1e-4)


# -- fp8


@pytest.mark.parametrize(
    ("recipe", "in_fp8"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2), ("mxfp8", 3)]
)
def test_the_products_of_linear_layers_are_in_fp8_as_the_recipe_says(recipe: str, in_fp8: int) -> None:
    work, plain = made(fp8=recipe, compile=True), made(compile=True)
    block, same = work.work["layers.0"], plain.work["layers.0"]

    assert matmul_flops(block, False, "fp8") == matmul_flops(same, False)
    assert matmul_flops(block, True, "fp8") == matmul_flops(same, True) * (in_fp8 - 1) / 2
    assert matmul_flops(block, True) == matmul_flops(same, True)
    assert work.work["head"] == plain.work["head"]


def casts(elements: int, backward: bool, **fields: object) -> float:
    """Bytes that casts to fp8 move beyond the products of a block."""

    def moved(work: Work) -> float:
        return sum(k.bytes * k.count for k in (work.backward if backward else work.forward) if k.kind == "memory")

    return moved(made(**fields).work["layers.0"]) - moved(made(compile=fields["compile"]).work["layers.0"])  # type: ignore[arg-type]


def test_casts_are_work_and_a_compiler_does_those_of_one_tensor_once() -> None:
    d, f, kv = LLAMA.d_model, LLAMA.d_ffn, LLAMA.kv_heads * LLAMA.d_head
    weights = 2 * d * d + 2 * d * kv + 3 * d * f
    inputs = TOKENS * (d + d + d + f)  # of q, k and v together; of the projection; of gate and up; of down
    grads = TOKENS * (d + 2 * kv + d + 2 * f + d)
    each = 5  # bf16: read for the scale, read again, written in fp8

    assert casts(0, False, fp8="tensorwise", compile=True) == each * (inputs + weights)
    assert casts(0, True, fp8="tensorwise", compile=True) == each * (inputs + weights + grads)
    assert casts(0, True, fp8="rowwise", compile=True) == each * (inputs + weights + 2 * grads)
    assert casts(0, False, fp8="tensorwise", compile=True, fp8_all_gather=True) == each * inputs
    eager = 33 * (TOKENS * (3 * d + d + 2 * d + f) + weights)  # six kernels, and each layer casts its input
    assert casts(0, False, fp8="tensorwise", compile=False) == pytest.approx(eager)


def test_layers_of_odd_dimensions_stay_as_they_are() -> None:
    odd = replace(GPT, name="odd", d_model=776, n_head=8, d_ffn=3072)  # 776 is 8 x 97
    assert made(odd, fp8="tensorwise").work == made(odd).work


def test_a_gather_in_fp8_halves_the_bytes_of_the_matrices_on_the_wire() -> None:
    plan = replace(PLAN, fp8="tensorwise", fp8_all_gather=True, fp8_precompute_scale=True)
    norms = 2 * LLAMA.d_model

    def gathered(plan: Plan) -> int:
        program = build(workload(LLAMA, plan).units, plan, 8)
        (n_bytes,) = {i.bytes for i in program.ops if i.op is Op.ALL_GATHER and i.unit == "layers.0"}
        return n_bytes

    assert gathered(plan) - 2 * norms == (gathered(PLAN) - 2 * norms) / 2


def test_scales_are_reduced_once_a_step_or_once_for_each_weight_and_gather() -> None:
    def reductions(precompute: bool) -> list[tuple[str, Phase, int]]:
        plan = replace(PLAN, fp8="tensorwise", fp8_all_gather=True, fp8_precompute_scale=precompute)
        program = build(workload(replace(LLAMA, n_layer=2), plan).units, plan, 8)
        return [(i.unit, i.phase, i.bytes) for i in program.ops if i.op is Op.ALL_REDUCE]

    assert reductions(True) == [("", Phase.OPTIMIZER, 4 * 2 * 7)]
    assert reductions(False).count(("layers.0", Phase.FORWARD, 4)) == 7
    assert reductions(False).count(("layers.1", Phase.BACKWARD, 4)) == 7


@pytest.mark.parametrize(
    ("gpu", "recipe", "message"),
    [
        ("A100", "tensorwise", r"Plan.fp8 is 'tensorwise', but A100-SXM-80GB has no fp8 \(it has .*take another GPU"),
        ("H100", "mxfp8", "which needs Blackwell's scales by block; H100-SXM-80GB is Hopper: take 'tensorwise'"),
    ],
)
def test_a_gpu_without_it_is_refused(gpu: str, recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate("gpt2-124m", Cluster(gpu, gpus=8), replace(PLAN, fp8=recipe))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"freeze": ("layer.*",)}, r"Plan.freeze names 'layer.\*', which matches no parameter of llama3-8b; it has "),
        (
            {"lora_rank": 8, "lora_targets": ("c_attn",)},
            "'c_attn', which is no linear layer .* it has attn.wq, attn.wk",
        ),
    ],
)
def test_a_name_that_the_model_does_not_have_is_refused_with_those_it_has(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**fields)


def test_work_that_was_written_down_for_another_plan_is_refused() -> None:
    work = made(lora_rank=8)
    with pytest.raises(ValueError, match=r"Plan.lora_rank is None, but the work of llama3-8b was written for 8; trace"):
        simulate(work, Cluster("H100", gpus=8), PLAN)
