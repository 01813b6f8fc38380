"""An EAGLE-3 head in training (Li et al., 2025): one decoder layer over embeddings and states of three target layers.

Training-time test: the head is unrolled on its own outputs as it will be when it drafts. In step s the entry at
position t reads the output that step s - 1 had at t - 1; it attends to the entries of step 0 up to t - s, which stand
for what the target has read, and to one entry of each step since. Module names are those of published checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu
from training.head_data import DraftVocabulary, HeadBatch
from training.losses import soft_cross_entropy
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

__all__ = ["Eagle3"]

STEP_WEIGHT = 0.8
"""Of each step in the loss, relative to the one before."""


class _Norm(torch.nn.RMSNorm):
    """In float32 under autocast too."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states.float())


class _Attention(torch.nn.Module):
    """Queries, keys and values of ``[rows, tokens, 2 * hidden]``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.num_attention_heads // config.num_key_value_heads
        size, width = config.hidden_size, 2 * config.hidden_size
        self.q_proj = torch.nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = torch.nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = torch.nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = torch.nn.Linear(config.num_attention_heads * config.head_dim, size, bias=False)

    def forward(self, inputs: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], past: list[Any]) -> torch.Tensor:
        """``past``: keys and values of the steps before; those of this one are added."""
        queries, keys, values = (
            project(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        past.append(tuple(each.repeat_interleave(self.group, 1) for each in (keys, values)))
        mixed = _attend(queries * self.head_dim**-0.5, past)
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


def _attend(queries: torch.Tensor, past: list[Any]) -> torch.Tensor:
    """``[rows, heads, tokens, head_dim]``; see the module's text for which entries are seen."""
    step = len(past) - 1
    num_tokens = queries.shape[2]
    (keys, values), *later = past
    is_seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(-step)
    is_seen[:, 0] = True  # the first positions have no such past; their outputs are not used
    scores = [(queries @ keys.transpose(-1, -2)).float().masked_fill(~is_seen, -torch.inf)]
    own = [tuple(each.roll(step - number, 2) for each in entry) for number, entry in enumerate(later, start=1)]
    scores += [(queries * own_keys).float().sum(-1, keepdim=True) for own_keys, _ in own]
    weights = torch.cat(scores, -1).softmax(-1).to(values.dtype)
    mixed = weights[..., :num_tokens] @ values
    for number, (_, own_values) in enumerate(own):
        mixed = mixed + weights[..., num_tokens + number, None] * own_values
    return mixed


class _Mlp(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))
        return output


class _Layer(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self, name, _Norm(config.hidden_size, config.rms_norm_eps))

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, rotary: Any, past: list[Any]) -> torch.Tensor:
        inputs = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), -1)
        states: torch.Tensor = features + self.self_attn(inputs, rotary, past)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3(torch.nn.Module):
    """The head for a Llama-shaped ``target``, begun from the target's last layer, norm and output head.

    ``layers``: the three that it reads, which are the first of each ``HeadBatch``'s.
    """

    def __init__(self, target: Any, layers: tuple[int, ...], vocabulary: DraftVocabulary, *, num_steps: int) -> None:
        super().__init__()
        self.target_config = target.config
        self.layers = layers
        self.vocabulary = vocabulary
        self.num_steps = num_steps
        size = target.config.hidden_size
        self.fc = torch.nn.Linear(len(layers) * size, size, bias=False)
        self.midlayer = _Layer(target.config)
        self.norm = _Norm(size, target.config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(size, len(vocabulary.target_ids), bias=False)
        self._embed = [target.get_input_embeddings()]  # not a part of the head
        self._rotary = [LlamaRotaryEmbedding(target.config)]
        self._begin_from(target)

    @torch.no_grad()
    def _begin_from(self, target: Any) -> None:
        last, layer, size = target.model.layers[-1], self.midlayer, target.config.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            weight[:, :size] *= 0.1
            weight[:, size:] = getattr(last.self_attn, name).weight
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.get_output_embeddings().weight[self.vocabulary.target_ids])

    def outputs(self, batch: HeadBatch) -> list[torch.Tensor]:
        """Of each step ``[rows, tokens - 1, hidden]``, before the norm. Entry t reads token t + 1 and guesses t + 2."""
        token_ids = batch.token_ids[:, 1:]
        embedded = self._embed[0](token_ids).detach().float()
        rotary = self._rotary[0](embedded, torch.arange(token_ids.shape[1])[None])
        features = self.fc(batch.states[:, :-1, : len(self.layers)].flatten(2))
        past: list[Any] = []
        found = []
        for _ in range(self.num_steps):
            states = self.midlayer(embedded, features, rotary, past)
            found.append(states)
            features = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
        return found

    def loss(self, batch: HeadBatch) -> torch.Tensor:
        """Cross entropy on what the target wrote, later steps weighing less."""
        total = torch.zeros(())
        label_ids, label_probs = batch.label_ids[:, 1:], batch.label_probs[:, 1:]
        for step, states in enumerate(self.outputs(batch)):
            chosen = batch.is_output[:, 1:].clone()
            chosen[:, :step] = False
            logits = self.lm_head(self.norm(states[chosen]))
            losses = soft_cross_entropy(logits, label_ids[chosen], label_probs[chosen])
            total = total + STEP_WEIGHT**step * losses.mean()
        return total

    def is_right(self, batch: HeadBatch) -> torch.Tensor:
        """``[starts, num_steps]``: whether each draft token of a chain from every start is the target's."""
        best = batch.best_ids[:, 1:]
        outputs = self.outputs(batch)
        right = [self.lm_head(self.norm(states)).argmax(-1) == best for states in outputs]
        width = best.shape[1] - len(right) + 1
        chains = torch.stack([each[:, step : step + width] for step, each in enumerate(right)], -1)
        is_whole = batch.is_output[:, 1 : 1 + width] & batch.is_output[:, len(right) : len(right) + width]
        return chains[is_whole]

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Config and tensors in the published format."""
        keys = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
            "rms_norm_eps", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id",
        )  # fmt: skip
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: getattr(self.target_config, key) for key in keys},
            "rope_parameters": dict(self.target_config.rope_parameters),
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.vocabulary.target_ids),
            "target_hidden_size": self.target_config.hidden_size,
            "tie_word_embeddings": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
        }
        tables = {"d2t": self.vocabulary.offsets, "t2d": self.vocabulary.places >= 0}
        return config, {**self.state_dict(), **tables}
