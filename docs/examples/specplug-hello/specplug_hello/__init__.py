"""hello: propose what followed the last tokens when they stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from specplug import MethodSpec, PluginConfig, PluginContext, TokenIds, hookimpl
from specplug.proposers import RowProposer

SPECPLUG_API = (1, 0)


class HelloOptions(BaseModel):
    hello_window: int = Field(2, ge=1, description="How many last tokens to look for.")


class HelloProposer(RowProposer):
    def __init__(self, window: int) -> None:
        self.window = window

    def propose_row(self, token_ids: TokenIds, limit: int) -> list[int]:
        ids = token_ids.tolist()
        for end in range(len(ids) - 1, self.window - 1, -1):
            if ids[end - self.window : end] == ids[-self.window :]:
                return ids[end : end + limit]
        return []


def make_hello(config: PluginConfig, context: PluginContext) -> HelloProposer:
    options = HelloOptions.model_validate(config.options)
    return HelloProposer(options.hello_window)


@hookimpl
def specplug_register() -> Sequence[MethodSpec]:
    return [MethodSpec("hello", "proposer", make_hello, HelloOptions, summary="look back for the last tokens")]
