"""The bytes of parameters, gradients and optimizer states, by the arithmetic of the ZeRO paper."""

from __future__ import annotations


def model_state_bytes(
    params: float,
    shards: int,
    api: str = "fsdp2",
    *,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer states on each rank, by the arithmetic of the ZeRO paper.

    Args:
        params: how many parameters.
        shards: ranks they are shared by.
        api: what is shared: by ``zero1`` the optimizer's states, by ``zero2`` the gradients too, by ``fsdp1`` and
            ``fsdp2`` all; by ``ddp`` nothing.
        param_bytes, grad_bytes, optimizer_bytes: of one parameter. The defaults are the paper's: half precision, and an
            optimizer that keeps an fp32 copy and two fp32 moments. torch's FSDP keeps fp32 parameters, which are that
            copy: 4, 4 and 8, the same sum.

    Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020 (arXiv 1910.02054), section 3.

    Raises:
        ValueError: a number is negative, ``shards`` is below 1, or ``api`` is unknown.

    Example:
        >>> [model_state_bytes(7.5e9, 64, api) / 1e9 for api in ("ddp", "zero1", "zero2", "fsdp2")]
        [120.0, 31.40625, 16.640625, 1.875]
    """
    shared = {"ddp": "", "zero1": "o", "zero2": "og", "fsdp1": "ogp", "fsdp2": "ogp"}
    if api not in shared:
        raise ValueError(f"api is {api!r}; it must be one of {', '.join(shared)}")
    if type(shards) is not int or shards < 1:
        raise ValueError(f"shards is {shards!r}; it must be a whole number >= 1")
    sizes = {"p": param_bytes, "g": grad_bytes, "o": optimizer_bytes}
    for name, value in {"params": params, **sizes}.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}; it must be >= 0")
    return sum(params * n_bytes / (shards if part in shared[api] else 1) for part, n_bytes in sizes.items())
