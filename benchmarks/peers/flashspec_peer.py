"""flashspec with its n-gram drafter; its cached path is batch 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol import Run, arguments, by_difference, serve, timed


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    serve(lambda: load(args))


def load(args: Any) -> tuple[dict[str, Any], Run]:
    import flashspec
    import torch
    import transformers
    from flashspec.engine import NgramDrafter, TargetModel

    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    base = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    config = flashspec.FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",
        bandit=flashspec.BanditConfig(n_arms=1),
        sampling=flashspec.SamplingConfig(temperature=0.0, gamma=args.k),
    )
    target = TargetModel(args.model, torch.device("cpu"), dtype, model=base)
    engine = flashspec.SpeculativeEngine(config, [NgramDrafter()], target)

    def run(prompts: Sequence[str], n_tokens: int) -> dict[str, Any]:
        (prompt,) = prompts
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        _, short_s = timed(lambda: engine.generate(ids, max_new_tokens=1))
        result, long_s = timed(lambda: engine.generate(ids, max_new_tokens=n_tokens))
        steps = getattr(result, "arm_steps", None)
        outputs = [result.output_ids[0].tolist()[:n_tokens]]
        return by_difference(short_s, long_s, outputs, len(steps) if steps else None)

    versions = {"flashspec": flashspec.__version__, "transformers": transformers.__version__}
    return {"name": "flashspec", "versions": versions, "config": {"k": args.k}}, run


if __name__ == "__main__":
    main()
