"""What people say about units and the policies that make them."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import absent, defaults, refused, takes

FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"
WRAP = "torch.distributed.fsdp.wrap"

MISCONCEPTIONS = (
    Misconception(
        "`FSDP(model)` shards the model and so lowers the peak.",
        "Without a policy the whole model is one unit: it is gathered at once, and stays through forward and "
        "backward. Only the states shrink.",
        ("misconception 3.14",),
    ),
    Misconception(
        "`auto_wrap_policy=transformer_auto_wrap_policy`, or "
        "`transformer_auto_wrap_policy(transformer_layer_cls={...})`.",
        "Both end in a TypeError: the policy is a function that FSDP calls with three arguments of its own. Use "
        "`ModuleWrapPolicy({Block})`, or `functools.partial`. (Writing the name twice with a dot between is an "
        "AttributeError.)",
        ("misconception 22", "misconception 0.11", "misconception 4.4", "misconception 4.75", "misconception 4.92"),
        lambda: refused(f"{WRAP}:transformer_auto_wrap_policy", TypeError, transformer_layer_cls={object})
        and absent(f"{WRAP}:transformer_auto_wrap_policy.transformer_auto_wrap_policy"),
    ),
    Misconception(
        "The size policy with 1 M wraps the large layers of GPT-2.",
        "It goes bottom-up, so it wraps single linear layers (1.77 M and 2.36 M parameters) before it sees the "
        "blocks, and what is left of them falls to the root. A policy by class makes units of blocks.",
        ("misconception 1.2", "misconception 4.122"),
        lambda: 3 * 768 * 769 > 1_000_000 > 768 * 769 and 4 * 768 * 769 > 2_360_000,
    ),
    Misconception(
        "A size policy is fine for a model whose head and embedding are tied.",
        "It puts the two into different units. FSDP1 then trains them apart without a word; `fully_shard` refuses "
        "since torch 2.13. Keep tied parameters in one unit, such as the root.",
        ("misconception 1.3",),
    ),
    Misconception(
        "Wrap the encoder, and leave the classifier outside.",
        "Then nobody reduces the classifier's gradients, and the ranks drift apart without an error. The root must be "
        "wrapped too.",
        ("misconception 4.76",),
    ),
    Misconception(
        "`fully_shard(model)` shards all of `model.parameters()`.",
        "All that no nested call has taken and that `ignored_params` does not name. Hence bottom-up: blocks first, "
        "the root last.",
        ("misconception 4.97",),
        lambda: takes("torch.distributed.fsdp:fully_shard", "ignored_params"),
    ),
    Misconception(
        "`default_auto_wrap_policy` wraps what is large enough.",
        "It was renamed `size_based_auto_wrap_policy` in torch 1.12, and whoever imports the old name gets an "
        "ImportError: the whole line fails. It makes nested FSDP1 modules; it does not call `fully_shard`.",
        ("misconception 20", "misconception 4.43", "misconception 4.64", "misconception 4.74", "misconception 4.101"),
        lambda: absent(f"{WRAP}:default_auto_wrap_policy") and not absent(f"{WRAP}:size_based_auto_wrap_policy"),
    ),
    Misconception(
        "The argument is `fsdp_auto_wrap_policy=`.",
        "It is `auto_wrap_policy=`; the other is a TypeError. `fully_shard` has neither: you call it for each unit.",
        ("misconception 21", "misconception 4.44"),
        lambda: not takes(FSDP1, "fsdp_auto_wrap_policy") and takes(FSDP1, "auto_wrap_policy")
        and not takes("torch.distributed.fsdp:fully_shard", "auto_wrap_policy"),
    ),
    Misconception(
        "The policy places blocks on different GPUs.",
        "It draws the boundaries of units: what is gathered, computed and freed together. Every rank has a slice of "
        "every unit.",
        ("misconception 0.12",),
    ),
    Misconception(
        "The default threshold is about 100 thousand parameters; with 1 M, large layers are properly distributed.",
        "The default is 100 million. And every parameter is sharded whatever the threshold: it decides how large "
        "units are.",
        ("misconception 2.12", "misconception 4.46"),
        lambda: defaults(f"{WRAP}:size_based_auto_wrap_policy", min_num_params=100_000_000),
    ),
    Misconception(
        "Too small a threshold means more communication.",
        "More collectives, of the same bytes: it costs latency. One unit per block is the value to start from.",
        ("misconception 1.23",),
    ),
    Misconception(
        "FSDP inspects whether a module has more parameters than a threshold.",
        "Only under the size policy. `ModuleWrapPolicy` looks at classes, and `fully_shard` at nothing: it does what "
        "you call.",
        ("misconception 4.102",),
    ),
    Misconception(
        "Wrap `{Block, AttentionLayer}`: finer units communicate less.",
        "Nested units add collectives, and each has its latency. The bytes of a step hardly depend on the wrapping. "
        "One unit per block is the usual choice: finer means a lower peak and more latency, coarser the opposite.",
        ("misconception 2.10", "misconception 2.11"),
    ),
    Misconception(
        "Pick one: the auto-wrapping class is the recommended one.",
        "Not mixing them is right. The one to pick is `fully_shard`; the class is deprecated.",
        ("misconception 4.104",),
    ),
)  # fmt: skip
