"""A program in the line format of the recordings."""

from fsdp_sim.schedule import Instruction, Kind, Program, toy, toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase


def test_kind_stream_and_what_stand_in_their_columns():
    line = toy_program(2, 8).lines()[8]
    assert (line[:12].strip(), line[12:28].strip(), line[28:]) == ("op", "all_gather", "ALL_GATHER(root) n=8")


def instruction(kind, lane=None, **fields):
    return Instruction(kind, 0, 0, Phase.FORWARD, lane, **fields)


def test_every_kind_of_instruction_has_its_words():
    found = [
        instruction(Kind.OP, Lane.COMPUTE, op=Op.FWD, unit="embed"),
        instruction(Kind.OP, Lane.COMPUTE, op=Op.OPTIM),
        instruction(Kind.OP, Lane.REDUCE_SCATTER, op=Op.DIV, unit="g", detail="by 4"),
        instruction(Kind.OP, Lane.REDUCE_SCATTER, op=Op.REDUCE_SCATTER, unit="g", group_size=8, communicator="shard",
                    reduce_op="AVG"),
        instruction(Kind.OP, Lane.ALL_REDUCE, op=Op.ALL_REDUCE, unit="g", group_size=2, communicator="replicate",
                    reduce_op="AVG"),
        instruction(Kind.OP, Lane.COMPUTE, op=Op.ALL_GATHER, unit="g", group_size=8, communicator="shard",
                    async_op=True),
        instruction(Kind.WAIT, Lane.COMPUTE, event=3, event_lane=Lane.ALL_GATHER),
        instruction(Kind.WAIT, Lane.COMPUTE, event=3, event_lane=Lane.COMPUTE, detail="ALL_GATHER(g)"),
        instruction(Kind.CPU_SYNC, event=3, event_lane=Lane.REDUCE_SCATTER),
        instruction(Kind.CPU_BLOCK, event=3, event_lane=Lane.COMPUTE),
        instruction(Kind.RECORD_STREAM, Lane.COMPUTE, unit="g"),
        instruction(Kind.FREE, Lane.COMPUTE, unit="g", category=Memory.RS_INPUT),
        instruction(Kind.HOOK, unit="g", hook="unshard"),
    ]  # fmt: skip
    assert [i.what for i in found] == [
        "FWD embed", "OPTIM", "div(g) by 4", "REDUCE_SCATTER(g) n=8 op=AVG", "ALL_REDUCE(g) n=2",
        "ALL_GATHER(g) n=8 async", "e3@all_gather", "ALL_GATHER(g)", "e3@reduce_scatter",
        "rate limiter waits for e3@compute", "tensor kept until compute passes (g)", "rs_input(g)", "unshard(g)",
    ]  # fmt: skip


def test_an_allocation_of_several_tensors_is_a_line_for_each():
    program = toy_program(1, 8)
    assert sum(i.kind is Kind.ALLOC and i.what == "unsharded(root)" for i in program) == 1
    assert program.lines().count("alloc       compute         unsharded(root)") == 2


def test_what_a_recording_does_not_see_is_left_out():
    program = toy_program(1, 1, 1, Plan(cpu_offload=True, grad_accum=2))
    some, every = program.lines(), program.lines(every_op=True)
    extra = {line[28:].partition("(")[0] for line in every} - {line[28:].partition("(")[0] for line in some}
    assert extra == {"h2d", "d2h", "rs_copy", "accumulate"}
    assert [line for line in every if line[28:].partition("(")[0] not in extra] == some
    assert not any("unsharded_grad" in line or "temporary" in line for line in every)


def test_events_are_numbered_as_they_are_recorded():
    recorded = [i for i in toy_program(1, 8, 1, Plan(unshard_async_op=True)).lines() if i.startswith("record")]
    assert [line.partition("@")[0][28:] for line in recorded] == [f"e{n + 1}" for n in range(len(recorded))]


def test_a_backward_is_noted_before_the_recomputation_it_asks_for():
    lines = toy_program(1, 8, 1, Plan(activation_checkpointing="full")).lines()
    at = lines.index("op          compute         BWD layers.0")
    assert lines[at + 1] == "op          compute         FWD layers.0"


def test_a_program_prints_as_its_lines():
    program = toy_program(1, 8)
    assert str(program).splitlines() == program.lines()
    assert isinstance(program, Program)
    assert len(program) > len(toy(1))
