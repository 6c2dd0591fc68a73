"""A plain torch transformer with the dimensions of a `Model`, as source code: what the torch code trains."""

from __future__ import annotations

import dataclasses

from fsdp_sim.spec import GATED, Model

BLOCK = '''
class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self):
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(D), Norm(D)
        self.qkv = nn.Linear(D, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=BIAS)
        self.proj = nn.Linear(HEADS * HEAD_DIM, D, bias=BIAS)
        self.up = nn.Linear(D, FFN, bias=BIAS)
{gate}        self.down = nn.Linear(FFN, D, bias=BIAS)

    def forward(self, x):
        B, T, _ = x.shape
        heads = self.qkv(self.attn_norm(x)).view(B, T, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
{rotate}        y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}, enable_gqa=KV_HEADS != HEADS)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, HEADS * HEAD_DIM))
        h = self.ffn_norm(x)
        return x + self.down({activation})
'''
ROTATE = '''
def rotate(x):
    """Rotary positions (Su et al. 2021); x of shape (B, heads, T, HEAD_DIM)."""
    half = x.size(-1) // 2
    frequency = 500000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.size(2), device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

'''
GPT = """
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
{positions}        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
{tie}
    def forward(self, tokens):
        x = self.embed(tokens){add}
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
"""
ACTIVATIONS = {
    "gelu": "F.gelu(self.up(h), approximate='tanh')",
    "relu": "F.relu(self.up(h))",
    "swiglu": "F.silu(self.gate(h)) * self.up(h)",
    "geglu": "F.gelu(self.gate(h), approximate='tanh') * self.up(h)",
}
WRITTEN = (  # fields of a model that the class has, or that change no shape; of others it says that it leaves them out
    "name", "n_layer", "d_model", "n_head", "d_ffn", "vocab", "n_kv_head", "head_dim", "ffn_type", "norm", "joined_qkv",
    "positions", "max_seq_len", "tied_embeddings", "causal", "n_encoder_layer", "dtype", "unverified",
)  # fmt: skip


def torch_model(model: Model, seq_len: int) -> str:
    """Source of a class ``GPT`` whose blocks are ``layers``; it has as many parameters as `Model.param_count`.

    An encoder-decoder is stood in for by one stack of its blocks; a comment names what else of the model is left out.
    """
    learned = model.positions == "learned"
    layers = model.n_layer + model.n_encoder_layer
    constants = {
        "LAYERS": layers, "D": model.d_model, "HEADS": model.n_head, "KV_HEADS": model.kv_heads,
        "HEAD_DIM": model.d_head, "FFN": model.d_ffn, "VOCAB": model.vocab, "BIAS": model.bias is True,
    }  # fmt: skip
    lines = [f"{', '.join(constants)} = {', '.join(map(str, constants.values()))}"]
    if model.norm == "layernorm":
        lines.append("Norm = partial(nn.LayerNorm, bias=BIAS)")
    else:
        lines.append("Norm = nn.RMSNorm")
    if model.n_encoder_layer:
        lines.append("# The model is an encoder-decoder; one stack of as many blocks stands in for it.")
    left_out = [
        f"{f.name}={value!r}"
        for f in dataclasses.fields(model)
        if f.name not in WRITTEN
        and (value := getattr(model, f.name)) != f.default
        and (f.name, value) != ("bias", False)
    ]
    if left_out:
        lines.append(f"# A simpler stand-in for {model.name}, without its {', '.join(left_out)}.")
    rope = model.positions == "rope"
    rotate = "        q, k = rotate(q), rotate(k)\n" if rope else ""
    gate = "        self.gate = nn.Linear(D, FFN, bias=BIAS)\n" if model.ffn_type in GATED else ""
    rows = model.max_seq_len or seq_len
    block = BLOCK.format(gate=gate, rotate=rotate, causal=model.causal, activation=ACTIVATIONS[model.ffn_type])
    gpt = GPT.format(
        positions=f"        self.positions = nn.Embedding({rows}, D)\n" if learned else "",
        tie="        self.head.weight = self.embed.weight\n" if model.tied_embeddings else "",
        add=" + self.positions(torch.arange(tokens.size(1), device=tokens.device))" if learned else "",
    )
    return "\n".join(lines) + "\n" + (ROTATE if rope else "") + "\n" + block.lstrip("\n") + "\n\n" + gpt.lstrip("\n")
