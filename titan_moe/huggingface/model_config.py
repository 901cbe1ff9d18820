"""The sizes of a model as config.json has them: compared with [model] on import, written on export.

A weight's shape shows some mistakes; the number of experts per token, the scale of the routing weights, epsilons and
rotary frequencies show in no shape, and a model with a wrong one trains, only from a worse start. So every field that
this trainer knows is compared, and what it does not have (biases, sliding windows, a tied head) is refused.

Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_moe.flavors import Flavor

LATENT_NORM_EPS = 1e-6
"""Of the norms on MLA's latents, in the code that DeepSeek publishes and in transformers, whatever rms_norm_eps is"""

SCORES_PER_GROUP = {"deepseek_v2": 1, "deepseek_v3": 2, "kimi_k2": 2}
"""How many of its best scores a group of experts is judged by"""

TOPK_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy")}
"""How experts are chosen, by model_type: V2 without groups and with. All others: "noaux_tc" """

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
FAMILIES = {
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "deepseek_v2": "deepseek_v3",
    "qwen3_moe": "qwen3",
    "mixtral": "mixtral",
}
"""model_type of config.json: model.name here"""

DENSE_FAMILIES = {"qwen3": "qwen3", "mistral": "mixtral", "llama": "mixtral"}
"""The same for dense models that an MoE can begin from"""

REQUIRED = object()

TYPES = {"model_type": str, "num_nextn_predict_layers": int, "num_mtp_layers": int}
TYPES |= dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), dict)
"""What more is done with than to compare it"""


@dataclass(frozen=True, slots=True)
class Field:
    """One that both have."""

    theirs: str
    ours: str
    value: Any
    """Of ours, as they write it"""

    absent: Any = REQUIRED
    """What a config.json without it means"""

    also: str = ""
    """Another name that they have had for it"""


FIXED: list[tuple[str, Any, str]] = [
    ("hidden_act", "silu", "this trainer's feed-forwards are SwiGLU"),
    ("attention_bias", False, "this trainer's projections have no biases"),
    ("mlp_bias", False, "this trainer's projections have no biases"),
    ("tie_word_embeddings", False, "the head of this trainer's models is a weight of its own, not the embedding"),
    ("moe_layer_freq", 1, "this trainer has experts in every layer behind the dense ones"),
    ("decoder_sparse_step", 1, "this trainer has experts in every layer"),
    ("mlp_only_layers", [], "this trainer has experts in every layer"),
    ("use_sliding_window", False, "this trainer's attention has no window"),
    ("rope_interleave", True, "this trainer's rotary pairs are neighbours"),
]
"""What a model may not have; a config.json that leaves them out means these values"""


def model_type(f: Flavor) -> str:
    if f.attention == "mla":
        return "deepseek_v3" if f.score_func == "sigmoid" else "deepseek_v2"
    return "qwen3_moe" if f.qk_norm else "mixtral"


def fields_of(f: Flavor, kind: str) -> list[Field]:
    """For a config.json whose model_type is `kind`, one of the family."""
    common = [
        Field("vocab_size", "vocab_size", f.vocab_size),
        Field("hidden_size", "dim", f.dim),
        Field("num_hidden_layers", "n_layers", f.n_layers),
        Field("num_attention_heads", "n_heads", f.n_heads),
        Field("rms_norm_eps", "norm_eps", f.norm_eps, 1e-5 if kind == "mixtral" else 1e-6),
    ]
    if kind in DENSE_FAMILIES:
        return [
            *common,
            Field("num_key_value_heads", "num_kv_heads", f.num_kv_heads),
            Field("head_dim", "qk_rope_head_dim", f.qk_rope_head_dim, 128 if kind == "qwen3" else f.dim // f.n_heads),
            Field("intermediate_size", "moe_hidden_dim", f.moe_hidden_dim),
        ]
    common.insert(-1, Field("num_experts_per_tok", "top_k", f.top_k))
    if kind in ("qwen3_moe", "mixtral"):
        hidden = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
        experts = ("num_local_experts", "num_experts") if kind == "mixtral" else ("num_experts", "num_local_experts")
        found = [
            *common,
            Field("num_key_value_heads", "num_kv_heads", f.num_kv_heads),
            Field("head_dim", "qk_rope_head_dim", f.qk_rope_head_dim, f.dim // f.n_heads),
            Field(hidden, "moe_hidden_dim", f.moe_hidden_dim),
            Field(experts[0], "num_experts", f.num_experts, also=experts[1]),
        ]
        return found + ([Field("norm_topk_prob", "route_norm", f.route_norm)] if kind == "qwen3_moe" else [])
    found = [
        *common,
        Field("num_key_value_heads", "n_heads", f.n_heads, f.n_heads),
        Field("first_k_dense_replace", "n_dense_layers", f.n_dense_layers),
        Field("q_lora_rank", "q_lora_rank", f.q_lora_rank or None),
        Field("kv_lora_rank", "kv_lora_rank", f.kv_lora_rank),
        Field("qk_nope_head_dim", "qk_nope_head_dim", f.qk_nope_head_dim),
        Field("qk_rope_head_dim", "qk_rope_head_dim", f.qk_rope_head_dim),
        Field("v_head_dim", "v_head_dim", f.v_head_dim),
        Field("moe_intermediate_size", "moe_hidden_dim", f.moe_hidden_dim),
        Field("n_routed_experts", "num_experts", f.num_experts),
        Field("n_shared_experts", "num_shared_experts", f.num_shared_experts),
        Field("norm_topk_prob", "route_norm", f.route_norm),
        Field("routed_scaling_factor", "route_scale", f.route_scale),
        Field("scoring_func", "score_func", f.score_func, "softmax" if kind == "deepseek_v2" else "sigmoid"),
    ]
    if f.n_dense_layers:
        found.append(Field("intermediate_size", "dense_hidden_dim", f.dense_hidden_dim))
    found.append(Field("n_group", "num_expert_groups", f.num_expert_groups, 1))
    if f.num_expert_groups > 1:
        found.append(Field("topk_group", "num_limited_groups", f.num_limited_groups))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Import


def disagreements(content: dict[str, Any], name: str, f: Flavor, *, dense: bool = False) -> list[str]:
    """What a config.json says otherwise than the configuration, whose model.name is `name`: each with both values.
    `dense`: it is of a dense model, whose feed-forward becomes every expert (names.py)."""
    strange = [(key, known) for key, known in TYPES.items() if not isinstance(content.get(key), known | None)]
    if strange:
        return [f"config.json: {key} = {content[key]!r}: is no {t.__name__}; download it again" for key, t in strange]
    kind = content.get("model_type")
    families, others = (DENSE_FAMILIES, FAMILIES) if dense else (FAMILIES, DENSE_FAMILIES)
    if families.get(kind) != name:  # type: ignore[arg-type]
        known = families.get(kind)  # type: ignore[arg-type]
        remedy = f'set model.name = "{known}"' if known else f"it must be one of {', '.join(families)}"
        if kind in others and dense:
            return [f"config.json: model_type = {kind!r} has experts already: leave checkpoint.upcycle out"]
        if kind in others:
            remedy += (
                f'; or, to begin as this dense model, set model.name = "{others[kind]}" and checkpoint.upcycle = true'
            )
        return [f'config.json: model_type = {kind!r}, but model.name = "{name}" here; {remedy}']
    found = []
    for key, only, why in FIXED:
        if dense and key == "tie_word_embeddings":  # then the embedding is read twice
            continue
        if (value := content.get(key, only)) not in (only, None):
            found.append(f"config.json: {key} = {value!r}: {why}; its weights cannot be loaded")
    window = content.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind in ("mixtral", "mistral") and window:
        found.append(f"config.json: sliding_window = {window}: this trainer's attention has no window")
    if f.attention == "mla":
        found += _latent_disagreements(content, f, str(kind))
        if content.get("topk_method") == "greedy":
            content = content | {"n_group": 1}  # whatever it names, this method has none
    for field in fields_of(f, str(kind)):
        theirs = content.get(field.theirs, content.get(field.also, field.absent))
        if theirs is None:
            theirs = None if field.absent is REQUIRED else field.absent
        if theirs is REQUIRED:
            found.append(f"config.json: has no {field.theirs}, which is model.{field.ours} = {_shown(field)} here")
        elif theirs != field.value:
            found.append(_disagreement(field.theirs, theirs, field.ours, field.value))
    found += _rotary_disagreements(content, f, str(kind))
    mtp = content.get("num_nextn_predict_layers", content.get("num_mtp_layers", 0)) or 0
    if f.num_mtp_layers > mtp:
        found.append(_disagreement("num_nextn_predict_layers", mtp, "num_mtp_layers", f.num_mtp_layers))
    return found


def _latent_disagreements(content: dict[str, Any], f: Flavor, kind: str) -> Iterator[str]:
    """Of DeepSeek's models in what no number of config.json says."""
    known = TOPK_METHODS.get(kind, ("noaux_tc",))
    if (method := content.get("topk_method", known[0])) not in known:
        yield (
            f'config.json: topk_method = "{method}": this trainer has only {", ".join(known)} in models of type '
            f"{kind}; its weights cannot be loaded"
        )
    elif method != "greedy" and f.num_expert_groups > 1 and f.scores_per_group != (wanted := SCORES_PER_GROUP[kind]):
        yield (
            f'config.json: topk_method = "{method}": judges a group by its best {wanted}, but model.scores_per_group = '
            f"{f.scores_per_group} here; set model.scores_per_group = {wanted}"
        )
    if f.latent_norm_eps != LATENT_NORM_EPS:
        yield (
            f"config.json: models of type {kind} have {LATENT_NORM_EPS} in the norms of the latents, but "
            f"model.latent_norm_eps = {f.latent_norm_eps} here; set model.latent_norm_eps = {LATENT_NORM_EPS}"
        )


def _disagreement(theirs: str, value: Any, ours: str, here: Any) -> str:
    wanted, here = (0 if each is None else each for each in (value, here))
    return f"config.json: {theirs} = {value}, but model.{ours} = {here} here; set model.{ours} = {_written(wanted)}"


def _written(value: Any) -> str:
    """As TOML has it."""
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _shown(field: Field) -> Any:
    return 0 if field.value is None else field.value


def _rotary_disagreements(content: dict[str, Any], f: Flavor, kind: str) -> Iterator[str]:
    """transformers 5 writes rope_parameters, others rope_theta and rope_scaling."""
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = rope.get("rope_theta", content.get("rope_theta", 1e6 if kind == "mixtral" else 10000.0))
    if theta != f.rope_theta:
        yield _disagreement("rope_theta", theta, "rope_theta", f.rope_theta)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor", 1.0) if scaling == "yarn" else 1.0
    if scaling not in ("default", "yarn") or (f.attention == "gqa" and factor != 1):
        has = 'only "yarn"' if f.attention == "mla" else f"none in models of type {kind}"
        yield f'config.json: rope_scaling is of type "{scaling}": this trainer has {has}; choose another model'
        return
    if factor != f.rope_factor:
        yield _disagreement("rope_scaling.factor", factor, "rope_factor", f.rope_factor)
    if factor == 1 or f.rope_factor == 1:
        return
    original = rope.get("original_max_position_embeddings")
    if original != f.original_seq_len:
        yield _disagreement(
            "rope_scaling.original_max_position_embeddings", original, "original_seq_len", f.original_seq_len
        )
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim != f.mscale:
        yield _disagreement("rope_scaling.mscale_all_dim", all_dim, "mscale", f.mscale)
    if mscale != all_dim:
        yield (
            f"config.json: rope_scaling.mscale = {mscale} and mscale_all_dim = {all_dim} differ: this trainer has one "
            "temperature, model.mscale; its weights cannot be loaded"
        )
    if (value := rope.get("beta_fast") or 32) != f.rope_beta_fast:
        yield _disagreement("rope_scaling.beta_fast", value, "rope_beta_fast", f.rope_beta_fast)
    if (value := rope.get("beta_slow") or 1) != 1:
        yield f"config.json: rope_scaling.beta_slow = {value}: this trainer has 1; its weights cannot be loaded"


# ---------------------------------------------------------------------------------------------------------------------
# Export


def export_problems(f: Flavor, bias: bool) -> list[str]:
    """What of a model transformers has no class for. `bias`: its routers have a correction bias."""
    found, kind = [], model_type(f)
    if kind != "deepseek_v3" and bias:
        found.append(
            f"moe.load_balance_coeff: the router bias, which it moves, has no place in {ARCHITECTURES[kind]}: set it "
            "to 0, and for balance moe.sequence_loss_coeff"
        )
    not_theirs: dict[str, tuple[Any, Any]] = {}
    if f.attention == "mla":
        not_theirs["latent_norm_eps"] = (f.latent_norm_eps, LATENT_NORM_EPS)
        if f.num_expert_groups > 1:
            not_theirs["scores_per_group"] = (f.scores_per_group, SCORES_PER_GROUP[kind])
    if kind == "deepseek_v2":
        not_theirs |= {"route_norm": (f.route_norm, False), "num_mtp_layers": (f.num_mtp_layers, 0)}
    elif kind != "deepseek_v3":
        not_theirs = {"score_func": (f.score_func, "softmax"), "num_expert_groups": (f.num_expert_groups, 1)}
        not_theirs["route_scale"] = (f.route_scale, 1.0)
        if kind == "mixtral":
            not_theirs["route_norm"] = (f.route_norm, True)
    return found + [
        f"model.{key} = {value}: {ARCHITECTURES[kind]} has only {only}; set model.{key} = {_written(only)}"
        for key, (value, only) in not_theirs.items()
        if value != only
    ]


def content(f: Flavor, dtype: str, bos: int | None, eos: int | None) -> dict[str, Any]:
    """A config.json, with the field names of published models, which every version of transformers reads."""
    kind = model_type(f)
    found: dict[str, Any] = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    found |= {field.theirs: field.value for field in fields_of(f, kind)}
    found |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
    found |= {"max_position_embeddings": f.max_seq_len, "rope_theta": f.rope_theta, "rope_scaling": None}
    if f.rope_factor > 1:
        found["rope_scaling"] = {
            "type": "yarn",
            "factor": f.rope_factor,
            "original_max_position_embeddings": f.original_seq_len,
            "beta_fast": f.rope_beta_fast,
            "beta_slow": 1,
            "mscale": f.mscale,
            "mscale_all_dim": f.mscale,
        }
    if kind == "qwen3_moe":
        found |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    if kind == "mixtral":
        found["sliding_window"] = None
    if f.attention == "mla":
        found |= {"moe_layer_freq": 1, "num_nextn_predict_layers": f.num_mtp_layers}
        without, *limited = TOPK_METHODS.get(kind, ("noaux_tc",))
        found["topk_method"] = limited[0] if limited and f.num_expert_groups > 1 else without
        found.setdefault("topk_group", 1)
        found.setdefault("intermediate_size", f.moe_hidden_dim)
    return found | {"bos_token_id": bos, "eos_token_id": eos, "torch_dtype": dtype, "use_cache": True}
