"""What people say about porting: from DDP, from FSDP1, and from other people's scripts."""

from __future__ import annotations

import inspect

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import absent, find, takes

FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"
FSDP2 = "torch.distributed.fsdp:fully_shard"
NAMES = ("auto_wrap_policy", "sharding_strategy", "limit_all_gathers", "backward_prefetch")

MISCONCEPTIONS = (
    Misconception(
        "`FSDP(model, sharding_strategy=\"FULL_SHARD\")`.",
        "torch wants the enum `ShardingStrategy.FULL_SHARD`; the text ends in a KeyError. Texts are for the "
        "configurations of Lightning and Accelerate.",
        ("misconception 8", "misconception 4.5"),
        lambda: "FULL_SHARD" not in [member.value for member in find("torch.distributed.fsdp:ShardingStrategy")],
    ),
    Misconception(
        "A model under `fully_shard` has `no_sync()` and `clip_grad_norm_()`.",
        "Those are methods of FSDP1; here they are AttributeErrors. Use `set_requires_gradient_sync` and "
        "`torch.nn.utils.clip_grad_norm_`.",
        ("misconception 23",),
        lambda: absent("torch.distributed.fsdp:FSDPModule.no_sync", "torch.distributed.fsdp:FSDPModule.clip_grad_norm_")
        and not absent("torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync"),
    ),
    Misconception(
        "The API to learn is FullyShardedDataParallel with its arguments.",
        "It is FSDP1, and the official tutorial calls it deprecated and teaches `fully_shard(mesh=, "
        "reshard_after_forward=, mp_policy=, offload_policy=)`, for each layer and then the root. Much of what is "
        "found on the web, torch 1.12 included, is about the former.",
        ("misconception 34", "misconception 0.23", "misconception 1.32", "misconception 2.35", "misconception 3.16",
         "misconception 4.143"),
        lambda: takes(FSDP2, "mesh", "reshard_after_forward", "mp_policy", "offload_policy")
        and not any(takes(FSDP2, name) for name in NAMES) and takes(FSDP1, *NAMES),
    ),
    Misconception(
        "After swapping the wrapper, everything else of a DDP script stays: AMP, clipping, scheduler.",
        "The scheduler does. Under FSDP1 the scaler and clipping are others; and under both, look at EMA and "
        "deepcopy, parameter groups, `generate()`, and checkpoints.",
        ("misconception 4.41", "misconception 4.60"),
    ),
    Misconception(
        "`torch.compile(model)` after FSDP.",
        "FSDP1 needs `use_orig_params=True`, or stays eager without a word. With FSDP2 compile each block in place, "
        "before `fully_shard`. Compiling a whole model puts `_orig_mod.` before every name in a checkpoint.",
        ("misconception 4.94",),
        lambda: next(iter(find("torch").compile(find("torch.nn").Linear(2, 2)).state_dict())).startswith("_orig_mod."),
    ),
    Misconception(
        "FSDP adds 10 to 30 seconds of set-up.",
        "Nobody says where that was measured. Loading the model and starting processes take what they take, with any "
        "strategy.",
        ("misconception 1.15",),
    ),
    Misconception(
        "`FSDP(model, flatten_parameters=True, reshard_after_forward=True, move_grads_to_cpu=True)`.",
        "Arguments of FairScale, where FSDP began in 2021; in torch each is a TypeError. The version in torch has "
        "gone its own way since: read torch's documentation, not the posts of those years.",
        ("misconception 19", "misconception 4.86", "misconception 4.144"),
        lambda: not any(takes(FSDP1, n) for n in ("flatten_parameters", "reshard_after_forward", "move_grads_to_cpu")),
    ),
    Misconception(
        "`fully_shard` and FSDP with a policy are the low and the high level of the same thing.",
        "Two implementations: flat parameters in wrapper modules, and one DTensor a parameter with hooks. Their "
        "checkpoints, clipping and accumulation differ, and neither calls the other.",
        ("misconception 4.100", "misconception 4.103"),
        lambda: "fully_shard" not in inspect.getsource(find(FSDP1)),
    ),
    Misconception(
        "`use_orig_params=False` flattens the parameters for better memory efficiency.",
        "Both values flatten. True shows views under the original names, which `torch.compile` and parameter groups "
        "need; frozen parameters then cost gradient memory.",
        ("misconception 2.28",),
    ),
    Misconception(
        "`model.cuda()`, `FSDP(model)`, train.",
        "Without a process group it fails; without `set_device` every rank takes GPU 0; without a DistributedSampler "
        "every rank trains on the same data.",
        ("misconception 3.15",),
    ),
    Misconception(
        "`torch.cuda.set_device(RANK)`.",
        "On the second node RANK is 8 and there is no GPU 8. Use LOCAL_RANK.",
        ("misconception 4.66",),
    ),
    Misconception(
        "Import `apply_activation_checkpointing_wrapper`, and `LooseVersion` from distutils.",
        "The first is now `apply_activation_checkpointing`; distutils left Python with 3.12.",
        ("misconception 4.129",),
        lambda: absent("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:"
                       "apply_activation_checkpointing_wrapper"),
    ),
    Misconception(
        "The tutorial fine-tunes T5 with 3 B parameters, with the strategy it defines.",
        "Its code loads `t5-base`, 220 M, and the line with the strategy is commented out, so FULL_SHARD is used. "
        "Read what the code does.",
        ("misconception 4.133", "misconception 4.134"),
    ),
    Misconception(
        "Lightning: `Trainer(gpus=4)`.",
        "Removed in Lightning 2.0: `Trainer(devices=4, accelerator=\"gpu\", strategy=...)`. And the module in that "
        "example uses a `self.criterion` that it never makes.",
        ("misconception 4.96",),
    ),
    Misconception(
        "The list of references says which post is about what.",
        "Two titles of one such list belong to other posts than the links do. Follow the link.",
        ("misconception 1.31",),
    ),
)  # fmt: skip
