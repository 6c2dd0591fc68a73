"""What to do with a ``config.json`` that holds those of several models, such as one for text and one for images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

NO_MODEL = (
    "quantization_config",
    "generation_config",
    "attn_config",
    "ffn_config",
    "init_config",
)  # though they end so
OF_ONE = ("hidden_size", "num_hidden_layers")  # beside these, the language model is the configuration itself


def of_several_models(config: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> str:
    """The remedy for a configuration whose type is not known; empty if it does not hold those of several models.

    Args:
        known: by type, what `hugging_face.toml` says of it.

    Example:
        >>> config = {"model_type": "idefics3", "text_config": {"model_type": "llama"}}
        >>> of_several_models(config, {"llama": {"config": {}}}).partition(":")[0]
        'it holds several models, of which text_config (llama) is known'
    """
    held = dict(_held(config))
    flat = f"{config.get('model_type')}_text"
    if held and flat in known and "text_config" not in held:
        return (
            f"it holds several models, whose language model, {flat}, is known: give it that model_type and take out "
            f"{', '.join(held)} (which leaves out what these say); or trace the module with model_from_module"
        )
    held = {} if any(key in config for key in OF_ONE) else held
    if not held:
        return ""
    names = {key: f"{key} ({kind})" if kind else key for key, kind in held.items()}
    text = next(
        (key for key, kind in held.items() if kind and kind in known and "patch_size" not in known[kind]["config"]), ""
    )
    if not text:
        return (
            f"it holds several models, of which none for text is known: {', '.join(names.values())}; give the "
            f"dimensions of the one that you train (Model), or trace the module with model_from_module"
        )
    tied = config.get("tie_word_embeddings")
    beside = "" if tied is None else f", with the tie_word_embeddings ({tied}) that stands beside it,"
    others = [name for key, name in names.items() if key != text and not text.startswith(f"{key}.")]
    without = f" (that leaves out {', '.join(others)})" if others else ""
    return (
        f"it holds several models, of which {names[text]} is known: save that object{beside} as a file of its own and "
        f"give it{without}; or trace the module with model_from_module"
    )


def _held(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str | None]]:
    """Each model that a configuration holds: its dotted key and its type."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in NO_MODEL and (key.endswith("_config") or "model_type" in value):
            yield f"{where}{key}", value.get("model_type")
            yield from _held(value, f"{where}{key}.")
