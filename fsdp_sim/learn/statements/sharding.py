"""What people say about how a tensor is cut, moved and initialized."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import absent, defaults, find, takes

FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"


def _rows_of_five() -> list[int]:
    return [len(rows) for rows in find("torch:arange")(5).chunk(4)]


MISCONCEPTIONS = (
    Misconception(
        "One GPU holds the left half of the matrix, the other the right half.",
        "FSDP2 cuts dimension 0: rows. FSDP1 flattens all parameters of a unit into one and cuts that into equal runs "
        "of numbers. Halves of columns would be tensor parallelism.",
        ("misconception 2.14", "misconception 2.16"),
    ),
    Misconception(
        "With N rows and R ranks each rank holds N/R rows.",
        "The cut is that of `torch.chunk`: ceil(N/R) rows each until none are left. The last ranks may hold fewer, or "
        "none at all: 5 rows on 4 ranks are 2, 2, 1, 0.",
        ("misconception 4.107",),
        lambda: _rows_of_five() == [2, 2, 1],
    ),
    Misconception(
        "Whether a parameter is sharded says `param._sharded`, or `module.numel_padded_per_param`.",
        "Neither exists, so a loop over them prints nothing, and nothing is what one then believes. Ask "
        "`isinstance(p, DTensor)`, `p.placements` and `p.to_local().shape`.",
        ("misconception 19", "misconception 4.87", "misconception 1.20"),
        lambda: absent("torch:Tensor._sharded", f"{FSDP1}.numel_padded_per_param",
                       "torch.distributed.tensor:DTensor._sharded"),
    ),
    Misconception(
        "The model must be on the GPU before it is wrapped. (And, in the same text: it must not be.)",
        "Neither. `fully_shard` moves the shards to the mesh's device. FSDP1 takes the module where it is, or moves "
        "it with `device_id`; only `sync_module_states` wants it on the GPU. Moving everything first merely needs "
        "memory for the whole model once.",
        ("misconception 10", "misconception 4.3", "misconception 4.84"),
        lambda: defaults(FSDP1, device_id=None) and not takes("torch.distributed.fsdp:fully_shard", "device_id"),
    ),
    Misconception(
        "FSDP broadcasts the initial weights, as DDP does.",
        "`fully_shard` never does: with another seed on each rank the model is a mosaic. FSDP1 does with "
        "`sync_module_states=True` only; the default is False.",
        ("misconception 26",),
        lambda: defaults(FSDP1, sync_module_states=False),
    ),
    Misconception(
        "`use_orig_params=True` gives back normal parameters.",
        "It gives back their names. What is behind a name is a one-dimensional piece, maybe an empty one: rules by "
        "`dim()` or `shape` go wrong.",
        ("misconception 28",),
        lambda: takes(FSDP1, "use_orig_params"),
    ),
    Misconception(
        "The FSDP class shards each parameter along dimension 0.",
        "That is `fully_shard`. The class FullyShardedDataParallel cuts its one-dimensional flat parameter, so the "
        "boundary runs through the middle of a matrix, or of a row.",
        ("misconception 4.121",),
    ),
    Misconception(
        "The placements of a sharded parameter are always `(Shard(0),)`.",
        "On a mesh of one dimension. Hybrid sharding has `(Replicate(), Shard(0))`, tensor parallelism adds its own, "
        "and `shard_placement_fn` chooses another dimension.",
        ("misconception 4.106", "misconception 4.111"),
        lambda: takes("torch.distributed.fsdp:fully_shard", "shard_placement_fn"),
    ),
    Misconception(
        "FSDP's flags also turn on activation checkpointing.",
        "There is no such flag in torch: checkpointing is a wrapper of its own, `checkpoint_wrapper` or "
        "`torch.utils.checkpoint`. Trainers built on top have flags that do both.",
        ("misconception 4.111",),
        lambda: not takes("torch.distributed.fsdp:fully_shard", "activation_checkpointing")
        and not takes(FSDP1, "activation_checkpointing"),
    ),
    Misconception(
        "`fully_shard` makes a DTensor of each layer.",
        "Of each *parameter*. The call decides which parameters are gathered together: the bytes stay the same, the "
        "number of collectives and the peak of memory do not.",
        ("misconception 4.98",),
    ),
    Misconception(
        "DTensor's placements are in `torch.distributed._tensor.placement_specs`.",
        "There is no such module: `from torch.distributed.tensor import DTensor, Replicate, Shard`.",
        ("misconception 4.105",),
        lambda: absent("torch.distributed._tensor.placement_specs") and not absent("torch.distributed.tensor:Shard"),
    ),
    Misconception(
        "Print the model to see whether it is sharded.",
        "FSDP1 prints its wrappers. `fully_shard` changes only the name of the class (`FSDPLinear`), and that says "
        "nothing about shapes: look at placements and local shapes.",
        ("misconception 4.145",),
    ),
    Misconception(
        "Always create the model on the CPU first.",
        "Fine for a small one. 70 B parameters in fp32, made by 8 processes of one host, are 2.24 TB. Build on the "
        "meta device and fill the shards, or load on one rank and broadcast.",
        ("misconception 4.91",),
        lambda: 70e9 * 4 * 8 == 2.24e12,
    ),
    Misconception(
        "`sync_module_states=True` keeps the ranks from drifting apart.",
        "It copies rank 0's weights once, at construction, and needs them on a GPU. Afterwards there is nothing to "
        "keep in step: there is one copy, in slices.",
        ("misconception 2.29",),
        lambda: takes(FSDP1, "sync_module_states"),
    ),
)  # fmt: skip
