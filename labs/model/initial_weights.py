"""Where training starts: the numbers of each parameter belong to (seed, its name, its shape), and to nothing else.

So a model built whole and a model filled parameter by parameter, in any order, on any rank, start alike, and no rank
needs the whole model to have its shards right.

The rule is GPT-2's (Radford et al. 2019, section 2.3; nanoGPT's ``GPT.__init__``): N(0, 0.02), biases 0, norms 1; what
writes into the residual stream is scaled by 1/sqrt(2 n_layer). The stream sums 2 n_layer such terms; scaled so, its
variance does not grow with depth. The Llama shape starts by the same rule.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

STD = 0.02
_RANDOM = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)


class without_random_start(TorchFunctionMode):  # noqa: N801 (a context manager, named as torch names its own)
    """Inside, the modules that torch makes draw no numbers; `initial_parameters_` then draws them once.

    `torch.nn.utils.skip_init` does this for one module, by way of the meta device, which fake tensors do not bear.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # nn.Linear and nn.Embedding do not use what these return.
        return None if func in _RANDOM else func(*args, **(kwargs or {}))


@torch.no_grad()
def initial_parameter_(name: str, whole: torch.Tensor, n_layer: int, seed: int) -> None:
    """Fill the whole parameter called ``name`` in place. A tensor on the meta device has nothing to fill.

    The numbers come from a `torch.Generator` of their own on the tensor's device: torch's global ones stay as they
    are. CPUs and GPUs draw different numbers from one seed, and so may GPUs of two kinds.

    Raises:
        TypeError: the tensor is not fp32, in which the numbers are drawn.
    """
    if whole.dtype != torch.float32:
        raise TypeError(f"{name} is {whole.dtype}: parameters are kept in torch.float32; compute in less by autocast")
    if whole.is_meta:
        return
    if name.endswith(".bias"):
        whole.zero_()
    elif "norm." in name:
        whole.fill_(1)
    else:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(whole.device).manual_seed(int.from_bytes(digest[:8], "big"))
        writes_to_stream = name.endswith(".proj.weight")
        whole.normal_(std=STD / math.sqrt(2 * n_layer) if writes_to_stream else STD, generator=generator)


def initial_parameters_(model: nn.Module, n_layer: int, seed: int | None = None) -> None:
    """Fill all parameters of a model that is not sharded; a tied one once, under its first name.

    Args:
        seed: by default `torch.initial_seed`, the number last given to `torch.manual_seed`.
    """
    seed = torch.initial_seed() if seed is None else seed
    for name, parameter in model.named_parameters():
        initial_parameter_(name, parameter, n_layer, seed)
