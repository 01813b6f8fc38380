"""Structured output: a matcher per request, masks at every drafted position, drafts cut where they leave the grammar.

A matcher is fed the request's committed output only. For the draft tokens of a step it runs ahead and is rolled back,
and it is never asked for anything after it has ended. The matchers are xgrammar's (extra ``grammar``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specplug.errors import RequestError
from specplug.host.paths import DraftPath
from specplug.host.reasoning import ReasoningSection
from specplug.sampling_params import StructuredOutputsParams
from specplug.trees import Tree
from specplug.types import Dense, Draft, Indirect, cumulative

__all__ = ["Grammar", "GrammarCompiler", "apply_masks", "cut_drafts"]

_LOG_PREFIX = re.compile(r"^\[[^]]*\] \S+:\d+: ")
_ALL_ALLOWED = -1


class GrammarCompiler:
    """Compiles what requests ask for against one target's vocabulary. xgrammar loads on first use."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None

    def compile(
        self, structure: StructuredOutputsParams, end_ids: Iterable[int], reasoning: ReasoningSection | None
    ) -> Grammar:
        """A fresh matcher, for an output that one of ``end_ids`` ends.

        Raises ``RequestError`` when xgrammar, a tokenizer or an end is missing, or the grammar does not compile.
        """
        ends = sorted(end_ids)
        if not ends:
            raise RequestError(
                "structured_outputs needs a token that ends the output, and the model has no end of sequence; "
                "give stop_token_ids"
            )
        xgrammar = _xgrammar()
        compiler = self._compiler = self._compiler or self._new_compiler(xgrammar)
        try:
            compiled = _compile(compiler, structure)
        except (RuntimeError, ValueError, TypeError) as error:  # a schema may hold what JSON cannot
            cause = _LOG_PREFIX.sub("", str(error)).strip()
            raise RequestError(f"structured_outputs.{structure.kind} does not compile: {cause}") from error
        return Grammar(xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends), reasoning)

    def _new_compiler(self, xgrammar: Any) -> Any:
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and the target has none")
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise RequestError(f"structured_outputs: xgrammar cannot read the tokenizer: {error}") from error
        return xgrammar.GrammarCompiler(info)


class Grammar:
    """One request's matcher, behind its reasoning section if it has one."""

    def __init__(self, matcher: Any, reasoning: ReasoningSection | None = None) -> None:
        self._matcher = matcher
        self._reasoning = reasoning
        self._num_read = 0

    def read(self, output_ids: NDArray[np.int32]) -> str | None:
        """Feed what the committed output has grown by; returns what is wrong with it, if anything is."""
        start = 0 if self._reasoning is None else self._reasoning.num_tokens
        if start is None:
            return None
        for token_id in output_ids[start + self._num_read :].tolist():
            if self._matcher.is_terminated():
                return None
            if not self._matcher.accept_token(token_id):
                return f"structured_outputs: the verifier emitted token {token_id}, which the grammar rules out"
            self._num_read += 1
        return None

    def walk(self, draft_ids: Sequence[int], visit: Callable[[int], object] = lambda row: None) -> tuple[int, bool]:
        """Run ahead over draft tokens and come back.

        ``visit(j)`` is called where the matcher stands before token j and constrains it, j up to ``len(draft_ids)``.
        Returns how many leading tokens the grammar reads, and whether the next one is illegal (rather than past its
        end, or absent).
        """
        start = 0 if self._reasoning is None else self._reasoning.num_tokens_before_end(draft_ids)
        if start is None:
            return len(draft_ids), False
        matcher, num_fed = self._matcher, 0
        try:
            for row in range(start, len(draft_ids) + 1):
                if matcher.is_terminated():
                    return row, False
                visit(row)
                if row < len(draft_ids):
                    if draft_ids[row] < 0 or not matcher.accept_token(draft_ids[row]):
                        return row, True
                    num_fed += 1
            return len(draft_ids), False
        finally:
            if num_fed:
                matcher.rollback(num_fed)

    def fill(self, path: DraftPath, bitmask: torch.Tensor) -> list[int]:
        """Write the masks of the path's rows into ``bitmask`` ``[num_rows, words]``; returns the rows written."""
        rows: list[int] = []

        def visit(number: int) -> None:
            if number >= path.first:
                rows.append(int(path.rows[number - path.first]))
                self._matcher.fill_next_token_bitmask(bitmask, rows[-1])

        self.walk(path.draft_ids, visit)
        return rows


def cut_drafts(grammars: Sequence[Grammar | None], draft: Draft) -> Draft:
    """Cut each row's draft where it leaves its grammar or goes past the grammar's end.

    An illegal token that was drawn from a law stays, as the last one: the rule must reject it to keep the target's
    distribution. Other illegal tokens go, and so do all of a tree, with what follows them: its rule needs no law.
    """
    ids = draft.draft_token_ids.tolist()
    starts = cumulative(draft.num_draft_tokens)
    kept: list[Sequence[int] | None] = [None] * len(draft.num_draft_tokens)
    for row, (grammar, tree) in enumerate(zip(grammars, draft.trees(), strict=True)):
        row_ids = ids[starts[row] : starts[row + 1]]
        if grammar is None or not row_ids:
            continue
        if tree is not None:
            kept[row] = _legal_nodes(grammar, row_ids, tree)
        else:
            num_legal, is_illegal = grammar.walk(row_ids)
            num_kept = num_legal + int(is_illegal and _is_drawn(draft, starts[row] + num_legal))
            kept[row] = None if num_kept == len(row_ids) else range(num_kept)
    return draft.select_nodes(kept)


def _legal_nodes(grammar: Grammar, draft_ids: Sequence[int], tree: Tree) -> list[int] | None:
    """The nodes whose whole path the grammar reads, None when those are all."""
    legal: set[int] = set()
    for branch in tree.branches:
        num_legal, _ = grammar.walk([draft_ids[node] for node in branch.nodes])
        legal.update(branch.nodes[:num_legal])
    return None if len(legal) == len(tree) else sorted(legal)


def _is_drawn(draft: Draft, slot: int) -> bool:
    law = next(span.law for span in draft.laws if span.start <= slot < span.stop)
    return isinstance(law, Dense | Indirect)


def apply_masks(logits: torch.Tensor, paths: Sequence[tuple[Grammar, DraftPath]]) -> None:
    """Rule out what the grammars exclude along these paths, in place. ``logits``: ``[num_rows, vocab]`` float32."""
    xgrammar = _xgrammar()
    num_words = -(-logits.shape[1] // 32)
    bitmask = torch.full((len(logits), num_words), _ALL_ALLOWED, dtype=torch.int32)
    rows = [row for grammar, path in paths for row in grammar.fill(path, bitmask)]
    if rows:
        xgrammar.apply_token_bitmask_inplace(logits, bitmask.to(logits.device), indices=rows)


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise RequestError("structured_outputs needs xgrammar: pip install xgrammar") from error
    return xgrammar


def _compile(compiler: Any, structure: StructuredOutputsParams) -> Any:
    any_whitespace = not structure.disable_any_whitespace
    if structure.json is not None:
        schema = json.loads(structure.json) if isinstance(structure.json, str) else dict(structure.json)
        return compiler.compile_json_schema(json.dumps(schema), any_whitespace=any_whitespace)
    if structure.regex is not None:
        return compiler.compile_regex(structure.regex)
    if structure.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return compiler.compile_grammar(f"root ::= {texts}")
    if structure.grammar is not None:
        return compiler.compile_grammar(structure.grammar)
    if structure.disable_any_whitespace:
        return compiler.compile_json_schema('{"type": "object"}', any_whitespace=False)
    return compiler.compile_builtin_json_grammar()
