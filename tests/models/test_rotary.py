"""A table of rotary embeddings against transformers' own computation, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specplug.models.rotary import RotaryTable, Turn

NUM_POSITIONS = 3001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("positions", [[0], [2999], [7, 8, 9], [5, 5, 2000]])
def test_a_looked_up_turn_is_the_computed_one(dtype: torch.dtype, head_dim: int, positions: list[int]) -> None:
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4))
    table = RotaryTable(rotary, NUM_POSITIONS, dtype=dtype, device=torch.device("cpu"))
    ids = torch.tensor(positions)
    heads = torch.randn(len(positions), 4, head_dim).to(dtype)
    cos, sin = rotary(heads, ids[None])
    turned = table(ids[None])(heads)
    assert torch.equal(turned, Turn.of((cos[0], sin[0]))(heads))
    queries = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(queries, queries, cos, sin)
    assert torch.equal(turned, expected[0].transpose(0, 1))
