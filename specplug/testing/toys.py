"""Toy targets: language models whose every probability is known, behind the host's ``Target`` protocol.

They take the place of a model in ``specplug.LLM(model=toy)`` and need no weights. All run on the CPU in fp32; the toy
end-of-sequence id is 9 unless said otherwise.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specplug.errors import ModelError
from specplug.models.target import TargetOutput
from specplug.testing.tables import Table, check_probs, lookup
from specplug.trees import Tree

if TYPE_CHECKING:
    import torch

    from specplug.types import Request

__all__ = ["EOS_TOKEN_ID", "MarkovTarget", "ScriptedTarget", "TableTarget", "ToyTarget"]

EOS_TOKEN_ID = 9
"""The toys' end of sequence; outside the vocabulary of a smaller toy, which then has none."""

SCRIPTED_LOGIT = 10.0


class ToyTarget(ABC):
    """Base of the toys: rows of token ids, logits from ``logits_after``; implements ``specplug.models.target.Target``.

    Hidden states are made to be checked: ``tap`` gives every layer three features, namely the token id that was read,
    its position, and the layer's number.
    """

    num_layers: int | None = 2
    hidden_size: int | None = 3
    supports_trees = True

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        max_query_tokens: int = 64,
        eos_token_id: int | None = EOS_TOKEN_ID,
        tokenizer: Any = None,
    ) -> None:
        """``max_query_tokens``: prompts longer than this reach the target in chunks.

        ``tokenizer``: any Hugging Face tokenizer, such as :func:`toy_tokenizer` makes; without one, prompts are token
        ids and texts are empty.
        """
        import torch

        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_query_tokens = max_query_tokens
        has_eos = eos_token_id is not None and eos_token_id < vocab_size
        self.eos_token_ids = frozenset({eos_token_id}) if eos_token_id is not None and has_eos else frozenset()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.model: Any = None
        self.tokenizer: Any = tokenizer
        self._layers: tuple[int, ...] = ()
        self._requests: list[Request] = []
        self._rows: list[list[int]] = []

    @abstractmethod
    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        """``[vocab]`` raw logits of the token that follows ``token_ids`` (prompt included)."""

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What plain greedy decoding writes: ``num_tokens`` ids, fewer when the end of sequence comes first."""
        token_ids = list(prompt)
        while len(token_ids) < len(prompt) + num_tokens:
            token_ids.append(_first_argmax(self.logits_after(len(prompt), token_ids)))
            if token_ids[-1] in self.eos_token_ids:
                break
        return token_ids[len(prompt) :]

    def tap(self, layers: Sequence[int]) -> None:
        """See ``Target.tap``."""
        self._layers = tuple(layers)

    def acquire(self, request: Request) -> int:
        """See ``Target.acquire``. Raises ``ModelError`` when all rows are taken."""
        if len(self._rows) == self.max_num_seqs:
            raise ModelError(f"all {self.max_num_seqs} rows of the toy target are taken; release one first")
        self._requests.append(request)
        self._rows.append([])
        return len(self._rows) - 1

    def release(self, row: int) -> int | None:
        """See ``Target.release``."""
        last = len(self._rows) - 1
        self._rows[row], self._requests[row] = self._rows[last], self._requests[last]
        self._rows.pop()
        self._requests.pop()
        return None if row == last else last

    def rollback(self, row: int, length: int) -> None:
        """See ``Target.rollback``. Raises ``ValueError`` for a length that is negative or above the current one."""
        if not 0 <= length <= len(self._rows[row]):
            raise ValueError(f"row {row} holds {len(self._rows[row])} tokens and cannot roll back to {length}")
        del self._rows[row][length:]

    def compact(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """See ``Target.compact``. Raises ``ValueError`` for a move that is not towards the front of the row."""
        before = [list(held) for held in self._rows]
        for row, source, target in zip(rows, sources, targets, strict=True):
            if not 0 <= target < source < len(before[row]):
                raise ValueError(f"row {row} holds {len(before[row])} tokens: {source} cannot move to {target}")
            self._rows[row][target] = before[row][source]

    def forward(
        self,
        input_ids: torch.Tensor,
        num_query_tokens: Sequence[int],
        logits_indices: torch.Tensor,
        trees: Mapping[int, Tree] | None = None,
    ) -> TargetOutput:
        """See ``Target.forward``. Raises ``ValueError`` for ids outside the vocabulary and rows past their length."""
        import torch

        token_ids = input_ids.tolist()
        self._check_ids(token_ids)
        texts: list[tuple[int, list[int]]] = []
        for row, count in enumerate(num_query_tokens):
            ends = self._append(row, count, token_ids)
            texts += [(row, text) for text in self._texts(row, ends, (trees or {}).get(row))]
        if token_ids or len(texts) != len(input_ids):
            raise ValueError(f"{len(input_ids)} input ids do not match the counts {list(num_query_tokens)}")
        wanted = [texts[index] for index in logits_indices.tolist()]
        rows = [self.logits_after(len(self._requests[row].prompt_token_ids), text) for row, text in wanted]
        logits = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), self.vocab_size)
        return TargetOutput(logits=logits, hidden_states={layer: self._states(layer, texts) for layer in self._layers})

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"input id {token_id} is outside the vocabulary of {self.vocab_size}")

    def _append(self, row: int, count: int, token_ids: list[int]) -> range:
        """Move ``count`` ids from the front of ``token_ids`` to ``row``; the row's length after each of them."""
        held = self._rows[row]
        first = len(held) + 1
        held.extend(token_ids[:count])
        del token_ids[:count]
        if len(held) > self.max_model_len:
            raise ValueError(f"row {row} would hold {len(held)} tokens; max_model_len is {self.max_model_len}")
        return range(first, len(held) + 1)

    def _texts(self, row: int, ends: range, tree: Tree | None) -> list[list[int]]:
        """What each of the tokens just appended ends: the row up to it or, of a tree's node, up to the tree and on."""
        held = self._rows[row]
        if tree is None:
            return [held[:end] for end in ends]
        root = len(held) - len(tree)
        paths = [tree.path(node) for node in range(len(tree))]
        return [held[:end] for end in ends[: len(ends) - len(tree)]] + [
            held[:root] + [held[root + node] for node in path] for path in paths
        ]

    def _states(self, layer: int, texts: Sequence[tuple[int, list[int]]]) -> torch.Tensor:
        import torch

        states = [[float(text[-1]), float(len(text) - 1), float(layer)] for _, text in texts]
        return torch.tensor(states, dtype=self.dtype).reshape(len(states), 3)


class ScriptedTarget(ToyTarget):
    """Writes a script, whatever was drafted: the n-th output token is the n-th listed one (logit 10, others 0).

    After the script: the end of sequence, or the script's last token where the toy has none.
    """

    def __init__(self, script: Sequence[int], *, vocab_size: int = 16, **settings: Any) -> None:
        """``settings``: see :class:`ToyTarget`."""
        super().__init__(vocab_size=vocab_size, **settings)
        self.script = tuple(script)
        self._check_ids(self.script)

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        """10 at the scripted token, 0 elsewhere; independent of which tokens came before."""
        number = len(token_ids) - prompt_length
        after = min(self.eos_token_ids) if self.eos_token_ids else self.script[-1]
        token_id = self.script[number] if 0 <= number < len(self.script) else after
        return [SCRIPTED_LOGIT if candidate == token_id else 0.0 for candidate in range(self.vocab_size)]


class TableTarget(ToyTarget):
    """Follows a table of probabilities or of raw logits: one row for all, one per last token, or a function."""

    def __init__(self, probs: Table | None = None, *, logits: Table | None = None, **settings: Any) -> None:
        """Give ``probs`` or ``logits``. A function needs ``vocab_size``. ``settings``: see :class:`ToyTarget`."""
        if (probs is None) == (logits is None):
            raise ValueError("give either probs or logits")
        table = logits if logits is not None else check_probs(probs or ())
        if "vocab_size" not in settings:
            if callable(table):
                raise ValueError("a table that is a function needs vocab_size")
            settings["vocab_size"] = len(next(iter(table.values())) if isinstance(table, Mapping) else table)
        super().__init__(**settings)
        self._table = table
        self._is_probs = logits is None

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        """The row's logits, or the logarithms of its probabilities (-inf for 0)."""
        row = lookup(self._table, token_ids)
        return [math.log(prob) if prob > 0 else -math.inf for prob in row] if self._is_probs else row


class MarkovTarget(ToyTarget):
    """A small language model without weights: normal random logits, fixed by the seed and the last tokens.

    Greedy text falls into cycles, so that methods that look back find something, after a start that differs from
    prompt to prompt. The end of sequence is unlikely.
    """

    def __init__(
        self, *, seed: int = 0, order: int = 2, scale: float = 3.0, vocab_size: int = 16, **settings: Any
    ) -> None:
        """``order``: how many last tokens matter; ``scale``: standard deviation of the logits.

        ``settings``: see :class:`ToyTarget`.
        """
        super().__init__(vocab_size=vocab_size, **settings)
        self._seed, self._order, self._scale = seed, order, scale
        self._unlikely = self.eos_token_ids  # as made: a test may declare another end, which changes no probability
        self._cache: dict[tuple[int, ...], list[float]] = {}

    def logits_after(self, prompt_length: int, token_ids: Sequence[int]) -> Sequence[float]:
        """The same logits for the same last ``order`` tokens."""
        context = tuple(token_ids[-self._order :])
        if context not in self._cache:
            rng = random.Random(f"{self._seed} {context}")
            row = [rng.gauss(0.0, self._scale) for _ in range(self.vocab_size)]
            for token_id in self._unlikely:
                row[token_id] -= 3 * self._scale
            self._cache[context] = row
        return self._cache[context]


def _first_argmax(logits: Sequence[float]) -> int:
    return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
