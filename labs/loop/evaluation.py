"""What the model can do so far: its loss on the validation text, and a sample of what it writes.

Every forward of a sharded model is a collective, so all ranks take part in both, with equally many forwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from labs.cluster.process_group import RankPlace
from labs.data.loader import Loader
from labs.data.tokenizer import Tokenizer
from labs.model.gpt import generate
from labs.wrapping import Wrapped


def evaluate(
    wrapped: Wrapped, loader: Loader, n_batches: int, place: RankPlace, device: torch.device, n_micro_batches: int = 1
) -> float:
    """The mean loss per token, in nats, over the first ``n_batches`` batches: the same on every rank.

    Args:
        n_micro_batches: as in training, so that it takes no more memory.
    """
    loss_sum, n_tokens, position = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    with wrapped.evaluation():
        for _ in range(n_batches):
            batch = loader.rows(position, place.rank, place.world_size).to(device)
            for x, y in zip(batch.x.chunk(n_micro_batches), batch.y.chunk(n_micro_batches), strict=True):
                loss_sum += wrapped.model(x, y, reduction="sum")
            n_tokens += batch.n_tokens
            position = batch.next
    if dist.is_initialized():
        dist.all_reduce(loss_sum)
    return loss_sum.item() / n_tokens


def sample(wrapped: Wrapped, words: Tokenizer, prompt: str, n: int, seed: int, device: torch.device) -> str:
    """The prompt and ``n`` tokens more; without a prompt a line begins.

    All ranks draw the same tokens: each has a generator with the same seed, and the global one stays as it is.
    Characters that a terminal would act on are replaced.
    """
    tokens = torch.tensor(list(words.encode(prompt or "\n")), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with wrapped.evaluation():
        written = generate(wrapped.model, tokens, n, temperature=0.8, generator=generator)
    text = words.decode(written.tolist())
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
