"""Bases and shared machinery for proposers, and the built-in ones.

A proposer of your own: subclass :class:`RowProposer` and write ``propose_row``. Importing this package does
not import torch.
"""

from __future__ import annotations

from specplug.proposers.backoff import BackOff, Load, PricedLoad, load_of
from specplug.proposers.base import Proposer, RowProposer, rows_to_draft
from specplug.proposers.composite import CompositeProposer
from specplug.proposers.index import CountingAutomaton, SequenceIndex, SuffixAutomaton, TokenIndex

__all__ = [
    "BackOff",
    "CompositeProposer",
    "CountingAutomaton",
    "Load",
    "PricedLoad",
    "Proposer",
    "RowProposer",
    "SequenceIndex",
    "SuffixAutomaton",
    "TokenIndex",
    "load_of",
    "rows_to_draft",
]
