"""What people say about saving, loading and resuming."""

from __future__ import annotations

import ast
import inspect
import io
import pickle

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import absent, defaults, find, refused, takes

FSDP = "torch.distributed.fsdp"
FSDP1 = f"{FSDP}:FullyShardedDataParallel"
DCP = "torch.distributed.checkpoint"


def _metadata_is_unpickled() -> bool:
    return "pickle.load(" in inspect.getsource(find(f"{DCP}.filesystem:FileSystemReader.read_metadata"))


def _broadcast_returns_nothing() -> bool:
    source = inspect.getsource(inspect.unwrap(find("torch.distributed:broadcast_object_list")))
    returned = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    return not any(returned)


def _a_class_is_refused() -> bool:
    file = io.BytesIO()
    find("torch").save({"config": Misconception}, file)
    file.seek(0)
    return refused("torch:load", pickle.UnpicklingError, file)


MISCONCEPTIONS = (
    Misconception(
        "Only rank 0 needs the state dict: `if rank == 0: save(model.state_dict())`.",
        "A full state dict is gathered by collectives: all ranks call, rank 0 writes. If only rank 0 calls, FSDP1 "
        "hangs. FSDP2's `state_dict()` does not communicate, so it does not hang: it writes a file with rank 0's "
        "slices.",
        ("misconception 9", "misconception 1.5", "misconception 4.61", "misconception 4.65", "misconception 4.80"),
    ),
    Misconception(
        "You must use FULL_STATE_DICT, the most common type.",
        "A full dict is for export. It is the whole model in one process, however many GPUs there are, and without "
        "`rank0_only` and offload to the CPU, on every GPU. To save and resume use sharded state through "
        "`torch.distributed.checkpoint`: 1/N for each rank.",
        ("misconception 29", "misconception 4.8", "misconception 4.79", "misconception 4.89"),
    ),
    Misconception(
        "A checkpoint is the model's weights, and perhaps the epoch.",
        "Without Adam's moments the loss jumps. Without the state of the random generators, the scheduler and the "
        "place in the data, the run is another one, and in the middle of an epoch it skips or repeats samples.",
        ("misconception 4.67", "misconception 4.73", "misconception 4.142"),
    ),
    Misconception(
        "`weights_only=True` makes a downloaded checkpoint safe.",
        "Ways around it were found twice (CVE-2025-32434, CVE-2026-24747). And it does not reach DCP, whose "
        "`.metadata` is unpickled: loading a stranger's checkpoint runs a stranger's code.",
        ("misconception 30",),
        _metadata_is_unpickled,
    ),
    Misconception(
        "Saving with DCP is atomic.",
        "Only its `.metadata` is renamed into place; shards are written where they stand, and overwriting, the "
        "default, first destroys what was there. Save to a new folder, and mark it when all of it is on disk.",
        ("misconception 31",),
        lambda: defaults(f"{DCP}:FileSystemWriter", overwrite=True),
    ),
    Misconception(
        "`async_save` is safe as it comes.",
        "It needs a process group of its own, the previous save awaited, its future looked at (errors appear only "
        "there), and the commit only after that.",
        ("misconception 32",),
        lambda: takes(f"{DCP}:async_save", "process_group"),
    ),
    Misconception(
        "Going from DDP to FSDP hardly changes checkpointing.",
        "It is what changes most: no rank has the model, so gathering or saving it takes all of them.",
        ("misconception 4.12",),
    ),
    Misconception(
        "`model.state_dict()` of a sharded model returns the local shard.",
        "FSDP1's default type is FULL: a collective that returns everything. FSDP2 returns DTensors, each with its "
        "slice and the shape of the whole.",
        ("misconception 4.68",),
        lambda: find(f"{FSDP}:StateDictType").FULL_STATE_DICT.value == 1,
    ),
    Misconception(
        "A full state dict is always put together on every GPU.",
        "Not with `rank0_only` and `offload_to_cpu`: then it is put together on rank 0, in the CPU's memory.",
        ("misconception 4.56",),
        lambda: takes(f"{FSDP}:FullStateDictConfig", "rank0_only", "offload_to_cpu"),
    ),
    Misconception(
        "A full dict with offload is a sharded checkpoint that streams to rank 0.",
        "It is a *full* dict, in rank 0's CPU memory. A sharded one is written by all ranks.",
        ("misconception 4.126",),
    ),
    Misconception(
        "Use LOCAL_STATE_DICT to save.",
        "It is made of flat local pieces and cannot be loaded on another number of ranks.",
        ("misconception 4.78",),
    ),
    Misconception(
        "Switch with `FSDP.state_dict_type(...)`, also for models made of DTensors.",
        "It is FSDP1's, and deprecated. `get_model_state_dict` and `set_model_state_dict` of "
        "`torch.distributed.checkpoint.state_dict` serve both, with full or sharded state; DCP writes it.",
        ("misconception 1.7", "misconception 4.110"),
        lambda: takes(f"{DCP}.state_dict:get_model_state_dict", "options")
        and takes(f"{DCP}.state_dict:StateDictOptions", "full_state_dict", "cpu_offload", "broadcast_from_rank0"),
    ),
    Misconception(
        "Each rank saves its shard to a file of its own with `torch.save`.",
        "That loads on the same number of ranks and no other. Use DCP, which knows which slice of which tensor is in "
        "which file.",
        ("misconception 1.28",),
    ),
    Misconception(
        "Only rank 0 needs disk space.",
        "For a full dict. A sharded checkpoint needs a shared file system, or room on each node.",
        ("misconception 1.24",),
    ),
    Misconception(
        "`ShardedStateDictConfig(rank0_only=True)` collapses the shards into one file.",
        "A TypeError: a sharded dict has no form that one rank holds.",
        ("misconception 4.52", "misconception 4.57"),
        lambda: refused(f"{FSDP}:ShardedStateDictConfig", TypeError, rank0_only=True),
    ),
    Misconception(
        "A sharded dict is saved with `if rank == 0: torch.save(ckpt)`.",
        "That writes rank 0's slices and loses the rest, without an error. All ranks save, through DCP.",
        ("misconception 4.53",),
    ),
    Misconception(
        "`optimizer.state_dict()` on rank 0 is the optimizer's state, and `load_state_dict` puts it back.",
        "It is rank 0's shard of it, which would then be loaded on every rank. Use `get_optimizer_state_dict` and "
        "`set_optimizer_state_dict` (FSDP1: `FSDP.optim_state_dict` and `optim_state_dict_to_load`).",
        ("misconception 4.54", "misconception 4.71", "misconception 4.81"),
        lambda: not absent(f"{DCP}.state_dict:get_optimizer_state_dict", f"{FSDP1}.optim_state_dict"),
    ),
    Misconception(
        "`ckpt = broadcast_object_list([ckpt], src=0)[0]`.",
        "The function fills the list in place and returns None, so this is a TypeError. And if it worked it would "
        "pickle the whole model to every rank: N times the host memory.",
        ("misconception 4.55", "misconception 4.63"),
        _broadcast_returns_nothing,
    ),
    Misconception(
        "`model.state_dict(state_dict_type=..., fsdp_state_dict_config=...)`, or "
        "`FSDP.StateDictType.FULL_STATE_DICT`.",
        "The method has no such arguments and the class no such attribute. `StateDictType` is imported, and chosen by "
        "a context manager; better, call `get_model_state_dict`.",
        ("misconception 4.6", "misconception 4.62"),
        lambda: absent(f"{FSDP1}.StateDictType") and not takes(f"{FSDP1}.state_dict", "state_dict_type"),
    ),
    Misconception(
        "`summon_full_params` is how older versions saved.",
        "It still exists, for looking at whole parameters or changing them. It was never the way to save.",
        ("misconception 4.69",),
        lambda: not absent(f"{FSDP1}.summon_full_params"),
    ),
    Misconception(
        "To resume: load the file, take `model.state_dict()`, load that into the model.",
        "Read it again: it loads the model's *own* weights, and the file's are never used. Training silently starts "
        "from the beginning.",
        ("misconception 4.70",),
    ),
    Misconception(
        "The comment says \"on rank 0\", so only rank 0 reads the file.",
        "What counts is the code: without a condition every rank reads it.",
        ("misconception 4.72",),
    ),
    Misconception(
        "`torch.load` opens any checkpoint.",
        "Since torch 2.6 it reads tensors and plain containers only, unless told otherwise: a checkpoint with an "
        "object of a class of its own in it is refused.",
        ("misconception 1.21",),
        _a_class_is_refused,
    ),
)  # fmt: skip
