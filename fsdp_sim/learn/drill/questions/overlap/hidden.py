"""What hides a collective, and what nothing hides."""

from __future__ import annotations

import functools
import random
from typing import Any

from fsdp_sim import engine
from fsdp_sim.learn.drill.draws import a_gpu
from fsdp_sim.learn.drill.question import Choice, Mistake, Number
from fsdp_sim.learn.drill.questions.overlap.common import GROUP, blocks
from fsdp_sim.learn.drill.template import template
from fsdp_sim.learn.quantity import written
from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import Op

AHEAD = "The CPU runs far ahead of the GPU; copies, latency and the root cost nothing."


@functools.cache
def played(layers: int, gather_s: float, forward_s: float, device: Any = "gpu", **settings: Any) -> engine.Run:
    """When each operation runs: backward takes twice a forward, a reduce-scatter as long as an all-gather."""
    takes_s = {Op.FWD: forward_s, Op.BWD: 2 * forward_s, Op.ALL_GATHER: gather_s, Op.REDUCE_SCATTER: gather_s}

    def seconds(i: Instruction) -> float:
        return takes_s.get(i.op, 0.0) if i.unit.startswith("layers") else 0.0

    return engine.run(blocks(layers, **settings), seconds, device=device)


def forward_end_s(run: engine.Run) -> float:
    """When the last block's forward ends."""
    return max(float(end) for i, end in zip(run.ops, run.columns.end_s, strict=True) if i.op is Op.FWD)


@template(
    level=2,
    seconds=90,
    section="10.4",
    rule="A bf16 all-gather hides behind a forward from F / B tokens per GPU (x (W-1)/W), whatever the model.",
    source="data sheets: bf16_tflops in fsdp_sim/spec/gpus.toml",
)
def tokens_that_hide(draw: random.Random) -> Number:
    gpu, share = a_gpu(draw, "A100-SXM-80GB", "H100-SXM-80GB", "B200-SXM-180GB"), draw.choice((40, 50, 60))
    gbit, ranks = draw.choice((25, 100, 200, 400)), draw.choice((8, 64, 256))
    peak = gpu.peak_flops("bf16")
    flops_per_s, bytes_per_s = share / 100 * peak, gbit * 1e9 / 8
    answer = (ranks - 1) / ranks * flops_per_s / bytes_per_s
    return Number(
        text=f"Equal blocks are sharded over {ranks} GPUs of {written(peak, 'FLOP/s')} (dense bf16 peak), of which "
        f"blocks reach {share}%. A ring moves {gbit} Gbit/s per GPU and direction; parameters are gathered in bf16. "
        "From how many tokens per GPU and micro-batch does a block's forward hide the all-gather of the next block? "
        "Count 2 FLOP per parameter and token, no latency.",
        answer=answer,
        unit="tokens",
        rel=0.05,
        given={"flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s, "ranks": ranks},
        mistakes=(
            Mistake(answer / 8, "the link is given in bits per second; a byte has eight"),
            Mistake(answer / 3, "6 FLOP per parameter and token are forward and backward together; forward has 2"),
            Mistake(2 * answer, "that is for 4 bytes per parameter, or for half of the FLOP"),
            Mistake(answer / 2, "2 FLOP for 2 bytes: the two twos cancel"),
            Mistake(answer * 100 / share, "that takes the whole peak, which blocks do not reach"),
            Mistake(answer / ranks, "every rank computes the whole block on its tokens, and receives nearly all of it"),
        ),
        why=f"2 P t / {written(flops_per_s, 'FLOP/s')} = 2 P x {ranks - 1}/{ranks} / "
        f"{written(bytes_per_s, 'bytes/s')}: P cancels, t = F/B.",
    )


@template(
    level=1,
    seconds=60,
    section="05.3",
    rule="Forward of L blocks with prefetch: one all-gather + L x forward, or L x all-gather + one forward, if longer.",
    source=f"{GROUP}.unshard: an all-gather waits for earlier copy-outs, not for compute",
)
def forward_time(draw: random.Random) -> Number:
    layers, forward = draw.choice((12, 24, 32, 40, 80)), draw.choice((4, 8, 10, 20))
    gather = draw.choice([n for n in (2, 3, 5, 6, 9, 12, 15, 25, 30) if abs(n - forward) >= 2])
    gather_s, forward_s = gather / 1e3, forward / 1e3
    answer = forward_end_s(played(layers, gather_s, forward_s))
    longer, shorter = max(gather_s, forward_s), min(gather_s, forward_s)
    return Number(
        text=f"FSDP2 on GPUs with its default prefetch: {layers} equal blocks, {forward} ms of forward each, {gather} "
        f"ms for the all-gather of one. {AHEAD} How long is the forward pass, from the first all-gather on?",
        answer=answer,
        unit="s",
        rel=0.005,
        given={"layers": layers, "gather_s": gather_s, "forward_s": forward_s},
        mistakes=(
            Mistake(
                layers * (gather_s + forward_s), "that is one after the other; the next gather runs under this forward"
            ),
            Mistake(layers * longer, "at one end the shorter of the two stands alone"),
            Mistake(layers * shorter + longer, "the longer of the two sets the pace"),
            Mistake(layers * forward_s, "gathers do not hide here, and the first has nothing to hide behind"),
            Mistake((layers + 1) * longer, "what stands alone at the end is one of the shorter"),
        ),
        why=f"{layers} x {written(longer, 's')}, and {written(shorter, 's')} that stand alone at one end.",
    )


@template(
    level=2,
    seconds=60,
    section="05.1",
    rule="Where collectives are shorter than the compute beside them, only the first gather and last reduction show.",
)
def exposed_in_a_step(draw: random.Random) -> Number:
    layers, forward = draw.choice((12, 24, 32, 40)), draw.choice((10, 16, 20, 25))
    wire = draw.choice([n for n in (4, 6, 8, 9, 12, 14, 18, 22) if n < forward and 2 * n != forward])
    wire_s, forward_s = wire / 1e3, forward / 1e3
    run = played(layers, wire_s, forward_s)
    return Number(
        text=f"FSDP2 with its defaults: {layers} equal blocks, {forward} ms of forward and {2 * forward} ms of "
        f"backward each; an all-gather or a reduce-scatter of a block takes {wire} ms, all on one communicator. "
        f"{AHEAD} How much communication of one step is exposed?",
        answer=engine.exposure(run).exposed_s,
        unit="s",
        rel=0.005,
        given={"layers": layers, "wire_s": wire_s, "forward_s": forward_s},
        mistakes=(
            Mistake(3 * layers * wire_s, "that is all communication: nearly all of it runs beside compute"),
            Mistake(wire_s, "both ends stand alone: the first all-gather and the last reduce-scatter"),
            Mistake(3 * wire_s, "backward's first all-gather runs under the last forward"),
            Mistake(
                0.0, "nothing computes yet under the first all-gather, and nothing is left under the last reduction"
            ),
            Mistake(layers * wire_s, "reduce-scatters run under the backward of the block before"),
        ),
        why=f"Per block and backward 2 x {wire} ms of collectives fit beside {2 * forward} ms; the first gather and "
        f"the last reduce-scatter are left: 2 x {wire} ms.",
    )


PACE = {
    (False, False): "compute in both passes",
    (True, False): "the network in forward, compute in backward",
    (False, True): "compute in forward, the network in backward",
    (True, True): "the network in both passes",
}


@template(
    level=3,
    seconds=150,
    section="05.3",
    rule="Per parameter: forward 2 B against 2 FLOP x tokens; backward 2 (if gathered) + 2 or 4 B against 4 FLOP.",
    source="dtype of collectives: torch.distributed.fsdp.MixedPrecisionPolicy (param_dtype, reduce_dtype)",
)
def who_sets_the_pace(draw: random.Random) -> Choice:
    tflops, gbytes = draw.choice((150, 200, 400, 500)), draw.choice((12.5, 25, 50))
    reduce_bytes, reshard = draw.choice((2, 4)), draw.choice((True, False))
    factor = draw.choice((0.35, 0.7, 0.7, 1.25, 1.25, 2.2))
    tokens = 64 * round(factor * tflops * 1e3 / gbytes / 64)
    forward = 2 / gbytes, 2 * tokens / tflops / 1e3  # ns of network and of compute, per parameter
    backward = (2 * reshard + reduce_bytes) / gbytes, 4 * tokens / tflops / 1e3
    right = (forward[0] > forward[1], backward[0] > backward[1])
    freed = "freed after forward and gathered again" if reshard else "kept from forward to backward"
    reasons = {
        (False, False): "in one of the passes the bytes take longer than the FLOP",
        (True, False): "compare each pass by itself: bytes over bandwidth against FLOP over speed",
        (False, True): "backward has twice the FLOP of forward, and its own bytes: compare each pass by itself",
        (True, True): "in one of the passes the FLOP take longer than the bytes",
    }
    return Choice(
        text=f"On {tokens:,} tokens per GPU a block reaches {tflops} TFLOP/s, and a rank receives {gbytes} GB/s in "
        f"all-gathers and reduce-scatters alike, one after the other. All-gathers are bf16, reduce-scatters "
        f"{'fp32' if reduce_bytes == 4 else 'bf16'}, parameters are {freed}; many ranks, no latency, all overlaps. Per "
        "parameter and token: 2 FLOP forward, 4 backward. What sets the pace?",
        options=tuple(PACE.values()),
        wrong={PACE[kind]: why for kind, why in reasons.items() if kind != right},
        given={
            "tokens": tokens, "tflops": tflops, "gbytes": gbytes, "reduce_bytes": reduce_bytes, "reshard": reshard,
        },
        why=f"Per parameter, network against compute: forward {forward[0]:.3f} and {forward[1]:.3f} ns, backward "
        f"{backward[0]:.3f} and {backward[1]:.3f} ns.",
    )  # fmt: skip


@template(
    level=2,
    seconds=75,
    section="05.2",
    rule="If the CPU is not ahead, implicit forward prefetch hides nothing; a list of the next unit does.",
    source="torch.distributed.fsdp.FSDPModule.set_modules_to_forward_prefetch",
)
def forward_on_a_late_cpu(draw: random.Random) -> Number:
    layers, explicit, forward = draw.choice((6, 8, 12, 24)), draw.choice((True, False)), draw.choice((20, 30, 40))
    gather = draw.choice([n for n in (5, 8, 12, 15, 25) if n < forward])
    gather_s, forward_s = gather / 1e3, forward / 1e3
    run = played(layers, gather_s, forward_s, "cpu", forward_prefetch=1 if explicit else None)
    lists = "each block has set_modules_to_forward_prefetch with the next block" if explicit else "no prefetch lists"
    return Number(
        text=f"A rank whose compute runs in the very thread that issues it: nothing is issued while a block computes, "
        f"but an all-gather that has been issued goes on beside it. {layers} equal blocks as FSDP2 units, {forward} ms "
        f"of forward each, {gather} ms per all-gather, {lists}. How long is the forward?",
        answer=forward_end_s(run),
        unit="s",
        rel=0.005,
        given={"layers": layers, "gather_s": gather_s, "forward_s": forward_s, "explicit": explicit},
        mistakes=(
            Mistake(
                layers * (gather_s + forward_s), "with the list the next gather is issued before this block computes"
            ),
            Mistake(
                gather_s + layers * forward_s,
                "without a list a block asks in its own pre-forward",
            ),
            Mistake(layers * forward_s, "the first gather has nothing to hide behind"),
            Mistake(
                2 * gather_s + layers * forward_s,
                "the second gather hides behind the first forward",
            ),
        ),
        why=f"{gather} + {layers} x {forward} ms: only the first gather shows."
        if explicit
        else f"{layers} x ({gather} + {forward}) ms: each block asks when the one before is done, and then waits.",
    )


BACKWARD: dict[str, dict[str, Any]] = {
    "FSDP2 with its defaults (one communicator)": {},
    "FSDP2 with set_separate_reduce_scatter_group(True) (two communicators that do not slow each other)": {
        "separate_reduce_scatter_group": True
    },
    "FSDP1 with its backward prefetch switched off (one communicator)": {"api": "fsdp1", "backward_prefetch": "none"},
}


@functools.cache
def further_block_s(mode: str, gather_s: float, forward_s: float) -> float:
    """What one more block adds to the backward, once it is under way."""
    runs = [played(n, gather_s, forward_s, **BACKWARD[mode]) for n in (10, 14)]
    backwards = [run.span_s - forward_end_s(run) for run in runs]
    return (backwards[1] - backwards[0]) / 4


@template(
    level=3,
    seconds=120,
    section="05.5",
    rule="A block of backward: max(BWD, AG + RS) on one communicator, max(BWD, AG, RS) on two; sum if no prefetch.",
    source="NCCL runs the collectives of one communicator in issue order; FSDPModule.set_separate_reduce_scatter_group",
)
def further_block_of_backward(draw: random.Random) -> Number:
    mode, backward, more = draw.choice(tuple(BACKWARD)), draw.choice((20, 30, 40, 50)), draw.choice((10, 12, 20))
    wire = draw.choice([n for n in (6, 8, 12, 18, 22, 35, 45, 60) if abs(n - backward) > 3 and 2 * n != backward])
    wire_s, backward_s = wire / 1e3, backward / 1e3
    both, longer = 2 * wire_s, max(wire_s, backward_s)
    return Number(
        text=f"Backward under {mode}: many equal blocks, freed after forward, {backward} ms of backward each; an "
        f"all-gather and a reduce-scatter of a block take {wire} ms each. {AHEAD} "
        f"How much longer is backward with {more} blocks more?",
        answer=more * further_block_s(mode, wire_s, backward_s / 2),
        unit="s",
        rel=0.005,
        given={"mode": mode, "more": more, "wire_s": wire_s, "backward_s": backward_s},
        mistakes=(
            Mistake(
                more * (backward_s + both), "prefetch issues the next all-gather before this backward, so they overlap"
            ),
            Mistake(
                more * max(backward_s, both),
                "count again how many queues there are, and what is issued before the backward",
            ),
            Mistake(
                more * longer, "all-gather and reduce-scatter share the communicator: they run one after the other"
            ),
            Mistake(more * backward_s, "the collectives are not hidden by this backward"),
            Mistake(more * (backward_s + wire_s), "none of the settings hides just one of the two collectives"),
        ),
        why=f"Per block: compute {backward} ms, collectives 2 x {wire} ms; "
        + ("each waits for the one before." if "off" in mode else "the longest queue sets the pace."),
    )


REMEDIES = {
    "earlier": "issue it earlier, with an explicit prefetch list",
    "own queue": "give reduce-scatters a communicator of their own",
    "fewer bytes": "fewer bytes, or more tokens per GPU: no order of issue hides it",
    "none": "nothing: it is hidden already",
}


def exposed_after(now: dict[str, int], remedy: str) -> bool:
    """Whether compute still waits for the gather after a remedy."""
    issued = now["before"] if remedy == "earlier" else now["issued"]
    queue = now["before"] if remedy == "own queue" else now["queue"]
    return max(issued, queue) + now["takes"] > now["needed"]


@template(
    level=3,
    seconds=120,
    section="05.6",
    rule="A gather starts once issued and its queue is free; exposed if it ends after compute needs it.",
)
def what_would_hide_it(draw: random.Random) -> Choice:
    wanted, before, length = draw.choice(tuple(REMEDIES)), draw.randrange(100, 400, 10), draw.randrange(30, 90, 10)
    takes = length - draw.randrange(4, 14, 2)
    late = before + length - draw.randrange(0, 3, 1)
    now = {"before": before, "needed": before + length, "issued": before, "queue": before - 5, "takes": takes}
    if wanted == "fewer bytes":
        now["takes"] = length + draw.randrange(10, 50, 10)
    elif wanted != "none":
        now["issued" if wanted == "earlier" else "queue"] = late
    right = "none" if not exposed_after(now, "none") else "fewer bytes"
    right = next((r for r in ("earlier", "own queue") if right != "none" and not exposed_after(now, r)), right)
    reasons = {
        "earlier": "it was issued in time: the CPU is not what it waits for",
        "own queue": "the queue before it was free in time",
        "fewer bytes": "it is shorter than the compute beside it, so the right moment would hide it",
        "none": "it ends after compute needs it",
    }
    return Choice(
        text=f"From a trace of backward, in ms: compute of block 7 runs from {before} to {now['needed']}, and block 6 "
        f"could follow at once. The all-gather of block 6 was issued at {now['issued']}; the reduce-scatter before it "
        f"in its communicator ended at {now['queue']}; the all-gather itself takes {now['takes']}. What would let "
        "block 6 start on time?",
        options=tuple(REMEDIES.values()),
        wrong={REMEDIES[kind]: why for kind, why in reasons.items() if kind != right},
        given=now,
        why=f"It starts at {max(now['issued'], now['queue'])}, ends at "
        f"{max(now['issued'], now['queue']) + now['takes']}, and is needed at {now['needed']}.",
    )
