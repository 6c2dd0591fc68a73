"""How a frozen weight is stored in few bits (QLoRA: Dettmers et al. 2023, arXiv 2305.14314)."""

from __future__ import annotations

from typing import NamedTuple


class Quantization(NamedTuple):
    """How a frozen weight is stored.

    Attributes:
        bits: of one number.
        scale_bytes: for each number, of the scales beside it, which are no parameters: every rank holds them whole.
        gives_back: its linear layer puts out the dtype that it was given, whatever it computes in.
    """

    bits: int
    scale_bytes: float
    gives_back: bool = True


# bitsandbytes 0.50 (functional.quantize_4bit): an fp32 maximum for each block of 64; double quantisation keeps it in a
# byte, with an fp32 maximum for each block of 256 of those. GPTQ as it is usually written: groups of 128, of which each
# has an fp16 scale and a 4-bit zero (Frantar et al. 2022, arXiv 2210.17323, which leaves the size of groups open).
QUANTIZATIONS = {
    "nf4": Quantization(4, 4 / 64),
    "fp4": Quantization(4, 4 / 64),
    "nf4_double_quant": Quantization(4, 1 / 64 + 4 / (64 * 256)),
    "fp4_double_quant": Quantization(4, 1 / 64 + 4 / (64 * 256)),
    "gptq": Quantization(4, 2.5 / 128, gives_back=False),
}
