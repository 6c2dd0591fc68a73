"""`beside_experts`: what fp8 and LoRA leave as it is in a mixture of experts."""

from __future__ import annotations

from fsdp_sim.spec import Model, Plan, param_shapes

MOST_MEASURED = 8  # experts of a layer, in a loop, of the published runs: Mixtral's


def beside_experts(model: Model, plan: Plan) -> list[str]:
    """That fp8 and adapters are of linear layers, which experts are not where they are one tensor, in sentences.

    torchao's `convert_to_float8_training` swaps `nn.Linear`, and peft's ``all-linear`` targets such; transformers 5 and
    torchtitan hold a layer's experts as one parameter of three dimensions.
    """
    if model.n_expert is None:
        return []
    shapes = param_shapes(model, model.max_seq_len or plan.seq_len)
    routed = sum(r * c for name, r, c in shapes if name.startswith("experts.")) / sum(r * c for _, r, c in shapes)
    are = f"the {model.n_expert} experts of a layer ({routed:.0%} of the parameters)"
    notes = []
    if plan.loops_experts and model.n_expert > MOST_MEASURED:
        notes.append(
            f"Of {model.n_expert} experts of a layer, one after the other, the CPU's time is unverified: each of their "
            f"many small kernels is taken to cost it what a kernel of a dense block was measured to, with all of "
            f"Python and autograd around it; published runs have {MOST_MEASURED} experts."
        )
    if plan.fp8 and not plan.loops_experts:
        notes.append(
            f"Plan.fp8={plan.fp8!r} is of linear layers, as torchao's is; {are} are one tensor, whose grouped matmuls "
            f"stay in {plan.param_dtype or model.dtype}."
        )
    if plan.lora_rank and not plan.loops_experts:
        notes.append(
            f"Plan.lora_rank={plan.lora_rank} is of linear layers, as peft's targets are; {are} are one tensor, which "
            f"has no adapters (peft's target_parameters is not simulated)."
        )
    if plan.lora_rank and plan.loops_experts and plan.lora_targets == "all-linear":
        notes.append(
            f"Plan.lora_targets='all-linear' adapts the linear layers of {are}, one by one, as peft does where they "
            f"are such; not the router, which peft adapts too."
        )
    return notes
