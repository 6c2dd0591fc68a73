"""The inputs of a simulation: frozen, validated descriptions of the model, the cluster and the plan."""

from fsdp_sim.spec.blocks import (
    GATED,
    Block,
    Shape,
    block_shapes,
    blocks,
    has_bias,
    joined_qkv,
    param_shapes,
    root_shapes,
)
from fsdp_sim.spec.catalogue import toml_or_json
from fsdp_sim.spec.cluster import Cluster, GroupSpan
from fsdp_sim.spec.dtypes import DTYPE_BYTES, TORCH_DTYPES
from fsdp_sim.spec.elsewhere import API_OF_ZERO, number_meant
from fsdp_sim.spec.fields import Allowed, field, number, one_of, spec, text, whole
from fsdp_sim.spec.gpus import Gpu, gpu, gpu_names
from fsdp_sim.spec.hugging_face import UnknownModelError, may_change_shapes
from fsdp_sim.spec.links import Link, link, link_names
from fsdp_sim.spec.model import Model
from fsdp_sim.spec.operators import OPERATORS, aten_names
from fsdp_sim.spec.optimizers import OPTIMIZER_STATES, OPTIMIZERS, Optimizer
from fsdp_sim.spec.plan import (
    ONLY_WITH_ACCUMULATION,
    SETTINGS_OF,
    TORCH_VERSIONS,
    Plan,
    shards_of,
    takes,
)
from fsdp_sim.spec.quantization import QUANTIZATIONS, Quantization
from fsdp_sim.spec.stacks import stack_names, stack_remark
from fsdp_sim.spec.texts import plan_fields, text_of, value_of
from fsdp_sim.spec.torchtitan import FLOAT8, gpus_of_job, job_of_text, model_of_flavor, plan_of_job, torchtitan_keys

__all__ = [
    "API_OF_ZERO",
    "DTYPE_BYTES",
    "FLOAT8",
    "GATED",
    "ONLY_WITH_ACCUMULATION",
    "OPERATORS",
    "OPTIMIZERS",
    "OPTIMIZER_STATES",
    "QUANTIZATIONS",
    "SETTINGS_OF",
    "TORCH_DTYPES",
    "TORCH_VERSIONS",
    "Allowed",
    "Block",
    "Cluster",
    "Gpu",
    "GroupSpan",
    "Link",
    "Model",
    "Optimizer",
    "Plan",
    "Quantization",
    "Shape",
    "UnknownModelError",
    "aten_names",
    "block_shapes",
    "blocks",
    "field",
    "gpu",
    "gpu_names",
    "gpus_of_job",
    "has_bias",
    "job_of_text",
    "joined_qkv",
    "link",
    "link_names",
    "may_change_shapes",
    "model_of_flavor",
    "number",
    "number_meant",
    "one_of",
    "param_shapes",
    "plan_fields",
    "plan_of_job",
    "root_shapes",
    "shards_of",
    "spec",
    "stack_names",
    "stack_remark",
    "takes",
    "text",
    "text_of",
    "toml_or_json",
    "torchtitan_keys",
    "value_of",
    "whole",
]
