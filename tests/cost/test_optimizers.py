"""What a step of each optimizer moves, keeps and issues."""

from dataclasses import replace

import pytest

from fsdp_sim.cost import workload
from fsdp_sim.cost.costs import FOREACH_FRACTION, Costs
from fsdp_sim.cost.linears import orthogonalisation
from fsdp_sim.engine import memory
from fsdp_sim.schedule import Program, build
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Memory, Op, Phase

GPT = Model.preset("gpt2-124m")
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=256)
CLUSTER = Cluster("H100", gpus=8)


def made(model: Model = GPT, **fields: object) -> tuple[Program, Costs]:
    plan = replace(PLAN, **fields)
    work = workload(model, plan)
    return build(work.units, plan, CLUSTER.gpus), Costs(work, plan, CLUSTER)


def optimizer_s(model: Model = GPT, **fields: object) -> float:
    program, costs = made(model, **fields)
    return sum(costs.seconds(i) for i in program.ops if i.op is Op.OPTIM)


@pytest.mark.parametrize(
    ("fields", "each"),  # bytes that are read and written of an fp32 parameter
    [
        ({}, 28),
        ({"optimizer_impl": "foreach"}, 80),
        ({"optimizer": "adamw_8bit"}, 12 + 2 * 2 * (1 + 4 / 256)),
        ({"optimizer": "sgd_momentum"}, 20),
        ({"optimizer": "sgd_momentum", "optimizer_impl": "foreach"}, 32),
        ({"optimizer": "sgd"}, 12),
    ],
)
def test_a_step_moves_what_its_kernels_read_and_write(fields: dict[str, str], each: float) -> None:
    rate = FOREACH_FRACTION if "optimizer_impl" in fields else 1.0

    assert optimizer_s(**fields) / optimizer_s() == pytest.approx(each / 28 / rate)


def test_parameters_in_bf16_move_half() -> None:
    assert optimizer_s(replace(GPT, dtype="bf16"), param_dtype=None, reduce_dtype=None) == optimizer_s() / 2


def test_states_in_a_byte_have_a_scale_for_256_and_small_shards_stay_as_they_are() -> None:
    plain, small = (made(optimizer=name)[0].state_bytes for name in ("adamw", "adamw_8bit"))
    matrices = 768 * 768 * 12  # of a block; its norms and biases have less than 4,096 numbers on a rank
    rest = plain[Memory.OPTIMIZER, "layers.0"] - 8 * matrices // 8

    assert small[Memory.OPTIMIZER, "layers.0"] == round(2 * matrices * (1 + 4 / 256)) // 8 + rest


def test_master_weights_and_moments_are_fp32_beside_parameters_in_bf16() -> None:
    halved = replace(GPT, dtype="bf16")
    master, plain = (
        made(halved, api="zero1", optimizer=name, param_dtype=None, reduce_dtype=None)[0].state_bytes
        for name in ("adamw_master_weights", "adamw")
    )

    of = Memory.OPTIMIZER, "layers.0"
    assert master[of] == 3 * plain[of]  # 12 bytes of each, in place of 4, small parameters too
    assert master[Memory.SHARDED, "layers.0"] == plain[Memory.SHARDED, "layers.0"]


def test_foreach_needs_one_more_number_for_each_parameter_while_it_runs() -> None:
    fused, foreach = (memory(made(optimizer_impl=impl)[0]) for impl in ("fused", "foreach"))
    of_optimizer = [m.peak_of([Memory.TEMPORARY], Phase.OPTIMIZER) for m in (fused, foreach)]

    assert (
        of_optimizer[1] - of_optimizer[0] == sum(n for (c, _), n in fused.states.items() if c is Memory.OPTIMIZER) // 2
    )


def test_muon_is_adamw_for_what_is_no_matrix_of_a_block_and_keeps_half_as_much_of_those() -> None:
    program, _ = made(optimizer="muon")
    adamw, muon = made()[0].state_bytes, program.state_bytes
    names = {i.unit for i in program.ops if i.op is Op.OPTIM}

    assert names == {""} | {
        f"layers.{n}.{of}.weight" for n in range(12) for of in ("attn.qkv", "attn.proj", "ffn.up", "ffn.down")
    }
    assert muon[Memory.OPTIMIZER, "root"] == adamw[Memory.OPTIMIZER, "root"]
    assert adamw[Memory.OPTIMIZER, "layers.0"] - muon[Memory.OPTIMIZER, "layers.0"] == 4 * 768 * 768 * 12 // 8


def test_orthogonalising_costs_five_times_three_products_shared_by_the_ranks_where_they_can_be() -> None:
    wide, tall = (orthogonalisation(*shape, shards=8) for shape in ((64, 256), (256, 64)))
    gram, square = 2 * 64 * 64 * 256, 2 * 64**3

    assert sum(k.flops for k in wide) == 5 * (2 * gram + square) / 8
    assert sum(k.flops for k in tall) == 5 * (2 * gram / 8 + square)  # each rank squares the whole product
    assert sum(k.flops for k in orthogonalisation(64, 256, 1)) == 5 * (2 * gram + square)


def test_clipping_reads_the_gradients_twice_and_writes_them_once() -> None:
    program, costs = made(clip_grad_norm=True)
    issued = [i for i in program.ops if i.phase is Phase.OPTIMIZER]
    held = sum(n for (c, _), n in program.state_bytes.items() if c is Memory.SHARDED)

    assert [i.op for i in issued] == [Op.NORM, Op.ALL_REDUCE, Op.CLIP, Op.OPTIM]
    assert issued[1].bytes == 4 * sum(len(u.params) for u in program.units)  # a norm of each parameter
    assert {i.bytes for i in issued if i.op in (Op.NORM, Op.CLIP)} == {held}
    assert costs.seconds(issued[2]) == 2 * costs.seconds(issued[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "muon", "shard_size": 4}, "for whole matrices on a GPU: take api fsdp2 without shard_size"),
        ({"optimizer": "muon", "api": "fsdp1"}, "for whole matrices"),
        (
            {"optimizer": "adamw_8bit", "optimizer_impl": "foreach"},
            "not of adamw_8bit, which has none; leave it 'fused'",
        ),
        ({"clip_grad_norm": True, "api": "zero2"}, "a setting of fsdp2 and fsdp1 and ddp and zero1"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**fields)
