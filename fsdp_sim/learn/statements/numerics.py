"""What people say about mixed precision, scaling, clipping, accumulation and the optimizer."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import ADAM_BYTES, absent, find, issued, refused, takes

FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"
FSDP2 = "torch.distributed.fsdp:FSDPModule"


def _adam_keeps() -> set[str]:
    torch = find("torch")
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    return set(optimizer.state[parameter])


def _of_ten_samples_on_four_ranks() -> int:
    sampler = find("torch.utils.data:DistributedSampler")
    return sum(len(sampler(range(10), num_replicas=4, rank=rank)) for rank in range(4))


def _mean_of_means_is_the_mean(*batches: list[float]) -> bool:
    means = [sum(batch) / len(batch) for batch in batches]
    everything = [number for batch in batches for number in batch]
    return sum(means) / len(means) == sum(everything) / len(everything)


MISCONCEPTIONS = (
    Misconception(
        "Mixed precision halves the memory of the model.",
        "The 16 bytes a parameter of states are what they were: shards, reduced gradients and Adam stay fp32. "
        "Gathered units, traffic and above all activations shrink; by how much depends on how many activations there "
        "are.",
        ("misconception 0.21", "misconception 2.2", "misconception 2.4", "misconception 2.33", "misconception 3.13"),
        lambda: ADAM_BYTES == 4 + 4 + 8,
    ),
    Misconception(
        "`param_dtype` is the dtype in which parameters are stored, while computation stays in fp32.",
        "The other way round: it is the dtype of the gathered copy and of computation. The stored shards keep their "
        "own, and are the master copy; there is no further one. Only the reduction can have a low dtype alone.",
        ("misconception 2.3", "misconception 3.12", "misconception 4.123"),
    ),
    Misconception(
        "An all-fp16 policy is the aggressive choice, and it works: just check that float16 trains.",
        "fp16 ends at 65,504, in a sum over ranks too, so it needs loss scaling; under FSDP1 a `ShardedGradScaler`, "
        "because with the plain one rank 0 may skip a step that rank 1 takes. bf16 with fp32 reduction needs none.",
        ("misconception 0.25", "misconception 1.19", "misconception 2.7"),
        lambda: find("torch").finfo(find("torch").float16).max == 65504.0
        and not absent("torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"),
    ),
    Misconception(
        "`torch.nn.utils.clip_grad_norm_` just works. (Or: it is broken with FSDP2.)",
        "It is right with FSDP2, whose DTensors know that they are parts. With FSDP1 each rank clips by the norm of "
        "its own shard, and training diverges without a word: there use `model.clip_grad_norm_`.",
        ("misconception 24", "misconception 0.26", "misconception 1.18", "misconception 2.31", "misconception 4.59"),
        lambda: not absent(f"{FSDP1}.clip_grad_norm_") and absent(f"{FSDP2}.clip_grad_norm_"),
    ),
    Misconception(
        "Scale the learning rate by the number of GPUs.",
        "Gradients are averaged, so with the same global batch nothing changes. If more GPUs make the *global batch* "
        "larger, the rate may grow with it, by a rule that depends on the optimizer.",
        ("misconception 11", "misconception 4.48", "misconception 4.85", "misconception 4.127"),
    ),
    Misconception(
        "Divide the loss by the number of micro-batches, and accumulation gives the large batch.",
        "Only if all have the same number of tokens. Otherwise divide the sum of losses by the sum of tokens, over "
        "micro-batches and ranks. And a last, partial group of micro-batches must step too.",
        ("misconception 36", "misconception 4.82"),
        lambda: _mean_of_means_is_the_mean([1.0, 3.0], [2.0, 6.0])
        and not _mean_of_means_is_the_mean([1.0, 3.0], [6.0]),
    ),
    Misconception(
        "Mixed precision is up to 4 times as fast, and saves 30% of the memory.",
        "Such numbers come from one experiment of 2022, on one model and one kind of GPU. Predict yours, then "
        "measure.",
        ("misconception 4.124",),
    ),
    Misconception(
        "`reduce_dtype` is the dtype of the all-reduce.",
        "Of the reduce-scatter; hybrid sharding also all-reduces in it. Left at None, FSDP1 takes `param_dtype` and "
        "FSDP2 the gradients' own, so unspecified does not mean fp32.",
        ("misconception 2.5", "misconception 4.138"),
    ),
    Misconception(
        "`buffer_dtype` is for batch-norm statistics and embeddings.",
        "Embeddings are parameters. Buffers are what a module keeps besides: running statistics, tables of rotary "
        "positions, masks. FSDP1 leaves batch norm out of mixed precision by default; FSDP2 has no such argument.",
        ("misconception 2.6",),
        lambda: takes("torch.distributed.fsdp:MixedPrecision", "buffer_dtype")
        and not takes("torch.distributed.fsdp:MixedPrecisionPolicy", "buffer_dtype")
        and isinstance(find("torch.nn").Embedding(2, 2).weight, find("torch.nn:Parameter")),
    ),
    Misconception(
        "Combine the precision policy with autocast.",
        "Two systems then cast, one after the other. Choose one.",
        ("misconception 4.83",),
    ),
    Misconception(
        "`GradScaler(device_type=\"cuda\")` operates on activations.",
        "The argument is `device`; the other is a TypeError. It multiplies the loss, and looks for inf and nan in the "
        "gradients. Under FSDP1 the ranks have to agree on what was found.",
        ("misconception 4.49", "misconception 4.58"),
        lambda: refused("torch.amp:GradScaler", TypeError, device_type="cuda")
        and takes("torch.amp:GradScaler", "device"),
    ),
    Misconception(
        "bf16 is only available on Ampere.",
        "On Ampere and everything newer, on CPUs, and on accelerators of other makers.",
        ("misconception 4.137",),
        lambda: (find("torch").ones(2, dtype=find("torch").bfloat16) * 2).sum().item() == 4,
    ),
    Misconception(
        "Clip the gradients, unscale them, step.",
        "Unscale, clip, step: scaled gradients have a norm that is thousands of times too large.",
        ("misconception 4.128",),
    ),
    Misconception(
        "Clipping has to all-gather the gradients, and scatter them again.",
        "Each rank sums the squares of its shards, one all-reduce adds them up (FSDP1's is of a single number), and "
        "each scales its own.",
        ("misconception 6", "misconception 4.109"),
    ),
    Misconception(
        "The optimizer's part of a step never communicates.",
        "True of `step()` itself. Clipping before it costs one all-reduce of a number.",
        ("misconception 0.19",),
        lambda: issued("optimizer") == ["OPTIM"],
    ),
    Misconception(
        "It does not matter when the optimizer is made. (Or: it must always be after wrapping.)",
        "With `fully_shard` and with FSDP1's default it must come after: otherwise it holds parameters that nobody "
        "trains. FSDP1 with `use_orig_params=True` is the exception.",
        ("misconception 25", "misconception 0.24"),
    ),
    Misconception(
        "Weight decay for whatever has `p.dim() >= 2`.",
        "Under FSDP1 shards are one-dimensional, so the rule decays nothing. Make groups by name, before wrapping. "
        "FSDP2's parameters keep their shape.",
        ("misconception 1.4",),
    ),
    Misconception(
        "Adam's state holds the parameter, too.",
        "It holds a step and two moments. The parameter is in the optimizer's groups.",
        ("misconception 4.13",),
        lambda: _adam_keeps() == {"step", "exp_avg", "exp_avg_sq"},
    ),
    Misconception(
        "Gradient accumulation works as with DDP: `no_sync()` skips the all-reduce.",
        "It skips the *reduce-scatter*, so each rank keeps whole gradients between micro-batches: much of what "
        "sharding has saved. FSDP2 has `set_requires_gradient_sync` in place of `no_sync`.",
        ("misconception 1.6", "misconception 4.7", "misconception 4.51"),
        lambda: absent(f"{FSDP2}.no_sync") and not absent(f"{FSDP2}.set_requires_gradient_sync")
        and issued(grad_accum=2, requires_gradient_sync="last").count("REDUCE_SCATTER(layers.0)") == 1
        and issued(grad_accum=2).count("REDUCE_SCATTER(layers.0)") == 2,
    ),
    Misconception(
        "To accumulate gradients you must use `no_sync()`.",
        "You may. It trades reduce-scatters for memory; without it each micro-batch is reduced, and the sum is the "
        "same.",
        ("misconception 4.90",),
    ),
    Misconception(
        "A DistributedSampler shows each sample once.",
        "It pads: 10 samples on 4 ranks are 12. Drop the rest in training; in evaluation mask what is there twice.",
        ("misconception 37",),
        lambda: _of_ten_samples_on_four_ranks() == 12,
    ),
)  # fmt: skip
