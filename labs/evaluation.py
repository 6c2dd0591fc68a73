"""What the model can do so far: its loss on the validation text, and a sample of what it writes.

Every forward of a sharded model is a collective, so all ranks take part in both, with equally many forwards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from labs.gpt import generate
from labs.loader import Loader
from labs.place import Place
from labs.tokenizer import Tokenizer
from labs.wrapping import Wrapped


def evaluate(wrapped: Wrapped, loader: Loader, n_batches: int, place: Place, device: torch.device) -> float:
    """The mean loss per token, in nats, over the first ``n_batches`` batches: the same on every rank."""
    total = torch.zeros(2, dtype=torch.float64)
    position = 0
    with wrapped.evaluation():
        for _ in range(n_batches):
            batch = loader.rows(position, place.rank, place.world_size)
            loss = wrapped.model(batch.x.to(device), batch.y.to(device), reduction="sum")
            total += torch.tensor([loss.item(), (batch.y != -1).sum().item()], dtype=torch.float64)
            position = batch.next
    total = total.to(device)
    if dist.is_initialized():
        dist.all_reduce(total)
    loss_sum, n_tokens = total.tolist()
    return loss_sum / n_tokens


def sample(wrapped: Wrapped, words: Tokenizer, prompt: str, n: int, seed: int, device: torch.device) -> str:
    """The prompt and ``n`` tokens more. All ranks draw the same token: each has a generator with the same seed."""
    tokens = torch.tensor(list(words.encode(prompt)), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with wrapped.evaluation():
        written = generate(wrapped.model, tokens, n, temperature=0.8, generator=generator)
    text = words.decode(written.tolist())
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
