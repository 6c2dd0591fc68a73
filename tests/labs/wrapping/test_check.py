"""What makes no sense for an api is refused before any process group exists, in one sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.wrapping import WRAPPERS, check

CPU = torch.device("cpu")


def place(ranks: int, per_node: int | None = None) -> RankPlace:
    return RankPlace(0, ranks, 0, per_node or ranks)


def refusal(ranks: int = 2, **settings: Any) -> str:
    assert not dist.is_initialized()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (callers look at the message)
        check(TrainConfig(**settings), place(ranks), CPU)
    return str(error.value)


@pytest.mark.parametrize("api", WRAPPERS)
def test_defaults_are_possible_for_every_api(api: Any) -> None:
    check(TrainConfig(api=api), place(1 if api == "single" else 2), CPU)


SHARDED = {"fsdp2", "hsdp", "mini", "fsdp1"}
OTHER_VALUES: dict[str, tuple[Any, set[str]]] = {  # another value than the default, and the apis that may have it
    "wrap": ("root", SHARDED),
    "reshard_after_forward": (True, SHARDED - {"fsdp1"}),
    "shard_size": (2, {"hsdp", "fsdp1"}),
    "forward_prefetch": (1, SHARDED),
    "backward_prefetch": (1, SHARDED),
    "sharding_strategy": ("SHARD_GRAD_OP", {"fsdp1"}),
    "limit_all_gathers": (False, {"fsdp1"}),
    "use_orig_params": (False, {"fsdp1"}),
    "sync_module_states": (True, {"fsdp1"}),
    "reduce_dtype": ("bf16", SHARDED),
    "cpu_offload": (True, SHARDED),
}


@pytest.mark.parametrize("field", OTHER_VALUES)
@pytest.mark.parametrize("api", WRAPPERS)
def test_a_setting_of_other_apis_is_refused_by_name(api: str, field: str) -> None:
    value, apis = OTHER_VALUES[field]
    if api in apis:
        return
    text = refusal(1 if api == "single" else 2, api=api, **{field: value})
    assert text.startswith((f"{field}=", f"Plan.{field} is {value!r}, which is a setting of "))
    assert re.search(rf"api(=| is '?){api}\b", text)


REFUSED = [
    ({"api": "single"}, "api=single is one process, and there are 2 ranks; use api=ddp or fsdp2"),
    ({"api": "fsdp2", "reshard_after_forward": 3}, "reshard_after_forward=3 is not a divisor of the 2 ranks"),
    ({"api": "mini", "forward_prefetch": True}, "Plan.forward_prefetch is True, which is fsdp1's"),
    ({"api": "fsdp2", "backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch is 'BACKWARD_PRE', which is fsdp1's"),
    ({"api": "hsdp", "forward_prefetch": 0}, "Plan.forward_prefetch is 0; it must be None (implicit"),
    ({"api": "fsdp1", "forward_prefetch": 2}, "Plan.forward_prefetch is 2, which is fsdp2's"),
    ({"api": "fsdp1", "forward_prefetch": 1}, "Plan.forward_prefetch is 1, which is fsdp2's"),
    ({"api": "fsdp1", "backward_prefetch": "PRE"}, "Plan.backward_prefetch is 'PRE'; it must be None"),
    ({"api": "fsdp1", "shard_size": 2}, "give 'HYBRID_SHARD', or leave shard_size None"),
    ({"api": "fsdp1", "use_orig_params": False}, "use weight_decay=0 or use_orig_params=true"),
    (
        {"api": "fsdp1", "use_orig_params": False, "weight_decay": 0.0, "compile": True},
        "use_orig_params=false is what torch.compile cannot see through",
    ),
    ({"api": "fsdp1", "sync_module_states": True}, "sync_module_states=true is for GPUs only"),
    ({"api": "fsdp1", "cpu_offload": True}, "cpu_offload=true is for GPUs only with fsdp1"),
    ({"api": "fsdp1", "sharding_strategy": "HYBRID_SHARD"}, "never averages gradients between them; use api=ddp"),
    (
        {"api": "fsdp1", "sharding_strategy": "NO_SHARD", "param_dtype": "bf16", "micro_batch": 1,
         "requires_gradient_sync": "last"},
        "requires_gradient_sync=last is what NO_SHARD cannot do with param_dtype=bf16",
    ),
    ({"api": "fsdp2", "wrap": "Blok"}, "did you mean 'Block'"),
    ({"api": "hsdp", "shard_size": 3}, "shard_size=3: 2 ranks do not divide into groups of 3; give shard_size"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=str)
def test_combinations_that_make_no_sense(settings: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**settings)


def test_fsdp1_with_offload_accumulates_in_the_last_micro_batch_only() -> None:
    gpu = torch.device("cuda", 0)
    settings: dict[str, Any] = {"api": "fsdp1", "cpu_offload": True, "global_batch": 8}
    with pytest.raises(ValueError, match="use requires_gradient_sync=last or api=fsdp2"):
        check(TrainConfig(**settings, micro_batch=2), place(2), gpu)
    check(TrainConfig(**settings, micro_batch=2, requires_gradient_sync="last"), place(2), gpu)
    check(TrainConfig(**settings, micro_batch=4), place(2), gpu)
    check(TrainConfig(**settings), place(2), gpu)


def test_copies_are_per_node_or_halves() -> None:
    from labs.wrapping.mesh import shard_size

    hsdp = TrainConfig(api="hsdp")
    assert shard_size(hsdp, place(16, per_node=8)) == 8
    assert shard_size(hsdp, place(8)) == 4
    assert shard_size(hsdp, place(1)) == 1
    assert shard_size(TrainConfig(api="hsdp", shard_size=2), place(8)) == 2
    assert shard_size(TrainConfig(api="fsdp2"), place(8)) == 8
    with pytest.raises(
        ValueError, match=r"shard_size=none: 3 ranks do not divide into two halves; give .* one of 1, 3"
    ):
        shard_size(hsdp, place(3))
