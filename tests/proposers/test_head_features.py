from __future__ import annotations

import numpy as np
import pytest
import torch

from specplug.errors import ModelError
from specplug.proposers.heads.features import LastStates, final_norm
from specplug.testing import tiny_llama
from specplug.types import Batch, Request, TokenIds


def batch(rows: dict[str, list[float]]) -> Batch:
    """Each row's new positions with states (value, layer)."""
    return Batch(
        requests=tuple(Request(name, TokenIds(np.zeros(1, np.int32)), None, 0) for name in rows),  # type: ignore[arg-type]
        token_ids=(),
        num_computed_tokens=(),
        remaining=(),
        num_verify_steps=(),
        new_token_ids=tuple(TokenIds(np.zeros(len(values), np.int32)) for values in rows.values()),
        new_hidden_states={
            layer: tuple(torch.tensor([[value, layer] for value in values]).reshape(-1, 2) for values in rows.values())
            for layer in (1, 4)
        },
    )


def test_the_newest_position_of_each_request_is_kept() -> None:
    states = LastStates((4, 1))
    states.advance(batch({"a": [1.0, 2.0], "b": [3.0]}))
    states.advance(batch({"b": [], "a": [5.0, 6.0, 7.0]}))
    assert states.stack(["b", "a"]).tolist() == [[3, 4, 3, 1], [7, 4, 7, 1]]
    states.forget("a")
    states.forget("never there")
    assert "a" not in states and "b" in states


def test_a_kept_state_does_not_hold_the_whole_step() -> None:
    states = LastStates((1,))
    states.advance(batch({"a": [float(number) for number in range(1000)]}))
    assert states.stack(["a"]).untyped_storage().nbytes() == 8


def test_final_norm_gives_what_the_output_head_reads() -> None:
    model = tiny_llama()
    ids = torch.tensor([[1, 2, 3]])
    residuals: list[torch.Tensor] = []
    model.get_decoder().layers[-1].register_forward_hook(lambda module, args, output: residuals.append(output))
    with torch.no_grad():
        logits = model(ids).logits
        normed = final_norm(model)(residuals[0])
        assert torch.equal(model.get_output_embeddings()(normed), logits)


def test_a_model_without_a_final_norm_is_named() -> None:
    model = tiny_llama()
    del model.get_decoder().norm
    with pytest.raises(ModelError, match='"llama": its final norm'):
        final_norm(model)
