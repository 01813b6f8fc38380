"""transformers ``generate``: plain, with prompt lookup or specplug's door (batch 1). A streamer marks each step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol import Marks, Run, arguments, serve


class StepMarks:
    """A streamer that notes when tokens come; transformers gives it the prompt first."""

    def __init__(self) -> None:
        self.marks = Marks()
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
        else:
            self.marks.add(value.numel())

    def end(self) -> None:
        pass


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup, --k tokens at a time")
    parser.add_argument("--specplug", metavar="JSON", help="draft by this speculative_config, through specplug's door")
    args = parser.parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    options: dict[str, Any] = {"do_sample": False}
    if args.lookup:
        options["prompt_lookup_num_tokens"] = args.k
    if args.specplug:
        from specplug.adapters.transformers import generate

        options |= {"custom_generate": generate, "spec": json.loads(args.specplug)}

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
        streamer = StepMarks()
        options["spec_streamer" if args.specplug else "streamer"] = streamer
        ids = model.generate(**batch, max_new_tokens=n_tokens, **options)
        outputs = ids[:, batch.input_ids.shape[1] :].tolist()
        return streamer.marks.answer(outputs, streamer.marks.num_steps * len(prompts))

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    config = {"lookup": args.lookup, "k": args.k, "specplug": args.specplug}
    return {"name": "transformers", "versions": versions, "config": config}, run


if __name__ == "__main__":
    main()
