"""The GPT trained with the mini-FSDP has the losses of one plain process on the whole batch, for many steps."""

import pytest
import torch
import torch.distributed as dist

from fsdp_sim.mini import fully_shard
from fsdp_sim.ranks import run
from labs.data import load_corpus, local_batch
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard, train_step
from labs.model import build
from labs.model.gpt import GPTConfig

STEPS, BATCH, SEQ_LEN = 20, 12, 32
CONFIG = GPTConfig.preset("teaching", n_layer=3)
CORPUS = load_corpus()


def losses_of(model: torch.nn.Module, rank: int, world_size: int) -> torch.Tensor:
    """Losses of this rank's rows, shape (steps,)."""
    optimizer = make_optimizer(model)
    losses = []
    for step in range(STEPS):
        x, y = (local_batch(t, rank, world_size) for t in CORPUS.batch(step, BATCH, SEQ_LEN))
        losses.append(train_step(model, optimizer, x, y))
    return torch.stack(losses)


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return losses_of(build(CONFIG), rank=0, world_size=1)


def test_twenty_adamw_steps_have_the_same_losses(plain: torch.Tensor) -> None:
    """On three ranks, which divide no parameter evenly; two steps on other numbers: test_ladder."""

    def train() -> torch.Tensor:
        model = shard(build(CONFIG), fully_shard)
        return mean_over_ranks(losses_of(model, dist.get_rank(), dist.get_world_size()))

    for losses in run(train, 3, progress=False):
        torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)
    assert plain[-1] < plain[0] - 1
