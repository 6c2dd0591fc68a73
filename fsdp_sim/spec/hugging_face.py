"""`model_of`: a model from the ``config.json`` of a Hugging Face model. What each type means is in a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_sim.spec.blocks import GATED, RELATIVE_ROWS
from fsdp_sim.spec.catalogue import tables, toml_or_json
from fsdp_sim.spec.model import Model
from fsdp_sim.spec.several_models import of_several_models
from fsdp_sim.spec.torchtitan import is_torchtitan, model_of_flavor
from fsdp_sim.timeline import read_text
from fsdp_sim.words import in_brief, nearest, some_of

TABLE = "hugging_face.toml"
SPELLINGS = {  # of one key, in the classes' configurations
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("d_kv",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim", "d_ff"),
    "max_position_embeddings": ("n_positions",),
    "hidden_act": ("hidden_activation", "activation_function", "activation", "feed_forward_proj"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "n_shared_experts": ("num_shared_experts",),
    "qkv_bias": ("use_qkv_bias",),
    "use_bias": ("enable_bias",),
    "use_qk_norm": ("qk_layernorm",),
    "num_experts_per_tok": ("experts_per_token",),
    "sliding_window": ("sliding_window_size",),
}
FIELDS = {  # of the model, where a key says it as it is
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_dim",
    "intermediate_size": "d_ffn",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied_embeddings",
    "type_vocab_size": "token_types",
    "num_experts": "n_expert",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "d_expert",
    "n_shared_experts": "n_shared_expert",
    "shared_expert_intermediate_size": "d_shared_expert",
    "first_k_dense_replace": "first_dense",
    "decoder_sparse_step": "moe_every",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_rope_head_dim": "rope_head_dim",
    "v_head_dim": "v_head_dim",
    "patch_size": "patch_size",
    "image_size": "image_size",
    "num_channels": "channels",
}
NO_EXPERTS = {
    "n_expert": None, "experts_per_token": None, "d_expert": None, "d_shared_expert": None, "n_shared_expert": 0,
    "shared_expert_gate": False, "first_dense": 0, "moe_every": 1,
}  # fmt: skip
OF_LATENTS = ("q_lora_rank", "rope_head_dim", "v_head_dim")
ACTIVATIONS = {  # and what they are to a feed-forward with a gate
    "silu": (None, "swiglu"), "swish": (None, "swiglu"), "relu": ("relu", None), "gated-gelu": (None, "geglu"),
    "gated-silu": (None, "swiglu"), "gelu": ("gelu", "geglu"), "gelu_new": ("gelu", "geglu"),
    "gelu_fast": ("gelu", "geglu"), "gelu_pytorch_tanh": ("gelu", "geglu"),
}  # fmt: skip
ONLY = {  # values with which a key changes nothing; with others the model is one that is not known here
    "moe_layer_freq": (1, None),
    "mlp_type": ("default", None),
    "norm_type": ("layer_norm", "rms_norm", None),
    "position_embedding_type": ("absolute", None),
    "relative_attention_num_buckets": (RELATIVE_ROWS,),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (False, None),
    "n_ctx": None,  # None: whatever the value
    "hybrid_layer_pattern": (None,),
    "clip_qkv": None,
    "attn_logit_softcapping": None,  # inside of the attention kernel
    "max_window_layers": None,
    "num_mtp_layers": None,  # transformers builds no layers that predict further tokens
    "num_nextn_predict_layers": None,
    "original_max_position_embeddings": None,
    "ep_size": None,
    "num_labels": None,
}
READ = {
    *FIELDS, "hidden_act", "attention_bias", "mlp_bias", "qkv_bias", "use_bias", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "sliding_window_pattern", "_sliding_window_pattern", "mlp_only_layers",
    "final_logit_softcapping", "max_position_embeddings", "qk_nope_head_dim", "qk_head_dim", "num_decoder_layers",
    "mlp_layer_types", "word_embed_proj_dim", "id2label", "moe_layers", "no_rope_layers", "attention_types",
}  # fmt: skip
SHAPES = re.compile(  # words of keys that would change shapes or work
    r"size|dim\b|_dim|layer|^n_|num_|head|rank|expert|window|bias|norm|tie_|mlp|ffn|intermediate|vocab|patch|image|vision"
    r"|audio|quanti|lora|moe|conv|ssm|mamba|position|alibi|parallel|projector|text_config|adapter|compress|index"
)
HARMLESS = re.compile(  # of these, what changes none
    r"(token_id|token_ids|token_index)$|_eps(ilon)?$|dropout|drop$|pdrop$|initializer|aux_loss|^output_|^norm_topk_prob$"
    r"|^n_group$|^topk_|^num_labels$|label|layerdrop|classifier|^rope_|rotary|no_rope|init_|_scale$|scaling|_multiplier$"
    r"|chunk_size_feed_forward|num_beams|^num_return|problem_type|pretraining_tp|residual|in_fp32$|attention_scalar"
    r"|max_distance|pooler|^summary_|encoder_stride|_names?$|^_attn|^attn_implementation"
)
LISTS = ("layer_types", "mlp_layer_types", "mlp_only_layers", "moe_layers", "no_rope_layers", "attention_types")
NEEDED = (  # of what is a number, what cannot be null
    "hidden_size", "num_hidden_layers", "num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim",
    "max_window_layers",
)  # fmt: skip
HEADS = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|Reward\w*)$|Reward\w*$|(?<!LMHead)Model$")
TRAINED = ("fp8", "mxfp4", "fbgemm_fp8", "compressed-tensors")  # how weights are stored, from which training starts


def may_change_shapes(key: str, value: Any) -> bool:
    """Whether a key that nobody knows sounds as if it changed what a model computes, at this value."""
    if key in ONLY:
        return (allowed := ONLY[key]) is not None and value not in allowed
    if key == "quantization_config" and isinstance(value, Mapping):
        return value.get("quant_method") not in (None, *TRAINED)
    return bool(value and SHAPES.search(key)) and not HARMLESS.search(key)


class UnknownModelError(ValueError):
    """A ``config.json`` of which the tables here do not know enough; transformers may."""


def model_of(source: str | Path | Mapping[str, Any]) -> Model:
    """Read a ``config.json``, a folder that holds one, or what is in one; or torchtitan's TOML.

    Parameters are taken to be trained in fp32, whatever the dtype of the published weights.

    Raises:
        ValueError: the type is not known, or a key that changes the shape is not understood; names the key, its value
            and the remedy.
        OSError: there is no such file.
    """
    if isinstance(source, Mapping):
        return _Reader(source, "the config").model()
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        config = toml_or_json(read_text(path), kind)
    except ValueError as error:
        raise ValueError(f"{path} is not {kind}: {error}") from None
    if is_torchtitan(config):
        return model_of_flavor(config, str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {in_brief(config, 40)}; a config.json is an object with a model_type")
    return _Reader(config, str(path)).model()


def _scaled(config: Mapping[str, Any]) -> bool:
    """Whether rotary positions are scaled, for longer sequences than in training; types of layers may differ."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    each = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    return any(one.get("rope_type", one.get("type", "default")) not in ("default", "mrope") for one in each)


class _Reader:
    """One configuration, with the keys that have been looked at."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where, self.given = where, config
        kind = given if isinstance(given := config.get("model_type"), str) else ""
        known = tables(TABLE)
        if kind not in known and isinstance(classes := config.get("architectures"), list):  # such as kimi_k2's
            kind = next((name for name, of in known.items() if classes == [of["class"]]), kind)
        if kind not in known:
            if remedy := of_several_models(config, known):
                raise self._wrong("model_type", remedy, ValueError)
            near = nearest(kind, known, most=3)
            begins = "the nearest known are" if len(near) > 1 else "the nearest known is" if near else "known are"
            where = "" if near else f" (the tables of fsdp_sim/spec/{TABLE})"
            raise self._wrong(
                "model_type",
                f"{begins} {some_of(near or known)}{where}; others fsdp-sim simulate alone can read, with torch and "
                f"transformers (in Python fsdp_sim.measure.model_from_config), or give the dimensions (Model)",
            )
        self.of = known[kind]
        named = next(iter(config.get("architectures") or ()), "")
        if isinstance(named, str) and named != self.of["class"] and HEADS.search(named):
            raise self._wrong(
                "architectures",
                f"known is {self.of['class']}, which has another head: name it if that is what you train; "
                f"else trace the module with model_from_module",
            )
        own = self.of.get("spellings", {})
        self.canonical = {other: key for key, others in SPELLINGS.items() for other in others} | own
        self.values = self._named(self.of["config"]) | self._named(config)
        self.rules = [(key, value, fields) for key, value, fields in self.of.get("when", [])]

    def _named(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """By the names that the reader knows; where there are two spellings, the class reads its own."""
        ordered = sorted(config.items(), key=lambda item: item[0] in self.of["config"])
        unread = self.of.get("unread", ())
        named = {self.canonical.get(key, key): value for key, value in ordered if key not in unread}
        pattern = named.get("sliding_window_pattern")
        if isinstance(pattern, str) and re.fullmatch("L*G", pattern):  # of EXAONE: local and global layers
            named["sliding_window_pattern"] = len(pattern)
        return named

    def _wrong(self, key: str, remedy: str, of: type[ValueError] = UnknownModelError) -> ValueError:
        spelled = next((k for k in self.given if getattr(self, "canonical", {}).get(k, k) == key), key)
        return of(f"{self.where}: {spelled} is {in_brief(self.given.get(spelled))}; {remedy}")

    def _refuse_wrong_kinds(self) -> None:
        usual = self._named(self.of["config"])
        for key, value in self._named(self.given).items():
            if value is None and key not in NEEDED:
                continue
            if key in LISTS:
                fits, kind = isinstance(value, list) and all(isinstance(one, str | int) for one in value), "a list"
            elif key == "quantization_config":
                fits, kind = isinstance(value, Mapping), "a table"
            elif isinstance(usual.get(key), str):
                fits, kind = isinstance(value, str), "a text"
            elif type(usual.get(key)) is int:
                fits, kind = type(value) is int, "a whole number"
            else:
                continue
            if not fits:
                raise self._wrong(key, f"it must be {kind}", ValueError)

    def model(self) -> Model:
        self._refuse_wrong_kinds()
        self._refuse_what_is_not_understood()
        get = self.values.get
        fields: dict[str, Any] = {field: get(key) for key, field in FIELDS.items() if get(key) is not None}
        bias, by_value = self._bias(), self._by_value()
        if bias.get("bias") and by_value.get("bias"):
            raise self._wrong("mlp_bias", "beside a bias in attention; trace the module instead")
        fields = {"name": self._name()} | fields | self.of["model"] | bias | by_value
        fields |= self._window(fields["n_layer"]) | self._experts(fields)
        fields["ffn_type"] = self._activation(fields.get("ffn_type", "gelu"))
        fields.setdefault("d_ffn", 4 * fields["d_model"])
        if get("kv_lora_rank"):
            fields |= {"head_dim": self.values["qk_nope_head_dim"] + fields["rope_head_dim"], "n_kv_head": None}
        else:
            fields = {name: value for name, value in fields.items() if name not in OF_LATENTS}
        if get("final_logit_softcapping"):
            fields["logit_softcap"] = True
        if "patch_size" in fields:
            labels = get("num_labels") or len(get("id2label") or ()) or 2  # transformers' own default
            fields |= {"vocab": labels}
        elif fields.get("positions", "learned") == "learned":
            if get("max_position_embeddings") is None:
                raise self._wrong("max_position_embeddings", "it must be a whole number")
            fields["max_seq_len"] = get("max_position_embeddings") + self.of.get("more_positions", 0)
        elif fields["positions"] == "rope" and not _scaled(self.given):
            fields["max_seq_len"] = self._named(self.given).get("max_position_embeddings")
        if self.of.get("encoder"):
            decoder = get("num_decoder_layers") or fields["n_layer"]
            fields |= {"n_encoder_layer": fields["n_layer"], "n_layer": decoder}
        if get("word_embed_proj_dim") not in (None, fields["d_model"]):
            raise self._wrong("word_embed_proj_dim", f"only hidden_size ({fields['d_model']}) is known")
        try:
            return Model(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.where}: {error}") from None

    def _name(self) -> str:
        path = self.given.get("_name_or_path")
        named = Path(path).name if isinstance(path, str) else ""
        return named or str(self.given["model_type"])

    def _refuse_what_is_not_understood(self) -> None:
        ruled = {key for key, _, _ in self.rules}
        for key, value in self._named(self.given).items():
            if key in ruled or key in READ or key in ("model_type", *self.of["config"]):
                continue
            if key in ONLY:
                allowed = ONLY[key]
                if allowed is not None and value not in allowed:
                    raise self._wrong(key, f"known is {allowed[0]!r}; trace the module with model_from_module")
            elif key == "quantization_config":
                if (value or {}).get("quant_method") not in (None, *TRAINED):
                    raise self._wrong(
                        key, "say in the plan how the base is quantised (Plan.base_quantization), and take the key out",
                        ValueError,
                    )  # fmt: skip
            elif may_change_shapes(key, value):
                raise self._wrong(
                    key,
                    f"it is not known what this changes in a {self.given['model_type']}. If nothing, take it out of "
                    f"the file; else trace the module with model_from_module",
                    ValueError,
                )
        for key in set(ONLY) & set(self.of["config"]) & set(self.given) - ruled:
            allowed = ONLY[key]
            if allowed is not None and self.values[key] not in allowed:
                raise self._wrong(key, f"known is {allowed[0]!r}; trace the module with model_from_module")

    def _by_value(self) -> dict[str, Any]:
        """What the rules of the type say of keys' values; a value without a rule is refused."""
        found: dict[str, Any] = {}
        for key in dict.fromkeys(key for key, _, _ in self.rules):
            value = self.values.get(key)
            options = [(v, fields) for k, v, fields in self.rules if k == key]
            if value is None:
                continue
            match = [fields for v, fields in options if v == value]
            if not match:
                known = " and ".join(repr(v) for v, _ in options)
                raise self._wrong(
                    key, f"known {'is' if len(options) == 1 else 'are'} {known}; trace the module instead"
                )
            found |= {name: self.values.get(of) if of in self.values else of for name, of in match[0].items()}
        return found

    def _bias(self) -> dict[str, Any]:
        """Which linear layers have biases, where keys say it that mean the same in all classes."""
        ruled = {key for key, _, _ in self.rules}
        keys = [key for key in ("attention_bias", "mlp_bias", "qkv_bias", "use_bias") if key not in ruled]
        if not any(key in self.values for key in keys):
            return {}
        on = {key for key in keys if self.values.get(key)}
        if "mlp_bias" in on and self.values.get("num_experts"):
            raise self._wrong("mlp_bias", "which experts do not have; trace the module instead")
        known: dict[frozenset[str], bool | str] = {
            frozenset(): False, frozenset({"attention_bias"}): "attention", frozenset({"mlp_bias"}): "ffn",
            frozenset({"qkv_bias"}): "qkv", frozenset({"use_bias"}): True,
            frozenset({"attention_bias", "mlp_bias"}): True,
        }  # fmt: skip
        if frozenset(on) not in known:
            raise self._wrong(sorted(on)[0], f"with {' and '.join(sorted(on))} together; trace the module instead")
        return {"bias": known[frozenset(on)]}

    def _activation(self, ours: str) -> str:
        name = self.values.get("hidden_act", "silu" if ours in GATED else "gelu")
        plain, gated = ACTIVATIONS.get(name, (None, None))
        found = gated if ours in GATED or (plain is None and self.of.get("encoder")) else plain
        if found is None:
            raise self._wrong("hidden_act", f"known are {', '.join(ACTIVATIONS)}; trace the module instead")
        return found

    def _window(self, n_layer: int) -> dict[str, Any]:
        """Which layers see a window alone: ``layer_types`` says it, or the class's own rule."""
        get = self.values.get
        window = get("sliding_window") if get("use_sliding_window", True) else None
        kinds = get("layer_types")
        sees_all = [i for i, kind in enumerate(kinds or ()) if kind == "full_attention"]
        if not window or (kinds and len(sees_all) == len(kinds)):
            return {"chunked_window": False} if self.of["model"].get("chunked_window") else {}
        if kinds:
            if other := next(
                (k for k in kinds if k not in ("full_attention", "sliding_attention", "chunked_attention")), 0
            ):
                raise self._wrong(
                    "layer_types", f"{other!r} is no attention that is known here; trace the module instead"
                )
            every = sees_all[0] + 1 if sees_all else None
            if every and sees_all != list(range(every - 1, len(kinds), every)):
                raise self._wrong(
                    "layer_types", "known is every k-th layer with full_attention; trace the module instead"
                )
        elif "max_window_layers" in self.values:  # of Qwen: the first layers see everything, the others a window
            first = min(self.values["max_window_layers"], n_layer)
            if first == n_layer:
                return {}
            if first:
                raise self._wrong("max_window_layers", f"known are 0 and num_hidden_layers ({n_layer})")
            every = None
        else:
            every = get("sliding_window_pattern") or get("_sliding_window_pattern") or self.of.get("full_every")
        return {"window": window, "full_attention_every": every}

    def _experts(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing of experts where there are none; the first layers without any."""
        if not self.values.get("num_experts"):
            return NO_EXPERTS
        found: dict[str, Any] = {}
        kinds = self.values.get("mlp_layer_types") or ()
        key = "mlp_layer_types" if kinds else "mlp_only_layers"
        dense = [i for i, kind in enumerate(kinds) if kind == "dense"] or list(self.values.get("mlp_only_layers") or ())
        if set(kinds) - {"dense", "sparse"}:
            raise self._wrong(key, "known are dense and sparse; trace the module instead")
        if dense and (dense != list(range(len(dense))) or fields.get("moe_every", 1) != 1):
            raise self._wrong(key, "known are the first layers; trace the module instead")
        if dense or kinds:
            found["first_dense"] = len(dense)
        layers, every = self.values.get("moe_layers"), fields.get("moe_every", 1)
        if layers is not None and list(layers) != list(range(every - 1, fields["n_layer"], every)):
            raise self._wrong("moe_layers", "known is every k-th layer (interleave_moe_layer_step); trace the module")
        if self.values.get("num_experts_per_tok") is None:
            raise self._wrong("num_experts_per_tok", "say how many experts compute a token")
        return found
