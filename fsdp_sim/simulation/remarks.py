"""`remarks`: what a reader should know of a request beside its numbers, in sentences."""

from __future__ import annotations

import math

from fsdp_sim.cost import Workload
from fsdp_sim.simulation.experts import beside_experts
from fsdp_sim.spec import Cluster, Model, Plan, stack_remark

NEVER = {  # what comes of a step that does something in no micro-batch
    "requires_gradient_sync": (
        "no micro-batch reduces its gradients, so that the optimizer steps without those of the other ranks (fsdp2's "
        "finds none at all)"
    ),
    "requires_all_reduce": "replicas never meet, so that each steps with its own gradients and they drift apart",
    "reshard_after_backward": (
        "the parameters stay whole behind the optimizer's back, so that the next step computes with the old ones"
    ),
    "is_last_backward": "the optimizer does not wait for the last reductions, so that it may step with half of them",
}


def remarks(model: Model | None, workload: Workload, cluster: Cluster, plan: Plan) -> list[str]:
    """What is unverified of it, what it leaves out, and what it would train wrongly.

    Args:
        model: as it was asked for; None where a module was traced.
    """
    said = [stack_remark(plan.stack)] if stack_remark(plan.stack) else []
    said += _of_the_host(cluster, plan) + _of_one_link(cluster, plan) + _of_dtypes(workload, cluster, plan)
    said += [
        f"Plan.{name}=False: {what}. Its time and memory are simulated, but it does not train what a step should; give "
        f"'last' or True."
        for name, what in NEVER.items()
        if getattr(plan, name) is False
    ]
    each = plan.grad_accum > 1 and plan.requires_gradient_sync is True
    if each and plan.api == "fsdp1" and plan.cpu_offload:
        said.append(
            "FSDP1 that offloads to the CPU adds no gradients up outside of no_sync(): each micro-batch replaces those "
            "of the one before, as FullyShardedDataParallel's docs say, and so it is simulated. fsdp2 adds them up, "
            "which takes longer; with requires_gradient_sync='last' both do."
        )
    if each and plan.stack.startswith("hf-trainer") and plan.api in ("fsdp2", "fsdp1"):
        said.append(
            "transformers' Trainer reduces gradients with the last micro-batch alone and keeps whole ones until then, "
            "unless sync_each_batch is set or DeepSpeed trains; here each micro-batch reduces its own. "
            "requires_gradient_sync='last' is as the Trainer does."
        )
    if model is not None:
        said += _of_positions(model, plan) + beside_experts(model, plan)
    if plan.compile and not workload.written_for:
        said.append(
            "Plan.compile=True changes no byte here: a traced model is taken to keep what its operators keep without a "
            "compiler, which keeps less."
        )
    return said


def _of_the_host(cluster: Cluster, plan: Plan) -> list[str]:
    if not plan.cpu_offload or cluster.kind != "gpu":
        return []
    share = f"{cluster.host_mem_bytes_per_s / 1e9:.0f} GB/s"
    return [
        f"Of the CPUs this is unverified: that their memory moves at most {share} for each GPU of a node "
        f"(host_memory_gb_per_s is the node's) and the optimizer gets 40% of that. It takes all cores, shared out "
        f"among the ranks by OMP_NUM_THREADS; torchrun's default is one thread a rank."
    ]


def _of_one_link(cluster: Cluster, plan: Plan) -> list[str]:
    """Where GPUs have no link but that to their CPU, collectives and copies are in each other's way."""
    inside, local = cluster.intra_link, min(cluster.gpus, cluster.node_size)
    pcie = inside.family == "pcie" or (inside.reach is not None and local > inside.reach)
    if cluster.kind != "gpu" or local == 1 or not pcie or not (plan.cpu_offload or plan.activation_offload):
        return []
    return [
        "Copies to the CPU's memory and collectives inside a node take the same PCIe here. They are simulated as if "
        "each had it alone, so that where both run at once the step takes longer than this."
    ]


def _of_dtypes(workload: Workload, cluster: Cluster, plan: Plan) -> list[str]:
    said = []
    if plan.param_dtype is None and plan.reduce_dtype in ("bf16", "fp16") and workload.dtype == "fp32":
        said.append(
            f"Compute and gathers are in fp32, the dtype of the parameters: reduce_dtype={plan.reduce_dtype!r} "
            f"changes the reduction of gradients alone, as torch's MixedPrecisionPolicy does; "
            f"param_dtype={plan.reduce_dtype!r} computes in it."
        )
    gpu = cluster.gpu
    if workload.dtype == "fp32" and cluster.kind == "gpu" and not gpu.supports_bf16 and "fp16" in gpu.dtypes:
        times = gpu.peak_flops("fp16") / gpu.peak_flops("fp32")
        said.append(
            f"{gpu.name} has no bf16, and gathers and compute are in fp32; its peak in fp16 is {times:.3g} times as "
            f"high (param_dtype='fp16', beside a gradient scaler, which is not simulated)."
        )
    return said


def _of_positions(model: Model, plan: Plan) -> list[str]:
    if model.positions != "rope" or plan.seq_len <= (model.max_seq_len or math.inf):
        return []
    return [
        f"Plan.seq_len is {plan.seq_len}, and {model.name} is for sequences of at most {model.max_seq_len} "
        f"(Model.max_seq_len; max_position_embeddings of a config.json): time and memory are those of the longer ones, "
        f"but it has not learned such positions; scale them (rope_scaling), or make seq_len at most "
        f"{model.max_seq_len}."
    ]
