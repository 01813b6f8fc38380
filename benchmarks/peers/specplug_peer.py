"""specplug's own host, plain or with any method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from protocol import Run, arguments, serve


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--speculative-config", help="JSON; absent: plain decoding")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kernels", default="auto", help="what runs the forward, as LLM(kernels=...)")
    args = parser.parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import torch

    import specplug
    from specplug.demo.measure import decode

    torch.set_num_threads(args.threads)
    config = json.loads(args.speculative_config) if args.speculative_config else None
    llm = specplug.LLM(
        args.model,
        speculative_config=config,
        dtype=args.dtype,
        kernels=args.kernels,
        max_num_seqs=8,
        max_model_len=args.max_model_len,
    )

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        params = specplug.SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
        done = decode(llm, prompts, params)
        row_steps = done.counts.num_steps - len(prompts)
        return {
            "tokens": done.num_decode_tokens,
            "seconds": done.decode_s,
            "row_steps": row_steps,
            "outputs": done.output_ids,
        }

    versions = {"specplug": specplug.__version__, "kernels": llm.kernels}
    return {"name": "specplug", "versions": versions, "config": config}, run


if __name__ == "__main__":
    main()
