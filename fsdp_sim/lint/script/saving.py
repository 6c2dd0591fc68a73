"""Traps in checkpoints and data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fsdp_sim.lint.script.ask import Found, certainly_fsdp2, wrapped
from fsdp_sim.lint.script.record import Call, Script, Thing, alternatives, every

OF_DEVICES = ("set_device", "device", "print", "init_process_group", "cuda", "to")
LOOKS_AT = ("len", "iter", "enumerate", "next", "tqdm", "cycle", "islice", "zip", "range")
CHECKPOINT = "torch.distributed.checkpoint"


def full_state_into_shards(script: Script) -> Iterator[Found]:
    for call in script.methods("load_state_dict"):
        if not certainly_fsdp2(call.on, script, call) or not call.args:
            continue
        if any(_is_read(one) for one in alternatives(call.args[0], call.path)):
            yield Found(call.node, "the file holds whole tensors, and the model has shards")


def _is_read(thing: Thing, depth: int = 0) -> bool:
    """Whether it is what torch.load or safetensors read, or an entry of that."""
    while depth < 8:
        if thing.call is not None and (thing.call.full == "torch.load" or thing.call.full.startswith("safetensors")):
            return True
        if thing.owner is None:
            return False
        thing, depth = thing.owner, depth + 1
    return False


def async_save_unchecked(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if call.full == f"{CHECKPOINT}.async_save" and not call.used:
            yield Found(call.node, "what async_save returns is thrown away")


def save_over_the_last(script: Script) -> Iterator[Found]:
    for call in script.calls:
        if call.full not in (f"{CHECKPOINT}.save", f"{CHECKPOINT}.async_save") or not call.loops:
            continue
        where = call.words.get("checkpoint_id") or _writer(call)
        for one in alternatives(where, call.path):
            if isinstance(one.node, ast.Constant) and isinstance(one.node.value, str):
                yield Found(call.node, f"each save goes to {one.node.value!r}")


def _writer(call: Call) -> Thing | None:
    writer = call.words.get("storage_writer")
    if writer is not None and writer.call is not None and writer.call.is_torch("FileSystemWriter"):
        return writer.call.given("path", 0)
    return None


def _loaders(script: Script) -> list[Call]:
    return [
        call
        for call in script.calls
        if call.full in ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
    ]


def same_data_on_every_rank(script: Script) -> Iterator[Found]:
    if not (script.sharded or wrapped(script)):
        return
    given = [
        thing for call in script.calls
        if call.name not in OF_DEVICES and call.name[:1] != "<"
        for thing in (*call.args, *call.words.values())
    ]  # fmt: skip
    if any(one.kind == "rank" for thing in given for one in _deep(thing)):
        return  # something is made for each rank: a seed, a part of the data
    for call in _loaders(script):
        own = {"sampler", "batch_sampler", "**"} & set(call.words)
        if own or len(call.args) > 3 or (call.used and _goes_on(call, script)):
            continue
        data = call.given("dataset", 0)
        if data is None or _may_be_split(data, script):
            continue
        seeded = [s for s in script.torch("manual_seed") if s.order < call.order]
        shuffles = call.given("shuffle", 2)
        ordered = shuffles is None or (isinstance(shuffles.node, ast.Constant) and not shuffles.node.value)
        if (ordered or seeded) and script.methods("backward"):
            yield Found(call.node, "the loader has no sampler, and nothing here differs between ranks")


def _deep(thing: Thing, depth: int = 0) -> Iterator[Thing]:
    yield thing
    if depth < 4:
        for item in thing.items:
            yield from _deep(item, depth + 1)


def _goes_on(call: Call, script: Script) -> bool:
    """Whether the loader is given to something that may split it (Accelerate, Lightning)."""
    return any(
        other.name in ("prepare", "setup_dataloaders", "prepare_data_loader", "setup")
        or (any(one.call is call for given in (*other.args, *other.words.values()) for one in every(given))
        and other.on is None and other.name not in LOOKS_AT
        and "<" not in other.full and not other.full.startswith("torch.")
        and other.name not in script.own)
        for other in script.calls if other is not call
    )  # fmt: skip


def _may_be_split(data: Thing, script: Script) -> bool:
    """Whether the data may be this rank's own: made by what cannot be read, or an iterable dataset."""
    for one in every(data):
        made = one.call
        if one.kind == "instance":
            if isinstance(one.node, ast.ClassDef) and "Iterable" in ast.unparse(one.node):
                return True
            if isinstance(one.node, ast.ClassDef) and "rank" in ast.unparse(one.node).lower():
                return True
        elif made is None or not made.full.startswith("torch.utils.data."):
            return True
    return False


def set_epoch_missing(script: Script) -> Iterator[Found]:
    for call in script.torch("DistributedSampler"):
        if "set_epoch" in script.text or call.literal("shuffle") is False or len(call.args) > 3:
            continue
        loops = [other for other in script.methods("backward") if len(set(other.loops)) >= 2]
        if loops and _goes_over_epochs(script):
            yield Found(call.node, "the epochs below call no set_epoch")


def _goes_over_epochs(script: Script) -> bool:
    return any(
        isinstance(node, ast.For) and "epoch" in ast.unparse(node.target).lower() for node in ast.walk(script.tree)
    )
