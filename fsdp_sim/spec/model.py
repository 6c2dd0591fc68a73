"""`Model`: the dimensions of a transformer, by hand or from the catalogue, and the shapes of its parameters."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files

from fsdp_sim.spec.fields import field, one_of, spec, text, whole
from fsdp_sim.words import nearest

Shape = tuple[str, int, int]  # name, rows (dimension 0), columns (1 for a vector)
_BOOL = one_of(True, False)


@spec
class Model:
    """A transformer's dimensions. For anything else trace a module: `fsdp_sim.measure.model_from_module`.

    Attributes:
        name: for headings.
        n_layer, d_model, n_head, d_ffn, vocab: as everywhere.
        n_kv_head: key and value heads (grouped-query attention); None is ``n_head``.
        head_dim: None is ``d_model / n_head``.
        ffn_type: ``gelu`` (two matrices) or ``swiglu`` (three).
        norm: ``layernorm``, ``rmsnorm``, or ``composed_rmsnorm``: written out in several operations, as in torch before
            2.9 and in Hugging Face's Llama.
        bias: linear layers and norms have biases.
        positions: ``learned`` (a table of ``max_seq_len`` rows), ``rope`` or ``none`` (also for alibi).
        max_seq_len: rows of the table of learned positions; None is the plan's ``seq_len``.
        tied_embeddings: the head uses the embedding's weight.
        causal: attention looks back only, and computes half of the square.
        n_encoder_layer: of an encoder-decoder (T5): layers of the encoder, beside ``n_layer`` of the decoder, which
            also attend to the encoder's output.
        dtype: of the parameters, which the optimizer updates.

    Example:
        >>> Model.preset("gpt2-124m").param_count
        124439808
        >>> Model.preset("lama3-8b")
        Traceback (most recent call last):
        ValueError: no model is called 'lama3-8b'; the nearest names are llama3-8b
    """

    name: str = field(text())
    n_layer: int = field(whole(1))
    d_model: int = field(whole(1))
    n_head: int = field(whole(1))
    d_ffn: int = field(whole(1))
    vocab: int = field(whole(1))
    n_kv_head: int | None = field(one_of(None) | whole(1), default=None)
    head_dim: int | None = field(one_of(None) | whole(1), default=None)
    ffn_type: str = field(one_of("gelu", "swiglu", "relu"), default="gelu")
    norm: str = field(one_of("layernorm", "rmsnorm", "composed_rmsnorm"), default="layernorm")
    bias: bool = field(_BOOL, default=True)
    positions: str = field(one_of("learned", "rope", "none"), default="learned")
    max_seq_len: int | None = field(one_of(None) | whole(1), default=None)
    tied_embeddings: bool = field(_BOOL, default=True)
    causal: bool = field(_BOOL, default=True)
    n_encoder_layer: int = field(whole(0), default=0)
    dtype: str = field(one_of("fp32", "bf16", "fp16"), default="fp32")

    def __post_init__(self) -> None:
        if self.head_dim is None and self.d_model % self.n_head:
            raise ValueError(
                f"Model.n_head is {self.n_head}, which does not divide d_model {self.d_model}; change one, or give "
                f"head_dim"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"Model.n_kv_head is {self.kv_heads}; it must divide n_head, which is {self.n_head}")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def d_head(self) -> int:
        return self.head_dim or self.d_model // self.n_head

    @property
    def param_count(self) -> int:
        """Number of parameters. A tied weight counts once; learned positions without a length count as 0 rows."""
        return sum(rows * columns for _, rows, columns in param_shapes(self, self.max_seq_len or 0))

    @classmethod
    def preset(cls, name: str) -> Model:
        """A published model by its name.

        Raises:
            ValueError: there is none of that name; gives the nearest.
        """
        presets = _presets()
        if name not in presets:
            near = nearest(name.lower(), presets, most=3, cutoff=0.8)
            if near:
                raise ValueError(f"no model is called {name!r}; the nearest names are {', '.join(near)}")
            raise ValueError(
                f"no model is called {name!r}: it is not in the catalogue, so give its dimensions (n_layer, d_model, "
                f"n_head, d_ffn, vocab), or trace it with model_from_module; the catalogue has {', '.join(presets)}"
            )
        return presets[name]

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """The names in the catalogue."""
        return tuple(_presets())


@functools.cache
def _presets() -> dict[str, Model]:
    text = files("fsdp_sim.spec").joinpath("models.toml").read_text()
    families = tomllib.loads(text)
    return {
        name: Model(name=name, **(family.get("all", {}) | dims))
        for family in families.values()
        for name, dims in family.items()
        if name != "all"
    }


# -- its parameters, block by block


def block_shapes(model: Model, *, cross_attention: bool = False) -> list[Shape]:
    """Parameters of one block: norms, attention, (attention to the encoder,) feed-forward."""
    d, ffn, q, kv = model.d_model, model.d_ffn, model.n_head * model.d_head, model.kv_heads * model.d_head

    def linear(name: str, rows: int, columns: int) -> list[Shape]:
        return [(f"{name}.weight", rows, columns)] + ([(f"{name}.bias", rows, 1)] if model.bias else [])

    def attention(name: str) -> list[Shape]:
        if model.bias:  # GPT keeps queries, keys and values in one matrix
            return linear(f"{name}.qkv", q + 2 * kv, d) + linear(f"{name}.proj", d, q)
        queries_keys_values = linear(f"{name}.wq", q, d) + linear(f"{name}.wk", kv, d) + linear(f"{name}.wv", kv, d)
        return queries_keys_values + linear(f"{name}.wo", d, q)

    shapes = norm_shapes(model, "attn_norm") + attention("attn")
    if cross_attention:
        shapes += norm_shapes(model, "cross_norm") + attention("cross")
    shapes += norm_shapes(model, "ffn_norm") + linear("ffn.up", ffn, d)
    if model.ffn_type == "swiglu":
        shapes += linear("ffn.gate", ffn, d)
    return shapes + linear("ffn.down", d, ffn)


def norm_shapes(model: Model, name: str) -> list[Shape]:
    """A norm has a weight, and a bias if the model has biases and the norm centres."""
    bias = [(f"{name}.bias", model.d_model, 1)] if model.bias and model.norm == "layernorm" else []
    return [(f"{name}.weight", model.d_model, 1), *bias]


def root_shapes(model: Model, seq_len: int) -> list[Shape]:
    """What is in no block: embeddings, the last norm, the head unless it is tied."""
    shapes = [("embed.weight", model.vocab, model.d_model)]
    if model.positions == "learned":
        shapes += [("embed.positions", model.max_seq_len or seq_len, model.d_model)]
    shapes += norm_shapes(model, "head.norm")
    return shapes if model.tied_embeddings else [*shapes, ("head.weight", model.vocab, model.d_model)]


def param_shapes(model: Model, seq_len: int) -> list[Shape]:
    """Every parameter of the model; a tied weight once."""
    encoder = [s for _ in range(model.n_encoder_layer) for s in block_shapes(model)]
    decoder = block_shapes(model, cross_attention=model.n_encoder_layer > 0)
    return root_shapes(model, seq_len) + encoder + decoder * model.n_layer
