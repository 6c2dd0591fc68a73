"""A configuration as a script of torch alone, with fully_shard."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_sim.configurations import Configuration, read
from fsdp_sim.forms import FormState, torch_code
from fsdp_sim.migrate.configuration import promised, source_of
from fsdp_sim.migrate.numbers import has_model
from fsdp_sim.requests import PLAN_FIELDS, request_of_texts, resolve, with_job
from fsdp_sim.spec import text_of


def torch_script(path: str, texts: Mapping[str, str]) -> str:
    """A script of torch alone that trains with fully_shard as a configuration says, batch, accumulation, optimizer and
    clipping included. ``texts`` name the model and the GPUs, and replace what the file says.

    Raises:
        ValueError: it uses FSDP2 already; no model or GPU is named; see `fsdp_sim.requests.resolve`.
    """
    if not has_model(texts) or not ("gpu" in texts or "cluster" in texts):
        raise ValueError("a torch script has a model; name it and the GPUs: --model llama3-8b --gpu H100 --gpus 8")
    job = resolve(request_of_texts({**texts, "config": path}))
    old = read(path, gpus=job.cluster.gpus)
    source = source_of(old) or str(old.plan["api"])
    plan = promised(old, source, {"silent": (), "plugin": True})
    if plan["wrap"] == "embed_block_head" and source != "fsdp2":
        plan["wrap"] = "block"  # Accelerate's other units are not what the file asked for
    plan["reduce_dtype"] = old.plan.get("reduce_dtype", "fp32")  # DDP's
    plan |= {} if "clip_grad_norm" in plan else {"clip_grad_norm": _clips(old)}
    words = {name: text for name, text in with_job({**texts, "config": path}).items() if name not in PLAN_FIELDS}
    if old.plan.get("optimizer") == "adamw_master_weights":  # DeepSpeed's; FSDP2's parameters are fp32 themselves
        words.pop("model_dtype", None)
    own = {name: text_of(value) for name, value in plan.items() if name != "stack"}
    return torch_code(FormState({**words, **own, **texts}))


def _clips(old: Configuration) -> bool:
    """Whether gradients are clipped, of ZeRO stage 2, of which a plan does not say it."""
    asked = [old.given[key] for key in old.given if key.rpartition(".")[2] in ("gradient_clipping", "max_grad_norm")]
    return any(asked) if asked else any(one.startswith("max_grad_norm=") for one in old.filled)
