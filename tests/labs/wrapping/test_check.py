"""What makes no sense for an api is refused before any process group exists, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from labs.cluster.process_group import Place
from labs.config import TrainConfig
from labs.wrapping import WRAPPERS, check
from labs.wrapping.check import SETTINGS_OF

CPU = torch.device("cpu")


def place(ranks: int, per_node: int | None = None) -> Place:
    return Place(0, ranks, 0, per_node or ranks)


def refusal(ranks: int = 2, **settings: Any) -> str:
    assert not dist.is_initialized()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (callers look at the message)
        check(TrainConfig(**settings), place(ranks), CPU)
    return str(error.value)


@pytest.mark.parametrize("api", WRAPPERS)
def test_defaults_are_possible_for_every_api(api: Any) -> None:
    check(TrainConfig(api=api), place(1 if api == "single" else 2), CPU)


OTHER_VALUES: dict[str, Any] = {
    "wrap": "root",
    "reshard_after_forward": True,
    "shard_size": 2,
    "forward_prefetch": 1,
    "backward_prefetch": 1,
    "sharding_strategy": "SHARD_GRAD_OP",
    "limit_all_gathers": False,
    "use_orig_params": False,
    "sync_module_states": True,
    "reduce_dtype": "bf16",
    "cpu_offload": True,
}


@pytest.mark.parametrize("field", SETTINGS_OF)
@pytest.mark.parametrize("api", WRAPPERS)
def test_a_setting_of_other_apis_is_refused_by_name(api: str, field: str) -> None:
    if api in SETTINGS_OF[field]:
        return
    text = refusal(1 if api == "single" else 2, api=api, **{field: OTHER_VALUES[field]})
    assert text.startswith(f"{field}={str(OTHER_VALUES[field]).lower() if OTHER_VALUES[field] is True else ''}")
    assert f"api is {api};" in text
    assert SETTINGS_OF[field][0] in text


REFUSED = [
    ({"api": "single"}, "api=single is one process, and there are 2 ranks; use api=ddp or fsdp2"),
    ({"api": "fsdp2", "reshard_after_forward": 3}, "reshard_after_forward=3 is not a divisor of the 2 ranks"),
    ({"api": "mini", "forward_prefetch": True}, "forward_prefetch=true is not what api=mini takes: none"),
    ({"api": "fsdp2", "backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch=BACKWARD_PRE is not what api=fsdp2"),
    ({"api": "hsdp", "forward_prefetch": 0}, "forward_prefetch=0 is not what api=hsdp takes"),
    ({"api": "fsdp1", "forward_prefetch": 2}, "forward_prefetch=2 is a depth, and fsdp1 has only true or false"),
    ({"api": "fsdp1", "forward_prefetch": 1}, "forward_prefetch=1 is a depth, and fsdp1 has only true or false"),
    ({"api": "fsdp1", "backward_prefetch": "PRE"}, "BACKWARD_PRE, BACKWARD_POST, off, or none"),
    ({"api": "fsdp1", "shard_size": 2}, "use sharding_strategy=HYBRID_SHARD"),
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
        "requires_gradient_sync=last is what FSDP1's NO_SHARD cannot do with param_dtype=bf16",
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
