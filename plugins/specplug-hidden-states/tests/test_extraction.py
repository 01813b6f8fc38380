"""What is in the files: the target's own states of exactly the tokens that it read and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from specplug_hidden_states import complete_files

from specplug import LLM, RequestOutput, SamplingParams
from specplug.testing import tiny_llama

PROMPTS = [[5, 6] * 10, [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [11, 12, 13] * 5]
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
LAYERS = [0, 1, 2]


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "extract_hidden_states_path": str(folder),
        "extract_hidden_states_layers": LAYERS,
        **more,
    }


def entry(folder: Path, **more: Any) -> dict[str, Any]:
    options = config(folder, **more)
    return {"name": options.pop("method"), **options}


def generate(
    prompts: list[list[int]], params: Any = PARAMS, *, dtype: torch.dtype = torch.float32, **llm: Any
) -> list[RequestOutput]:
    model = tiny_llama().to(dtype)
    with LLM(model, strict=True, max_num_seqs=3, max_num_batched_tokens=16, **llm) as host:
        return host.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def expected(token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[tokens, layers, hidden]`` of a plain forward: the inputs of both layers, and what the final norm reads."""
    model = tiny_llama().to(dtype)
    inputs: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(_first(args, kwargs)), with_kwargs=True
        )
        for module in (*model.model.layers, model.model.norm)
    ]
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([states[0] for states in inputs], dim=1)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    first: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return first.clone()


def test_states_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    outputs = generate(PROMPTS, speculative_config=config(tmp_path))
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        data = load_file(tmp_path / f"hs_{number}.safetensors")
        read = [*prompt, *output.outputs[0].token_ids[:-1]]
        assert data["token_ids"].dtype == torch.int64
        assert data["token_ids"].tolist() == read
        assert data["hidden_states"].shape == (len(read), len(LAYERS), 32)
        torch.testing.assert_close(data["hidden_states"], expected(read), rtol=0, atol=1e-5)


def test_rejected_draft_tokens_leave_no_trace(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "ngram_backoff": False}
    outputs = generate(PROMPTS, speculative_config=ngram, plugins=[entry(tmp_path)])
    drafted = sum(output.outputs[0].spec_decode_metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.outputs[0].spec_decode_metrics.num_accepted_tokens for output in outputs)
    assert 0 < accepted < drafted, "this must accept and reject to say something"
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        data = load_file(tmp_path / f"hs_{number}.safetensors")
        # accepted tokens at the end were read too; those past the text's end were cut
        read = [*prompt, *output.outputs[0].token_ids[:-1]]
        assert data["token_ids"].tolist() == read
        torch.testing.assert_close(data["hidden_states"], expected(read), rtol=0, atol=1e-5)


def test_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    def ids(outputs: list[RequestOutput]) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in outputs]

    params = SamplingParams(temperature=0.9, seed=7, max_tokens=14)
    assert ids(generate(PROMPTS, params, speculative_config=config(tmp_path))) == ids(generate(PROMPTS, params))


def test_nothing_is_drafted_and_metrics_say_so(tmp_path: Path) -> None:
    (output,) = generate([[5, 6, 7]], speculative_config=config(tmp_path))
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics.num_draft_tokens == 0
    assert metrics.skipped == {"prefill": 1, "disabled": 13}


def test_dtype_is_the_targets(tmp_path: Path) -> None:
    (output,) = generate([[5, 6, 7]], speculative_config=config(tmp_path), dtype=torch.bfloat16)
    data = load_file(tmp_path / "hs_0.safetensors")
    assert data["hidden_states"].dtype == torch.bfloat16
    read = [5, 6, 7, *output.outputs[0].token_ids[:-1]]
    torch.testing.assert_close(data["hidden_states"], expected(read, torch.bfloat16), rtol=0.1, atol=0.1)


def test_prompt_only_for_all_or_for_one_request(tmp_path: Path) -> None:
    wants = SamplingParams(
        temperature=0, max_tokens=6, extra_args={"kv_transfer_params": {"include_output_tokens": True}}
    )
    plain = SamplingParams(temperature=0, max_tokens=6)
    prompts = [PROMPTS[0], PROMPTS[2]]
    generate(prompts, [plain, wants], speculative_config=config(tmp_path, extract_hidden_states_output=False))
    files = [load_file(tmp_path / f"hs_{number}.safetensors") for number in (0, 1)]
    assert files[0]["token_ids"].tolist() == prompts[0]
    assert len(files[1]["token_ids"]) == len(prompts[1]) + 5


def test_header_names_layers_and_prompt_length(tmp_path: Path) -> None:
    generate([[5, 6, 7]], speculative_config=config(tmp_path, extract_hidden_states_layers=[2, 0]))
    with safe_open(tmp_path / "hs_0.safetensors", framework="pt") as file:
        assert file.metadata() == {"layers": "[2, 0]", "num_prompt_tokens": "3"}
        states = file.get_tensor("hidden_states")
        token_ids = file.get_tensor("token_ids").tolist()
    torch.testing.assert_close(states, expected(token_ids)[:, [2, 0]], rtol=0, atol=1e-5)


def test_a_request_may_name_its_file(tmp_path: Path) -> None:
    named = {"kv_transfer_params": {"hidden_states_path": "hs_17.safetensors"}}
    params = SamplingParams(temperature=0, max_tokens=3, extra_args=named)
    generate([[5, 6, 7]], params, speculative_config=config(tmp_path))
    assert complete_files(tmp_path) == {"17": tmp_path / "hs_17.safetensors"}


@pytest.mark.parametrize("name", ["../out.safetensors", "/out.safetensors", "sub/hs.safetensors", "hs_1.bin", 3, ".."])
def test_a_name_stays_in_the_folder(tmp_path: Path, name: object, caplog: Any) -> None:
    folder = tmp_path / "inner"
    params = SamplingParams(
        temperature=0, max_tokens=3, extra_args={"kv_transfer_params": {"hidden_states_path": name}}
    )
    generate([[5, 6, 7]], params, speculative_config=config(folder))
    assert list(tmp_path.rglob("*.*")) == []
    assert "plain file name" in caplog.text


def test_request_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    with LLM(tiny_llama(), speculative_config=config(tmp_path / "inner"), strict=True) as llm:
        llm.add_request("../../up", {"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0, max_tokens=2))
        while llm.has_unfinished_requests():
            llm.step()
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["hs_..%2F..%2Fup.safetensors"]
