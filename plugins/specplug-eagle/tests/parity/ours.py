"""Our side of a comparison: a checkpoint loaded as specplug loads it, and its drafts after a text with given states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specplug import PluginConfig, PluginContext, SamplingParams
from specplug.hooks import process_manager
from specplug.models.runner import TargetRunner
from specplug.testing import tiny_llama
from specplug.types import Batch, Request, Session, TokenIds


def load(folder: Path, *, num_draft_tokens: int, model: Any = None, **settings: Any) -> Any:
    """The proposer of the method that the folder declares, for a target of the goldens' sizes (or ``model``)."""
    model = model if model is not None else tiny_llama(vocab_size=40, hidden_size=16, num_hidden_layers=4)
    target = TargetRunner(model, max_num_seqs=4, max_model_len=64, max_query_tokens=16)
    session = Session(40, 4, 64, num_draft_tokens, hidden_size=16, num_layers=4)
    method = settings.pop("method", "eagle3")
    spec = process_manager().spec(method)
    options = spec.options(model=str(folder), **settings)
    context = PluginContext(session, target, lambda *_: None, lambda _: None)
    return spec.factory(PluginConfig(method, num_draft_tokens, options), context)


def draft(
    proposer: Any, token_ids: torch.Tensor, states: torch.Tensor, num_draft_tokens: int, *, chunk: int = 1000
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids ``[K]`` and raw logits ``[K, draft_vocab]``; the text's states come in chunks."""
    request = Request("r", _ids(token_ids[:1]), SamplingParams(temperature=0.0), 0)
    seen: list[torch.Tensor] = []
    raw = proposer.head.logits
    proposer.head.logits = lambda outputs: seen.append(raw(outputs)) or seen[-1]
    try:
        with torch.inference_mode():
            for start in range(0, len(states), chunk):
                stop = min(start + chunk, len(states))
                proposer.specplug_advance(_batch(proposer, request, token_ids, states, start, stop))
            batch = _batch(proposer, request, token_ids, states, len(states), len(states))
            drafted = proposer.specplug_propose(batch, [num_draft_tokens])
            proposer.specplug_finish_request(request)
    finally:
        del proposer.head.logits
    return drafted.draft_token_ids, torch.cat(seen)


def _ids(token_ids: torch.Tensor) -> TokenIds:
    return TokenIds(np.asarray(token_ids, dtype=np.int32))


def _batch(
    proposer: Any, request: Request, token_ids: torch.Tensor, states: torch.Tensor, start: int, stop: int
) -> Batch:
    parts = states[start:stop].chunk(len(proposer.head.layers), dim=-1)
    return Batch(
        requests=(request,),
        token_ids=(_ids(token_ids),),
        num_computed_tokens=(stop,),
        remaining=(50,),
        num_verify_steps=(0,),
        new_token_ids=(_ids(token_ids[start:stop]),),
        new_hidden_states=dict(zip(proposer.head.layers, ((part,) for part in parts), strict=True)),
    )
