"""Run by vLLM's interpreter: decode prompts offline and print texts and both sides' counts as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    import vllm

    job = json.loads(sys.argv[1])
    config = job["speculative_config"]
    llm = vllm.LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=job["max_num_seqs"],
        speculative_config=config,
        additional_config=job["additional_config"],
        enforce_eager=True,
        disable_log_stats=False,
        worker_extension_cls="specplug.adapters.vllm.WorkerExtension",
    )
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True) for max_tokens in job["max_tokens"]
    ]
    outputs = llm.generate(job["prompts"], params, use_tqdm=False)
    found: dict[str, Any] = {
        "texts": [output.outputs[0].text for output in outputs],
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "server": {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()},
        "ours": llm.collective_rpc("specplug_metrics")[0] if config else {},
    }
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
