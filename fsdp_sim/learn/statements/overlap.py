"""What people say about prefetch, streams and what is hidden behind what."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import absent, collectives, defaults, find, issued

FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"


def _comes_before(one: str, other: str, **plan: object) -> bool:
    backward = issued("backward", **plan)
    return backward.index(one) < backward.index(other)


def _without_prefetch_the_reduction_is_first() -> bool:
    return _comes_before("REDUCE_SCATTER(layers.3)", "ALL_GATHER(layers.2)", api="fsdp1", backward_prefetch="none")


MISCONCEPTIONS = (
    Misconception(
        "Set `forward_prefetch=True` for speed.",
        "It is False by default and rarely helps: the implicit order already overlaps while the CPU runs ahead. It "
        "only lets the CPU issue earlier, from the second iteration, for a model whose order never changes. FSDP2 has "
        "`set_modules_to_forward_prefetch` instead.",
        ("misconception 0.22", "misconception 4.114"),
        lambda: defaults(FSDP1, forward_prefetch=False)
        and not absent("torch.distributed.fsdp:FSDPModule.set_modules_to_forward_prefetch"),
    ),
    Misconception(
        "No prefetch has the lowest memory.",
        "POST already frees the current unit before it gathers the next. What None gives up is overlap: the gather "
        "then stands behind the reduce-scatter.",
        ("misconception 2.27",),
        _without_prefetch_the_reduction_is_first,
    ),
    Misconception(
        "No GPU ever sits idle.",
        "It does wherever communication is exposed: at the first gather, at gathers longer than the computation "
        "before them, at a reduce-scatter whose buffer is still in use, and at the tail.",
        ("misconception 4.30",),
    ),
    Misconception(
        "All-gather and reduce-scatter share a process group and hence a CUDA stream.",
        "FSDP2 gives each a stream of its own. They still take turns, because collectives of one communicator run in "
        "the order of issue. `set_separate_reduce_scatter_group` gives the reduce-scatters another.",
        ("misconception 4.115",),
        lambda: not absent("torch.distributed.fsdp:FSDPModule.set_separate_reduce_scatter_group"),
    ),
    Misconception(
        "FSDP reaches 85 to 95% of DDP's throughput.",
        "Nobody can say so in general. It depends on the tokens of each GPU, the size of the units and the bandwidth: "
        "from no loss to several times slower.",
        ("misconception 1.12",),
    ),
    Misconception(
        "`loss.item()` in every step costs nothing.",
        "The CPU waits for the GPU there, so it no longer runs ahead, and the gathers that it should have issued "
        "early come late. Log every so many steps.",
        ("misconception 4.132",),
    ),
    Misconception(
        "BACKWARD_POST uses the bandwidth more efficiently.",
        "It gathers the next unit *after* the current gradient has been computed: it hides less, and holds less. It "
        "issues that gather before the reduce-scatter, so as not to queue behind it.",
        ("misconception 2.13", "misconception 2.20"),
        lambda: _comes_before("BWD layers.3", "ALL_GATHER(layers.2)", api="fsdp1", backward_prefetch="BACKWARD_POST")
        and _comes_before("ALL_GATHER(layers.2)", "REDUCE_SCATTER(layers.3)", api="fsdp1",
                          backward_prefetch="BACKWARD_POST"),
    ),
    Misconception(
        "PRE holds 2 to 3 layers, POST about one and a half.",
        "There are no half units. When the gather is issued, PRE holds 2 units' parameters and 1 unit's gradients; "
        "POST 1 and 1, because it frees the current unit first.",
        ("misconception 2.26",),
    ),
    Misconception(
        "There are two modes of backward prefetch, and they gain 2 to 10%.",
        "There is a third, None. The percentages are one measurement of one model on one machine.",
        ("misconception 4.141",),
        lambda: [mode.name for mode in find("torch.distributed.fsdp:BackwardPrefetch")]
        == ["BACKWARD_PRE", "BACKWARD_POST"] and type(None) in find("typing:get_args")(
            find("typing:get_type_hints")(find(f"{FSDP1}.__init__"))["backward_prefetch"]),
    ),
    Misconception(
        "While layer 3 computes, prefetch fetches layers 2 and 1.",
        "Backward looks one unit ahead: the gather of 2 runs under the backward of 3, that of 1 under the backward of "
        "2.",
        ("misconception 2.18",),
        lambda: _comes_before("ALL_GATHER(layers.2)", "BWD layers.3")
        and _comes_before("BWD layers.3", "ALL_GATHER(layers.1)"),
    ),
    Misconception(
        "The picture of a backward pass shows gathers and computation.",
        "It lacks the reduce-scatters. One follows each unit's backward, they share the wire with the gathers, and "
        "the last one is always exposed. A gap in front of a unit is its gather, or a reduce-scatter before it.",
        ("misconception 2.17", "misconception 2.19"),
        lambda: issued("backward")[-1] == "REDUCE_SCATTER(root)",
    ),
    Misconception(
        "A drawn timeline with milliseconds on it says how long a step takes.",
        "Only if the times were computed from durations. Many drawings have labels that do not match their own boxes.",
        ("misconception 2.21",),
    ),
    Misconception(
        "Parameters are sent exactly when they are needed, one step strictly after the other.",
        "Only computation is strictly ordered. The next unit's gather runs under the current unit's computation: sent "
        "exactly when needed, it would be exposed.",
        ("misconception 4.27", "misconception 4.36"),
        lambda: _comes_before("ALL_GATHER(layers.2)", "BWD layers.3"),
    ),
    Misconception(
        "The gather of layer n overlaps with layer n − 1.",
        "On a GPU it may start earlier still: it waits for the copy-out of n − 2, not for a forward, so two gathers "
        "can run ahead. On a CPU, which computes what it issues, it hides nothing.",
        ("misconception 4.113",),
    ),
    Misconception(
        "The hooks are on the flat parameter, which is a sharded DTensor.",
        "Two designs mixed. FSDP1 has flat parameters and wrapper modules; FSDP2 has one DTensor for each parameter, "
        "and hooks on modules.",
        ("misconception 4.112",),
    ),
    Misconception(
        "Without backward prefetch the reduce-scatter of N cannot overlap with the computation of N − 1.",
        "It can. What is lost is the gather of N − 1: it is issued behind that reduce-scatter, and the computation of "
        "N − 1 waits for it.",
        ("misconception 4.116",),
        _without_prefetch_the_reduction_is_first,
    ),
    Misconception(
        "With prefetch the order is: gather N − 1, reduce-scatter N, backward N − 1.",
        "The gather of N − 1 is issued before the *backward of N*; that is what it hides behind.",
        ("misconception 4.117",),
        lambda: _comes_before("ALL_GATHER(layers.2)", "BWD layers.3"),
    ),
    Misconception(
        "The next all-gather overlaps with the current reduce-scatter.",
        "On one communicator these two never overlap each other. The gather overlaps with the current backward, the "
        "reduce-scatter with the next one.",
        ("misconception 4.118",),
    ),
    Misconception(
        "FSDP shards parameters and optimizer state.",
        "And gradients.",
        ("misconception 4.119",),
        lambda: "REDUCE_SCATTER" in collectives("backward"),
    ),
    Misconception(
        "`NCCL_DEBUG=INFO` profiles communication.",
        "It prints the topology and how communicators were set up. Profile with `torch.profiler` or Nsight Systems.",
        ("misconception 1.22",),
    ),
    Misconception(
        "The second link under an explanation leads to the blog it names.",
        "In one widely copied list two different titles lead to the same page of the documentation. Follow a link "
        "before you trust its title.",
        ("misconception 4.120",),
    ),
)  # fmt: skip
