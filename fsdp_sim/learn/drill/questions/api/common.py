"""What questions of several files of this topic share."""

from __future__ import annotations

API = "torch/distributed/fsdp/_fully_shard/_fully_shard.py"


MODELS = ("gpt2-1.5b", "llama2-7b", "llama3-8b", "llama2-13b", "llama3-70b")
