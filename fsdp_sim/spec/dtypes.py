"""The dtypes that gathers, compute and reductions may be cast to, and which field somebody means who gives another."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fsdp_sim.spec.fields import one_of

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 1}
DTYPES = ("fp32", "bf16", "fp16")  # what gathers, compute and reductions may be cast to
TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp64": "torch.float64"}
TORCH_DTYPES |= {"fp8": "torch.float8_e4m3fn"}
OF_ANOTHER_FIELD = {  # what a dtype looks like, and what says it
    r".*(fp8|float8|e4m3|e5m2)": (
        "matmuls in fp8 are Plan.fp8 (such as 'tensorwise'), beside bf16; fp8_all_gather makes their gathers fp8 too"
    ),
    r".*(nf4|int4|uint4|fp4|4[-_ ]?bit)": (
        "frozen weights of four bits are Plan.base_quantization (such as 'nf4'), beside lora_rank"
    ),
    r".*int8|.*8[-_ ]?bit": "no weights of 8 bits are simulated; states of 8 bits are Plan.optimizer='adamw_8bit'",
    r"(torch\.)?(fp64|float64|double)": "nothing is trained in 64 bits here; the most is fp32",
    r"tf32|tensorfloat": "fp32 matmuls in TF32 are Plan.float32_matmul_precision='high', beside fp32",
}


def _instead(value: Any) -> str:
    text = str(value).lower()
    for ours, torch in TORCH_DTYPES.items():
        if text == torch and ours in DTYPES:
            return f"did you mean {ours!r}?"
    return next((what for form, what in OF_ANOTHER_FIELD.items() if re.match(form, text[:100])), "")


DTYPE, DTYPE_OR_NONE = (replace(one_of(*values, *DTYPES), instead=_instead) for values in ((), (None,)))
