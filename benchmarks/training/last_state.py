"""Heads on the target's last state in training: the MLP speculator and Medusa, as their plugins compute them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from specplug_medusa.checkpoint import HeadsConfig
from specplug_medusa.heads import MedusaHeads
from specplug_mlp.checkpoint import SpeculatorConfig
from specplug_mlp.head import MlpHead
from training.draft import principal_embeddings
from training.head_data import DraftVocabulary, HeadBatch
from training.losses import soft_cross_entropy

__all__ = ["LastStateHead", "Medusa", "Mlp"]

STEP_WEIGHT = 0.8
"""Of each step in the loss, relative to the one before."""
EMBEDDING_STD = 0.3
"""At the start, so that the token read weighs about as much as the state."""


class LastStateHead(torch.nn.Module, ABC):
    """From the state that read token t, ``num_steps`` guesses: token t + 2 and the following."""

    def __init__(self, target: Any, vocabulary: DraftVocabulary, num_steps: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.num_steps = num_steps
        self._norm = [target.get_decoder().norm]  # not a part of the head

    @abstractmethod
    def guesses(self, states: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """Logits ``[n, draft_vocab]`` of each step. ``states`` ``[n, hidden]``, normalised; ``token_ids``
        ``[n, num_steps]``: the tokens from t + 1 on."""

    def loss(self, batch: HeadBatch) -> torch.Tensor:
        """Cross entropy on what the target wrote, later steps weighing less."""
        rows, starts = self._starts(batch)
        total = torch.zeros(())
        for step, logits in enumerate(self._guesses_from(batch, rows, starts)):
            place = rows, starts + 1 + step
            losses = soft_cross_entropy(logits, batch.label_ids[place], batch.label_probs[place])
            total = total + STEP_WEIGHT**step * losses.mean()
        return total

    def is_right(self, batch: HeadBatch) -> torch.Tensor:
        """``[starts, num_steps]``: whether each draft token of a chain from every start is the target's."""
        rows, starts = self._starts(batch)
        guesses = self._guesses_from(batch, rows, starts)
        right = [logits.argmax(-1) == batch.best_ids[rows, starts + 1 + step] for step, logits in enumerate(guesses)]
        return torch.stack(right, -1)

    def _starts(self, batch: HeadBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of every start whose whole chain the target wrote."""
        width = batch.token_ids.shape[1] - self.num_steps
        is_whole = batch.is_output[:, 1 : 1 + width] & batch.is_output[:, self.num_steps : self.num_steps + width]
        rows, starts = is_whole.nonzero(as_tuple=True)
        return rows, starts

    def _guesses_from(self, batch: HeadBatch, rows: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
        states = self._norm[0](batch.states[rows, starts, -1]).detach()
        token_ids = batch.token_ids[rows[:, None], starts[:, None] + 1 + torch.arange(self.num_steps)]
        return self.guesses(states, token_ids)


class Mlp(LastStateHead):
    """The MLP speculator (IBM), tied; its heads know a part of the vocabulary."""

    def __init__(self, target: Any, vocabulary: DraftVocabulary, *, num_steps: int, inner_dim: int) -> None:
        super().__init__(target, vocabulary, num_steps)
        self.config = SpeculatorConfig(
            emb_dim=target.config.hidden_size,
            inner_dim=inner_dim,
            vocab_size=target.config.vocab_size,
            n_predict=num_steps,
            tie_weights=True,
            scale_input=True,
            draft_vocab_size=len(vocabulary.target_ids),
        )
        self.head = MlpHead(self.config)
        embeddings = principal_embeddings(target.get_input_embeddings().weight, inner_dim)
        with torch.no_grad():
            self.head.emb[0].weight.copy_(embeddings / embeddings.std() * EMBEDDING_STD)
            self.head.head[0].weight.copy_(embeddings[vocabulary.target_ids])

    def guesses(self, states: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """See the base."""
        found = []
        states = self.head.start(states)
        for step in range(self.num_steps):
            states = self.head(states, token_ids[:, step], step)
            found.append(self.head.logits(states, step))
        return found

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Config and tensors in the published layout, shared tensors once."""
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": self.config.emb_dim,
            "inner_dim": self.config.inner_dim,
            "vocab_size": self.config.vocab_size,
            "truncated_vocab_size": self.config.draft_vocab_size,
            "n_predict": self.config.n_predict,
            "tie_weights": True,
            "scale_input": True,
        }
        tensors = {f"speculator.{name}": tensor for name, tensor in self.head.state_dict().items()}
        return config, {**tensors, "token_map": self.vocabulary.target_ids}


class Medusa(LastStateHead):
    """Medusa heads with one output head for all, begun as the target's own."""

    def __init__(self, target: Any, vocabulary: DraftVocabulary, *, num_steps: int) -> None:
        super().__init__(target, vocabulary, num_steps)
        self.config = HeadsConfig(
            num_heads=num_steps,
            num_layers=1,
            hidden_size=target.config.hidden_size,
            vocab_size=target.config.vocab_size,
            draft_vocab_size=len(vocabulary.target_ids),
            has_bias=False,
            shares_output=True,
            logit_scale=1.0,
        )
        self.heads = MedusaHeads(self.config, num_steps, 1)
        with torch.no_grad():
            self.heads.first.weight.mul_(0.1)
            output = target.get_output_embeddings().weight.detach()
            self.heads.outputs[0].weight.copy_(output[vocabulary.target_ids])

    def guesses(self, states: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """See the base; the tokens are not read."""
        features = self.heads(states)
        return [self.heads.logits(features[:, step], step) for step in range(self.num_steps)]

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Config and tensors in vLLM's layout."""
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "truncated_vocab_size": self.config.draft_vocab_size,
            "num_heads": self.num_steps,
            "num_hidden_layers": 1,
            "original_lm_head": True,
        }
        blocks = self.heads.first.weight.detach().chunk(self.num_steps)
        tensors = {f"blocks.{number}.layers.0.weight": block.contiguous() for number, block in enumerate(blocks)}
        output = self.heads.outputs[0].weight.detach()
        return config, {**tensors, "lm_heads.0.weight": output, "token_map": self.vocabulary.target_ids}
