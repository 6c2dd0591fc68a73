"""Training on the ranks and in one process side by side, for the tests of all siblings."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.timeline import RECORDER, Event, Header, Timeline
from tests.mini.models import batches, mean_over_ranks, my_part, token_loss


def whole_batch(model: nn.Module, steps: int, **adamw: Any) -> tuple[list[float], nn.Module]:
    """AdamW in one process on the whole batch: the losses, and the model at the end with its last gradients."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), **adamw)
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = token_loss(plain, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, plain


def my_part_of_it(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    """The same on this rank's part of the batch; the losses are means over the ranks."""
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = token_loss(model, my_part(batch))
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def assert_equal_to(
    plain: nn.Module, found: dict[str, torch.Tensor], grads: bool = False, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Whole parameters or gradients, by name, are those of one process."""
    expected = {name: p.grad if grads else p.detach() for name, p in plain.named_parameters()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].detach(), value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


AFTER_ADAMW = {"rtol": 1e-3, "atol": 1e-5}
"""AdamW divides by tiny second moments."""


def record(run: Callable[[], object]) -> list[Event]:
    RECORDER.start(dist.get_rank())
    run()
    return RECORDER.stop()


def labels(events: list[Event], *ops: str) -> list[str]:
    """Operations in the order in which they were issued; of some kinds only, if given."""
    return [e.label for e in events if not e.is_memory and (not ops or e.op in ops)]


def counts(events: list[Event]) -> dict[str, int]:
    """How many collectives of each kind."""
    return dict(Counter(str(e.op) for e in events if e.group_size > 1))


def waited_for(events: list[Event]) -> dict[str, list[str]]:
    """What each operation waited for, by label."""
    by_seq = {e.seq: e for e in events}
    return {e.label: [by_seq[seq].label for seq in e.waits_on] for e in events if not e.is_memory}


def timeline_of(events: list[Event]) -> Timeline:
    return Timeline(Header(producer="mini", clock="measured", world_size=1), events)
