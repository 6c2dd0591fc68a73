"""T5 and BERT as `transformers` has them: from a config, offline; or with pretrained weights, where the hub is reached.

What FSDP has to know of a model is one name, the class of its blocks: each block is a unit. The rest is the root, and
what is shared between blocks must be there. T5's embedding is: it feeds the encoder and the decoder, and its transpose
makes the logits. One parameter, four names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labs.experiments.hugging_face.packages import needs


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        config, model: classes of `transformers`.
        block: the class of the blocks.
        sizes: of the config that is built offline. Without dropout, so that ranks and one process can be compared.
        pretrained: what the hub calls the smallest one.
    """

    config: str
    model: str
    block: str
    sizes: dict[str, Any]
    pretrained: str


VOCAB_SIZE = 384
"""Of `transformers.ByT5Tokenizer`: bytes and special tokens, no vocabulary to download."""

FAMILIES = {
    "t5": Family(
        "T5Config", "T5ForConditionalGeneration", "T5Block",
        {"vocab_size": VOCAB_SIZE, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4,
         "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
        "google-t5/t5-small",
    ),
    "bert": Family(
        "BertConfig", "BertForSequenceClassification", "BertLayer",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "google-bert/bert-base-uncased",
    ),
}  # fmt: skip


def build(family: str, *, seed: int = 0, pretrained: str | None = None, checkpointing: bool = False) -> nn.Module:
    """A whole model with its weights, on the CPU, in training mode.

    Args:
        family: ``t5`` or ``bert``.
        seed: of the weights that are not pretrained.
        pretrained: a name on the hub or a folder; None builds from the config of `FAMILIES`.
        checkpointing: keep each block's input only and compute the block again in backward, as transformers does it.

    Raises:
        ImportError: transformers is not installed. ValueError: no such family.
        ConnectionError: the weights are not on this machine, and the hub cannot be reached.
    """
    kind = _family(family)
    transformers = needs("transformers")
    torch.manual_seed(seed)
    if pretrained is None:
        model = getattr(transformers, kind.model)(getattr(transformers, kind.config)(**kind.sizes))
    else:
        model = _load(getattr(transformers, kind.model), pretrained, dtype=torch.float32)
    return _training(model, checkpointing)


def empty(family: str, *, pretrained: str | None = None, checkpointing: bool = False) -> nn.Module:
    """The same model on the meta device: shapes, ties, no memory. Of a pretrained one only the config is read."""
    kind = _family(family)
    transformers = needs("transformers")
    config = getattr(transformers, kind.config)
    config = config(**kind.sizes) if pretrained is None else _load(config, pretrained)
    with torch.device("meta"):
        return _training(getattr(transformers, kind.model)(config), checkpointing)


def tokenizer(family: str, *, pretrained: str | None = None) -> Any:
    """The tokenizer of a pretrained model, or bytes."""
    transformers = needs("transformers")
    _family(family)
    return transformers.ByT5Tokenizer() if pretrained is None else _load(transformers.AutoTokenizer, pretrained)


def blocks(model: nn.Module, family: str) -> dict[str, nn.Module]:
    """The modules that become units, by name, in the order in which they run."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == _family(family).block}


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"model={name}: this lab has {' and '.join(FAMILIES)}")
    return FAMILIES[name]


def _training(model: Any, checkpointing: bool) -> nn.Module:
    if checkpointing:  # transformers 5 has it under a new name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def _load(kind: Any, name: str, **options: Any) -> Any:
    """``kind.from_pretrained``: of this machine, else of the hub."""
    needs("transformers").utils.logging.disable_progress_bar()  # one for each rank
    try:
        return kind.from_pretrained(name, local_files_only=True, **options)
    except OSError as not_here:
        hub = needs("huggingface_hub")
        try:  # asked once and briefly: from_pretrained itself tries for most of a minute
            hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=5)
        except Exception as error:
            raise ConnectionError(
                f"pretrained={name}: its files are not on this machine and {hub.constants.ENDPOINT} cannot be reached "
                f"({type(error).__name__}); leave pretrained out to build from a config, or name a folder"
            ) from not_here
        return kind.from_pretrained(name, **options)
