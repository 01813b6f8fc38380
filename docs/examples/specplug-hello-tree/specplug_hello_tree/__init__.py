"""hello_tree: propose everything that ever followed the last tokens, as one tree."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from specplug import Batch, Capabilities, Draft, MethodSpec, PluginConfig, PluginContext, hookimpl
from specplug.proposers import Proposer

SPECPLUG_API = (1, 0)


class HelloTreeOptions(BaseModel):
    hello_tree_window: int = Field(2, ge=1, description="How many last tokens to look for.")
    hello_tree_depth: int = Field(4, ge=1, description="How many tokens to take from each place.")


class HelloTreeProposer(Proposer):
    def __init__(self, window: int, depth: int) -> None:
        self.window, self.depth = window, depth

    def propose(self, batch: Batch, limits: Sequence[int]) -> Draft:
        trees = [self.tree(ids.tolist(), limit) for ids, limit in zip(batch.token_ids, limits, strict=True)]
        return Draft.from_trees([list(tree.values()) for tree in trees], [[p for p, _ in tree] for tree in trees])

    def tree(self, ids: list[int], limit: int) -> dict[tuple[int, int], int]:
        """(parent node, token) -> token, in the order of the nodes: the most recent continuation comes first."""
        nodes: dict[tuple[int, int], int] = {}
        for end in range(len(ids) - 1, self.window - 1, -1):
            if ids[end - self.window : end] == ids[-self.window :]:
                parent = -1
                for token in ids[end : end + self.depth]:
                    if (parent, token) not in nodes and len(nodes) == limit:
                        return nodes
                    nodes.setdefault((parent, token), token)
                    parent = list(nodes).index((parent, token))
        return nodes


def make_hello_tree(config: PluginConfig, context: PluginContext) -> HelloTreeProposer:
    options = HelloTreeOptions.model_validate(config.options)
    return HelloTreeProposer(options.hello_tree_window, options.hello_tree_depth)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    spec = MethodSpec("hello_tree", "proposer", make_hello_tree, HelloTreeOptions, Capabilities(tree=True))
    return [spec]
