"""Proofs of the traps in how torch's functions are called, in checkpointing and in compile."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fsdp_sim.lint.proofs._toy import CPU, Block, Shown, Toy, fsdp1, fully_shard, mesh, own_tokens, raised
from fsdp_sim.lint.script.calling import known


def policy_not_bound() -> Shown:
    trap = raised(lambda: fsdp1(Toy(), auto_wrap_policy=transformer_auto_wrap_policy))
    fix = raised(lambda: fsdp1(Toy()))
    return Shown("TypeError" in trap and not fix, trap, fix or "is made")


def strategy_as_text() -> Shown:
    trap = raised(lambda: fsdp1(Toy(), sharding_strategy="FULL_SHARD"))
    fix = raised(lambda: fsdp1(Toy(), sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD))
    return Shown(bool(trap) and not fix, trap, fix or "is made")


def unknown_argument() -> Shown:
    """What names.toml says of torch's signatures, against those of the torch that is installed."""
    of: dict[str, Any] = vars(fsdp) | {
        "StateDictOptions": StateDictOptions, "apply_activation_checkpointing": wrapper.apply_activation_checkpointing,
    }  # fmt: skip
    said = known()["arguments"]
    lacking = {
        f"{name}({one})" for name, table in said.items() for one in table.get("instead", ())
        if one in inspect.signature(of[name]).parameters
    }  # fmt: skip
    new = {
        f"{name}({one})" for name, table in said.items() for one in inspect.signature(of[name]).parameters
        if one not in table["takes"]
    }  # fmt: skip
    trap = raised(lambda: fsdp.CPUOffload(offload_gradients=True))  # type: ignore[call-arg]
    return Shown(not lacking and not new and "TypeError" in trap, trap, f"torch takes these after all: {lacking | new}")


def moved_name() -> Shown:
    def is_there(name: str) -> bool:
        module, _, last = name.rpartition(".")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = importlib.import_module(name)
            except ModuleNotFoundError:
                found = getattr(importlib.import_module(module), last, None)  # type: ignore[assignment]
        is_old = "deprecated" in str(getattr(found, "__deprecated__", "")) or any(
            "deprecated" in str(w.message) for w in said
        )
        return found is not None and not is_old

    still = [name for name in known()["moved"] if is_there(name)]
    fix = is_there("torch.distributed.fsdp.wrap.size_based_auto_wrap_policy")
    return Shown(not still and fix, "each is gone or deprecated", f"still there: {still}")


def _order(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    """In which order blocks compute and get their gradients."""
    seen: list[str] = []
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, n=number: seen.append(f"forward {n}"))
        block.register_full_backward_hook(lambda *_, n=number: seen.append(f"backward {n}"))
    model(own_tokens()).sum().backward()
    return seen


def checkpoint_whole_model() -> Shown:
    """How many blocks' activations wait for backward at once: recomputed, and not yet used."""

    def alive(whole: bool) -> int:
        model: nn.Module = Toy()
        blocks = list(model.layers)  # type: ignore[arg-type]
        if whole:
            model = wrapper.checkpoint_wrapper(model)
        else:
            wrapper.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        seen = _order(model, blocks)
        most = now = 0
        for event in seen[len(blocks) :]:  # of backward
            now += 1 if event.startswith("forward") else -1
            most = max(most, now)
        return most

    trap, fix = alive(True), alive(False)
    return Shown(trap == 3 and fix == 1, f"{trap} blocks' activations at once in backward", f"{fix}")


def checkpoint_after_sharding() -> Shown:
    def prefetches(sharded_first: bool) -> str:
        model = Toy()
        for number, block in enumerate(model.layers):
            if sharded_first:
                model.layers[number] = wrapper.checkpoint_wrapper(fully_shard(block, mesh=mesh()))
            else:
                model.layers[number] = fully_shard(wrapper.checkpoint_wrapper(block), mesh=mesh())
        fully_shard(model, mesh=mesh())
        units = [one for one in model.layers if isinstance(one, FSDPModule)]
        return raised(lambda: model.set_modules_to_forward_prefetch(list(model.layers))) or f"{len(units)} units"  # type: ignore[operator]

    trap, fix = prefetches(True), prefetches(False)
    return Shown("Error" in trap and fix == "3 units", trap, fix)


class Graphs:
    """A backend of torch.compile that keeps the graphs."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.made.append(graph)
        return graph.forward


def compile_before_checkpointing() -> Shown:
    def knows_checkpoint(compiled_first: bool) -> bool:
        torch._dynamo.reset()
        graphs, block = Graphs(), Block(8)
        if compiled_first:
            module: nn.Module = wrapper.checkpoint_wrapper(torch.compile(block, backend=graphs))  # type: ignore[arg-type]
        else:
            module = torch.compile(wrapper.checkpoint_wrapper(block), backend=graphs)  # type: ignore[assignment]
        module(torch.ones(2, 8, requires_grad=True)).sum().backward()
        return any("checkpoint" in str(node.target) for graph in graphs.made for node in graph.graph.nodes)

    trap, fix = knows_checkpoint(True), knows_checkpoint(False)
    return Shown(not trap and fix, f"the graph has the checkpoint: {trap}", f"{fix}")


def compile_flat_parameters() -> Shown:
    def graphs_of(original: bool) -> int:
        torch._dynamo.reset()
        graphs = Graphs()
        model = FullyShardedDataParallel(Block(8), device_id=CPU, use_orig_params=original)
        torch.compile(model, backend=graphs)(torch.ones(2, 8)).sum().backward()
        return len(graphs.made)

    trap, fix = graphs_of(False), graphs_of(True)
    return Shown(trap == 0 and fix > 0, f"{trap} graphs", f"{fix} graphs")


def compiled_state_dict() -> Shown:
    trap = next(iter(torch.compile(Toy()).state_dict()))  # type: ignore[attr-defined]
    model = Toy()
    model.compile()
    fix = next(iter(model.state_dict()))
    return Shown(trap == f"_orig_mod.{fix}", trap, fix)


def no_shard() -> Shown:
    def numel(strategy: fsdp.ShardingStrategy) -> int:
        return sum(p.numel() for p in fsdp1(Toy(), sharding_strategy=strategy).parameters())

    trap, fix = numel(fsdp.ShardingStrategy.NO_SHARD), numel(fsdp.ShardingStrategy.FULL_SHARD)
    return Shown(trap >= 1.9 * fix, f"{trap} parameters on each rank", f"{fix}")
