"""Heads that draft, with random weights in the published formats, and what they compute in plain torch, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.model.quantization.layouts import WRITERS

Tensors = dict[str, torch.Tensor]

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "dtype": "float32",
}


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
OTHER = [*PROMPT[:16], 50, 51, 52, 53]

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle of two layers": ("eagle", {"num_layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle3 with its switches": (
        "eagle3",
        {
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [1, 6],
        },
    ),
    "eagle3 of speculators": ("eagle3", {"speculators": True, "norm_before_residual": True, "qk_norm": True}),
    "mtp": ("mtp", {}),
    "mtp of DeepSeek": ("mtp", {"architecture": "deepseek-v3"}),
}


def save_target(folder: Path, method: str, seed: int = 5) -> Any:
    """The target of a head, as transformers has it."""
    import transformers

    torch.manual_seed(seed)
    shape = {name: value for name, value in SHAPE.items() if name not in ("dtype", "rope_theta", "head_dim")}
    if method == "mtp":
        target = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    else:
        target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:
                gain = 3.0 if "lm_head" in name or "embed" in name else 1.0
                parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5)
    target.eval().save_pretrained(folder)
    tree = json.loads((folder / "config.json").read_text())
    if method == "mtp":
        tree |= {
            "architectures": ["MiMoForCausalLM"],
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "head_dim": SHAPE["head_dim"],
        }
        (folder / "config.json").write_text(json.dumps(tree))
        tensors = load_file(folder / "model.safetensors") | mtp_tensors(tree, seed)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return target


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        elif len(shape) == 1:
            tensors[name] = 0.1 * torch.randn(shape, generator=generator)
        else:
            gain = 3.0 if "lm_head" in name or "embed" in name else 1.0
            tensors[name] = gain * torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return tensors


def layer_shapes(
    prefix: str, tree: dict[str, Any], num_inputs: int, *, has_bias: bool = False
) -> dict[str, tuple[int, ...]]:
    size, inner = tree["hidden_size"], tree["intermediate_size"]
    dim = tree["head_dim"]
    q, kv = tree["num_attention_heads"] * dim, tree["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, num_inputs),
        "self_attn.k_proj.weight": (kv, num_inputs),
        "self_attn.v_proj.weight": (kv, num_inputs),
        "self_attn.o_proj.weight": (size, q),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
        "post_attention_layernorm.weight": (size,),
    }
    if has_bias:
        shapes |= {f"self_attn.{n}_proj.bias": (w,) for n, w in (("q", q), ("k", kv), ("v", kv))}
    if tree.get("qk_norm"):
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def save_eagle(folder: Path, target: dict[str, Any], *, num_layers: int = 1, seed: int = 1) -> Path:
    """As SafeAILab publishes EAGLE-1: an embedding of its own, and no norm before the first layer."""
    tree = target | {"num_hidden_layers": num_layers, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    size = tree["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size),
        "embed_tokens.weight": (tree["vocab_size"], size),
    }
    for index in range(num_layers):
        shapes |= layer_shapes(f"layers.{index}.", tree, size)
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (size,)
    return save(folder, tree, drawn(shapes, seed))


def save_eagle3(
    folder: Path,
    target: dict[str, Any],
    *,
    speculators: bool = False,
    draft_vocab_size: int = 60,
    seed: int = 2,
    **own: Any,
) -> Path:
    """As SafeAILab publishes EAGLE-3 (`midlayer`), or as the library speculators does (`layers.0`)."""
    layer = "layers.0." if speculators else "midlayer."
    tree = target | {"num_hidden_layers": 1}
    size, vocab = tree["hidden_size"], tree["vocab_size"]
    num_taps = len(own.get("eagle_aux_hidden_state_layer_ids", [0, 0, 0]))
    shapes = layer_shapes(layer, tree | {"qk_norm": own.get("qk_norm")}, 2 * size)
    shapes |= {f"{layer}input_layernorm.weight": (size,), f"{layer}hidden_norm.weight": (size,), "norm.weight": (size,)}
    shapes |= {"fc.weight": (size, num_taps * size), "lm_head.weight": (draft_vocab_size, size)}
    if own.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_taps * size,)
    if own.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(num_taps)}
    tensors = drawn(shapes, seed)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    if speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": tree | {"model_type": "qwen3" if own.pop("qk_norm", None) else "llama"},
            "draft_vocab_size": draft_vocab_size,
            **own,
        }
    else:
        config = tree | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size, **own}
    return save(folder, config, tensors)


def save(folder: Path, tree: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def quantize(folder: Path, name: str) -> Tensors:
    """Give the layers of a head random weights in a published layout of fewer bits. Returns all tensors in plain numbers."""
    scheme, writer = WRITERS[name]
    stored = load_file(folder / "model.safetensors")
    exact = dict(stored)
    for key in [key for key in stored if key.endswith("_proj.weight") or key == "fc.weight"]:
        tensors, exact[key] = writer(*stored.pop(key).shape)
        stored |= {f"{key.removesuffix('.weight')}.{part}": tensor for part, tensor in tensors.items()}
    save(folder, json.loads((folder / "config.json").read_text()) | {"quantization_config": scheme}, stored)
    return exact


def mtp_tensors(tree: dict[str, Any], seed: int = 3) -> Tensors:
    """Those of MiMo beside the ones of Qwen2."""
    size, base = tree["hidden_size"], "model.mtp_layers.0."
    shapes = layer_shapes(base, tree, size, has_bias=True)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    shapes |= {f"{base}{name}.weight": (size,) for name in norms}
    shapes[f"{base}input_proj.weight"] = (size, 2 * size)
    return drawn(shapes, seed)


def save_deepseek(folder: Path, differences: dict[str, Any], seed: int = 5) -> tuple[Any, Any]:
    """A target of three layers with one for further tokens, as DeepSeek publishes V3: one layer more, and what goes around it.

    Returns the target and that layer, as transformers computes them.
    """
    import transformers

    shape = {name: value for name, value in SHAPE.items() if name not in ("dtype", "rope_theta", "head_dim")}
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(**(shape | differences | {"num_hidden_layers": 4}))
    target = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:
                gain = 3.0 if "lm_head" in name or "embed" in name else 1.0
                parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5)
    target.save_pretrained(folder)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}))
    size, base = tree["hidden_size"], "model.layers.3."
    around: dict[str, tuple[int, ...]] = {f"{base}{name}.weight": (size,) for name in ("enorm", "hnorm")}
    around |= {f"{base}shared_head.norm.weight": (size,), f"{base}eh_proj.weight": (size, 2 * size)}
    tensors = load_file(folder / "model.safetensors")
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    tensors |= {base + name: tensors[of].clone() for name, of in copies.items()}
    save_file(tensors | drawn(around, seed), folder / "model.safetensors", {"format": "pt"})
    layer = target.model.layers[3]
    target.model.layers = target.model.layers[:3]
    target.config.num_hidden_layers = 3
    return target, layer


# What they compute ----------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@dataclass
class Oracle:
    """A head of a method, over the states of the target that transformers computes."""

    method: str
    tree: dict[str, Any]
    """Flat."""
    tensors: Tensors
    target: Any
    """Of transformers."""
    own: dict[str, Any]

    @classmethod
    def of(cls, method: str, folder: Path, target: Any, **own: Any) -> Oracle:
        tree = json.loads((folder / "config.json").read_text())
        flat = tree.get("transformer_layer_config", {}) | tree
        return cls(method, flat, load_file(folder / "model.safetensors"), target, own)

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """[num_tokens, state_size]."""
        kept: list[torch.Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        with torch.no_grad():
            found = self.target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        hook.remove()
        if self.method == "eagle" or "layer" in self.own:
            return found[-1][0]
        if self.method == "mtp":
            return kept[0][0]
        layers = len(found) - 1
        taps = self.own.get("eagle_aux_hidden_state_layer_ids", [2, layers // 2, layers - 3])
        return torch.cat([kept[0][0] if tap == layers else found[tap][0] for tap in taps], 1)

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        if self.method != "eagle3":
            return states
        eps = self.tree["rms_norm_eps"]
        if self.own.get("norm_before_fc"):
            states = norm(states, self.tensors["input_norm.weight"], eps)
        if self.own.get("fc_norm"):
            parts = states.split(self.tree["hidden_size"], 1)
            states = torch.cat([norm(p, self.tensors[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)], 1)
        return states @ self.tensors["fc.weight"].T

    def logits(self, tokens: Sequence[int], num_drafts: int) -> tuple[list[torch.Tensor], list[int]]:
        """Of each draft behind these tokens, and the drafts: the most likely ones."""
        given = self.combined(self.states(tokens))[:-1]  # before the second token, and all behind it
        ids = list(tokens)[1:]
        logits, drafts = [], []
        for _ in range(num_drafts):
            states, chained = self.forward(torch.tensor(ids), given)
            logits.append(self.head(states[-1]))
            drafts.append(int(logits[-1].argmax()))
            ids.append(drafts[-1])
            given = torch.cat((given, chained[-1:]))
        return logits, drafts

    def head(self, state: torch.Tensor) -> torch.Tensor:
        if self.method != "eagle3":
            return self.target.lm_head.weight.detach() @ state
        wide = torch.full((self.target.config.vocab_size,), -torch.inf)
        ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        wide[ids] = self.tensors["lm_head.weight"] @ state
        return wide

    def forward(self, ids: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t, eps = self.tensors, self.tree["rms_norm_eps"]
        table = t.get("embed_tokens.weight", self.target.model.embed_tokens.weight.detach())
        embedded = table[ids]
        if self.method == "eagle":
            x = torch.cat((embedded, given), 1) @ t["fc.weight"].T
            for index in range(self.tree["num_hidden_layers"]):
                prefix = f"layers.{index}."
                seen = norm(x, t[f"{prefix}input_layernorm.weight"], eps) if index else x
                x = self.layer(prefix, x, seen)
            return x, x
        if "layer" in self.own:
            return self.deepseek(embedded, given)
        if self.method == "mtp":
            base = "model.mtp_layers.0."
            embedded = embedded.clone()
            embedded[0] = 0  # at the first position of the head
            both = (
                norm(given, t[f"{base}hidden_layernorm.weight"], eps),
                norm(embedded, t[f"{base}token_layernorm.weight"], eps),
            )
            x = torch.cat(both, 1) @ t[f"{base}input_proj.weight"].T
            x = self.layer(base, x, norm(x, t[f"{base}input_layernorm.weight"], eps))
            x = norm(x, t[f"{base}final_layernorm.weight"], eps)
            return x, x
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in t else "layers.0."
        seen = norm(given, t[f"{prefix}hidden_norm.weight"], eps)
        residual = seen if self.own.get("norm_before_residual") else given
        embedded = norm(embedded, t[f"{prefix}input_layernorm.weight"], eps)
        x = self.layer(prefix, residual, torch.cat((embedded, seen), 1))
        normed = norm(x, t["norm.weight"], eps)
        return normed, normed if self.own.get("norm_output") else x

    def deepseek(self, embedded: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t, eps, base = self.tensors, self.tree["rms_norm_eps"], "model.layers.3."
        embedded = embedded.clone()
        embedded[0] = 0  # at the first position of the head
        both = norm(embedded, t[f"{base}enorm.weight"], eps), norm(given, t[f"{base}hnorm.weight"], eps)
        x = (torch.cat(both, 1) @ t[f"{base}eh_proj.weight"].T).unsqueeze(0)
        positions = torch.arange(len(embedded)).unsqueeze(0)
        hidden = torch.full((len(embedded), len(embedded)), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            angles = self.target.model.rotary_emb(x, positions)
            made = self.own["layer"](x, attention_mask=hidden, position_ids=positions, position_embeddings=angles)
        x = (made[0] if isinstance(made, tuple) else made).view(len(embedded), -1)
        return norm(x, t[f"{base}shared_head.norm.weight"], eps), x

    def layer(self, prefix: str, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        t, tree = self.tensors, self.tree
        dim, length = tree["head_dim"], len(x)

        def heads(name: str) -> torch.Tensor:
            out = seen @ t[f"{prefix}self_attn.{name}_proj.weight"].T
            out = out + t.get(f"{prefix}self_attn.{name}_proj.bias", torch.zeros(()))
            out = out.view(length, -1, dim)
            if f"{prefix}self_attn.{name}_norm.weight" in t:
                out = norm(out, t[f"{prefix}self_attn.{name}_norm.weight"], tree["rms_norm_eps"])
            return out.transpose(0, 1)

        theta = tree.get("rope_theta") or tree["rope_parameters"]["rope_theta"]
        angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = torch.cat((angles.cos(),) * 2, 1), torch.cat((angles.sin(),) * 2, 1)

        def rotated(h: torch.Tensor) -> torch.Tensor:
            half = torch.cat((-h[..., dim // 2 :], h[..., : dim // 2]), -1)
            return h * cos + half * sin

        fold = tree["num_attention_heads"] // tree["num_key_value_heads"]
        q, k, v = (
            rotated(heads("q")),
            rotated(heads("k")).repeat_interleave(fold, 0),
            heads("v").repeat_interleave(fold, 0),
        )
        hidden = torch.ones(length, length).triu(1).bool()
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(hidden, -torch.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + attended @ t[f"{prefix}self_attn.o_proj.weight"].T
        seen = norm(x, t[f"{prefix}post_attention_layernorm.weight"], tree["rms_norm_eps"])
        gate, up = seen @ t[f"{prefix}mlp.gate_proj.weight"].T, seen @ t[f"{prefix}mlp.up_proj.weight"].T
        return x + (functional.silu(gate) * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def partly_right(oracle: Oracle, most: int) -> Callable[[list[int], list[int]], list[int]]:
    """In the place of the drafts as many right ones as the number of tokens says, then a wrong one."""

    def plan(tokens: list[int], drafts: list[int]) -> list[int]:
        known = list(tokens)
        right = len(tokens) % (most + 1)
        with torch.no_grad():
            for _ in range(most):
                known.append(int(oracle.target(torch.tensor([known])).logits[0, -1].argmax()))
        made = known[len(tokens) :]
        return [token if i < right else (token + 1) % 97 for i, token in enumerate(made)][: len(drafts)]

    return plan
