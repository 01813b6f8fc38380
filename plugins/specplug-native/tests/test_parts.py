"""Parts of heads: linear layers, norms, arg-max, a decoder layer; and a head that drafts with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from specplug_native import kernels
from specplug_native.chain import NativeChain
from specplug_native.layer import NativeLayer
from specplug_native.library import Linear, load_library
from specplug_native.memory import LargePages
from specplug_native.weights import PackedLinear

from specplug import LLM, SamplingParams
from specplug.models.cache import RaggedCache
from specplug.proposers.heads.layers import DecoderLayer, Shape, root_mean_square_norm, rotary_table
from specplug.proposers.heads.reader import HeadReader
from specplug.testing.architectures import VOCAB_SIZE, tiny_model
from specplug.types import Batch, Draft

pytestmark = pytest.mark.skipif(load_library() is None, reason="this processor has no AVX-512 with bfloat16")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).bfloat16()


@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 25])
@pytest.mark.parametrize(
    ("num_in", "num_out", "has_bias"), [(2, 1, False), (66, 31, True), (130, 97, False), (64, 64, True)]
)
def test_linear(num_rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    weight, states = random(num_out, num_in), random(num_rows, num_in, seed=1)
    bias = random(num_out, seed=2) if has_bias else None
    linear = kernels.linear(weight, bias)
    assert linear is not None
    exact = torch.nn.functional.linear(states.double(), weight.double(), None if bias is None else bias.double())
    assert (linear(states).double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    assert torch.equal(linear(states[None])[0], linear(states))
    assert torch.equal(linear(states), torch.cat([linear(row[None]) for row in states]))


def test_products_one_after_the_other_end_with_the_last() -> None:
    first, last, states = random(97, 130), random(31, 66), random(3, 66, seed=1)
    packed = [PackedLinear(weight, None, LargePages(weight.nbytes)) for weight in (first, last)]
    linears = (Linear * 2)(*(each.struct for each in packed))
    rows, outputs = torch.tensor([1, 3]), torch.empty(3, 31, dtype=torch.bfloat16)
    room = torch.zeros(97, dtype=torch.bfloat16)
    library = load_library()
    assert library is not None
    padded = torch.cat((states.reshape(-1), room))  # inputs of both, the wider is the first's
    target = torch.cat((outputs.reshape(-1), room))
    library.products(linears, rows.data_ptr(), 2, torch.get_num_threads(), padded.data_ptr(), target.data_ptr())
    linear = kernels.linear(last, None)
    assert linear is not None
    assert torch.equal(target[: 3 * 31].view(3, 31), linear(states))


def test_a_wrong_product_would_be_noticed() -> None:
    weight, states = random(97, 130), random(5, 130, seed=1)
    linear = kernels.linear(weight.roll(1, 1), None)
    assert linear is not None
    exact = states.double() @ weight.double().T
    assert (linear(states).double() - exact).abs().max() > 2**-4 * exact.abs().max()


def test_norm() -> None:
    weight, states = random(96), 3 * random(5, 7, 96, seed=1)
    norm = kernels.norm(weight, 1e-5)
    assert norm is not None
    exact = root_mean_square_norm(weight.double(), 1e-5)(states.double())
    assert (norm(states).double() - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 97, 4099])
def test_likeliest(vocab_size: int) -> None:
    logits = 4 * random(9, vocab_size)
    logits[1] = 0  # the first of equals
    logits[2, 1:] = -torch.inf
    logits[3] = logits[3].roll(vocab_size // 2)
    logits[4] -= 1000
    found = kernels.likeliest(logits)
    assert found is not None
    ids, probs = found
    expected = torch.softmax(logits.double(), -1).amax(-1)
    assert [row.index(max(row)) for row in logits.tolist()] == ids.tolist()
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 33, 97])
def test_likeliest_of_what_is_not_a_number(vocab_size: int) -> None:
    logits = random(4, vocab_size)
    logits[0] = torch.nan
    logits[1, vocab_size // 2 :] = torch.nan
    logits[2] = torch.inf
    found = kernels.likeliest(logits)
    assert found is not None
    ids, probs = found
    numbers = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    assert [row.index(max(row)) for row in numbers.tolist()] == ids.tolist()
    assert probs.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 64, dtype=dtype)
    assert kernels.linear(weight, None) is None
    assert kernels.norm(weight[0], 1e-5) is None
    assert kernels.likeliest(weight) is None


@pytest.mark.parametrize("normalises_heads", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("input_size", [128, 256])
def test_a_layer_is_as_near_to_exact_as_torchs(normalises_heads: bool, input_size: int) -> None:
    shape = Shape(128, input_size, 224, 4, 2, 32, 1e-5, attention_bias=True, normalises_heads=normalises_heads)
    torch.manual_seed(0)
    layer = DecoderLayer(shape, normalises_input=False).bfloat16().requires_grad_(False)
    residual, states = random(70, 128), random(70, input_size, seed=1)
    exact = run(layer.double(), shape, residual.double(), states.double())
    layer = layer.bfloat16()
    theirs = run(layer, shape, residual, states)
    ours = run(layer, shape, residual, states, is_compiled=True)
    errors = [float((each.double() - exact).norm() / exact.norm()) for each in (ours, theirs)]
    assert errors[0] < max(1.3 * errors[1], 0.004)
    assert errors[1] < 0.02


def test_a_gate_far_below_zero_is_shut() -> None:
    shape = Shape(128, 128, 224, 4, 2, 32, 1e-5, mlp_bias=True)
    torch.manual_seed(0)
    layer = DecoderLayer(shape, normalises_input=False).bfloat16().requires_grad_(False)
    layer.mlp.gate_up.bias[:224] = -3e38
    residual, states = random(70, 128), random(70, 128, seed=1)
    exact = run(layer.double(), shape, residual.double(), states.double())
    ours = run(layer.bfloat16(), shape, residual, states, is_compiled=True)
    assert (ours.double() - exact).norm() < 0.004 * exact.norm()


@pytest.mark.parametrize("states", [torch.zeros(3, 128), torch.zeros(3, 64).bfloat16()], ids=["float32", "narrow"])
def test_states_of_another_kind_are_refused(states: torch.Tensor) -> None:
    linear, norm = kernels.linear(random(64, 128), None), kernels.norm(random(128), 1e-5)
    for part in (linear, norm):
        assert part is not None
        with pytest.raises(ValueError, match=r"the native kernels read bfloat16 \[\.\.\., 128\], not"):
            part(states)


def test_heads_that_are_turned_in_part_are_left_to_torch() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    config = tiny_model("llama", head_dim=32, hidden_size=128).config
    config.rope_parameters = rope
    rotary = rotary_table(config, 64, dtype=torch.bfloat16, device=torch.device("cpu"))
    layer = DecoderLayer(Shape(128, 128, 224, 4, 2, 32, 1e-5)).bfloat16().requires_grad_(False)
    assert layer.compiled(kernels, rotary) is None


def run(
    layer: DecoderLayer, shape: Shape, residual: torch.Tensor, states: torch.Tensor, *, is_compiled: bool = False
) -> torch.Tensor:
    """Two rows of 40 and 30 tokens: 33 and 30 of them, then the rest with one more row of nothing."""
    config = tiny_model("llama", head_dim=shape.head_dim, hidden_size=128).config
    rotary = rotary_table(config, 64, dtype=residual.dtype, device=torch.device("cpu"))
    compiled = layer.compiled(kernels, rotary) if is_compiled else None
    assert isinstance(compiled, NativeLayer) is is_compiled
    layer.bind(rotary, kernels if is_compiled else None, compiled)
    cache = RaggedCache([None], max_num_seqs=3, max_model_len=64, max_query_tokens=64, device=torch.device("cpu"))
    for _ in range(3):
        cache.acquire()
    parts = []
    for counts, tokens in (([33, 30, 0], [*range(33), *range(40, 70)]), ([7, 0, 0], [*range(33, 40)])):
        step = cache.begin(counts)
        parts.append(layer.finish(residual[tokens], states[tokens], step, cache.ragged_layers[0]))
        cache.finish(counts)
    first, rest = parts
    return torch.cat((first[:33], rest, first[33:]))


def test_a_layer_refuses_positions_beyond_its_table() -> None:
    shape = Shape(128, 128, 224, 4, 2, 32, 1e-5)
    layer = DecoderLayer(shape).bfloat16().requires_grad_(False)
    with pytest.raises(IndexError, match="beyond the rotary table"):
        config = tiny_model("llama", head_dim=32, hidden_size=128).config
        rotary = rotary_table(config, 8, dtype=torch.bfloat16, device=torch.device("cpu"))
        layer.bind(rotary, kernels, layer.compiled(kernels, rotary))
        cache = RaggedCache([None], max_num_seqs=1, max_model_len=64, max_query_tokens=64, device=torch.device("cpu"))
        cache.acquire()
        layer.step(random(9, 128), cache.begin([9]), cache.ragged_layers[0])


@pytest.fixture
def eagle3(tmp_path: Path) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Folder of a target, and the configuration of a head for it; with keys of the head's config."""
    testing = pytest.importorskip("specplug_eagle.testing")

    def make(draft_ids: tuple[int, ...] | None = None, **keys: Any) -> tuple[str, dict[str, Any]]:
        sizes = {"hidden_size": 128, "intermediate_size": 224, "head_dim": 32, "vocab_size": VOCAB_SIZE}
        tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "target")
        body = {**testing.LLAMA, **sizes, "max_position_embeddings": 256}
        norms = {name: keys.get(name, False) for name in ("norm_before_fc", "fc_norm")}
        tensors = testing.eagle3_tensors(body, target_hidden_size=128, draft_ids=draft_ids, **norms)
        if draft_ids is not None:
            keys["draft_vocab_size"] = len(draft_ids)
        head = testing.write_head(tmp_path / "head", testing.speculators_config(body=body, **keys), tensors)
        return str(tmp_path / "target"), {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}

    return make


def generate(target: str, config: dict[str, Any] | None, temperature: float = 0.0) -> tuple[list[list[int]], Any]:
    """Texts of three requests, the first of which ends early, and each step's drafts."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=1) for length in (8, 24, 24)
    ]
    prompts = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (9, 40, 2)]
    drafts = []
    with LLM(target, skip_tokenizer_init=True, strict=True, kernels="native", speculative_config=config) as llm:
        if config is not None:
            proposer: Any = llm._session.hooks.instance(config["method"])
            propose = proposer.propose

            def keep(*arguments: Any) -> Any:
                drafts.append(propose(*arguments))
                return drafts[-1]

            proposer.propose = keep
        texts = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    return texts, [
        (draft.draft_token_ids.tolist(), draft.confidence.tolist()) for draft in drafts if len(draft.draft_token_ids)
    ]


@pytest.mark.parametrize("options", [{}, {"eagle_tree_width": 2, "eagle_tree_depth": 3}], ids=["chain", "tree"])
def test_an_eagle3_head_drafts_with_them(eagle3: Callable[..., Any], options: dict[str, Any]) -> None:
    target, config = eagle3()
    plain, _ = generate(target, None)
    texts, drafts = generate(target, config | options)
    assert drafts
    assert options or texts == plain


@pytest.mark.parametrize("draft_ids", [tuple(range(1, VOCAB_SIZE, 3)), None], ids=["a part", "all"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"norm_before_residual": True}, {"norm_output": True}, {"norm_before_fc": True}, {"fc_norm": True}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_in_one_call_is_that_token_by_token(
    eagle3: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    temperature: float,
    draft_ids: tuple[int, ...] | None,
) -> None:
    target, config = eagle3(draft_ids=draft_ids, **keys)
    num_read = []
    call = NativeChain.__call__

    def count(self: NativeChain, token_ids: list[int], *arguments: Any) -> None:
        call(self, token_ids, *arguments)
        num_read.append(tuple(arguments[1]))

    monkeypatch.setattr(NativeChain, "__call__", count)
    texts, drafts = generate(target, config, temperature)
    assert {(1, 1, 1)} < set(num_read)  # and other numbers of tokens
    monkeypatch.setattr(HeadReader, "read_chain", lambda self, *more: False)
    assert generate(target, config, temperature) == (texts, drafts)
    assert generate(target, None, temperature)[0] == texts


def test_a_text_that_is_full_stops_no_others_draft(eagle3: Callable[..., Any]) -> None:
    target, config = eagle3(draft_ids=tuple(range(1, VOCAB_SIZE, 3)))
    prompts = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (18, 3, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    texts, num_drafted = [], []
    for speculative in (None, config | {"num_speculative_tokens": 8}):
        settings = {"skip_tokenizer_init": True, "strict": True, "max_model_len": 24}
        with LLM(target, speculative_config=speculative, **settings) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            num_drafted.append(llm.acceptance.aggregate().num_draft_tokens)
    assert [len(text) for text in texts[0]] == [6, 21, 15]
    assert texts[0] == texts[1]
    assert num_drafted[1] > 20


def test_drafts_stand_in_the_order_of_the_batch(eagle3: Callable[..., Any]) -> None:
    target, config = eagle3(draft_ids=tuple(range(1, VOCAB_SIZE, 3)))
    with LLM(target, skip_tokenizer_init=True, strict=True, speculative_config=config) as llm:
        proposer: Any = llm._session.hooks.instance("eagle3")
        propose = proposer.propose
        num_compared = []

        def both_ways(batch: Batch, limits: Sequence[int]) -> Draft:
            draft: Draft = propose(batch, limits)
            turn = [*reversed(range(len(batch)))]
            turned: Draft = propose(batch.select(turn), [limits[row] for row in turn])
            back = turned.select_rows(turn)
            assert back.draft_token_ids.tolist() == draft.draft_token_ids.tolist()
            assert back.confidence is not None and draft.confidence is not None
            assert back.confidence.tolist() == draft.confidence.tolist()
            num_compared.append(len(batch))
            return draft

        proposer.propose = both_ways
        prompts = [{"prompt_token_ids": [*range(3, 3 + length)]} for length in (9, 40, 2)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert max(num_compared) == 3


class Drafting:
    """A head's chain on a cache of two rows."""

    def __init__(self, target: str, config: dict[str, Any]) -> None:
        self._llm = LLM(target, skip_tokenizer_init=True, speculative_config=config)
        self._chain = cast(Any, self._llm._session.hooks.instance("eagle3")).head.chain

    def __call__(self, token_ids: list[int], num_read: list[int], num_tokens: int = 4, num_states: int = 0) -> Any:
        device = torch.device("cpu")
        cache = RaggedCache([None], max_num_seqs=2, max_model_len=64, max_query_tokens=16, device=device)
        for _ in num_read:
            cache.acquire()
        step = cache.begin([num and num + num_tokens - 1 for num in num_read])
        states = random(num_states or len(token_ids), 3 * 128)
        ids = torch.zeros(sum(map(bool, num_read)) * num_tokens, dtype=torch.int64)
        probs = torch.zeros(len(ids), dtype=torch.float32)
        self._chain(token_ids, states, num_read, num_tokens, step, cache.ragged_layers[0], ids, probs)
        return ids.view(-1, num_tokens), probs.view(-1, num_tokens)


@pytest.fixture
def drafting(eagle3: Callable[..., Any]) -> Drafting:
    return Drafting(*eagle3(draft_ids=tuple(range(1, VOCAB_SIZE, 3))))


def test_rows_draft_what_they_draft_alone(drafting: Drafting) -> None:
    together = drafting([5, 6, 7, 8], [4, 0])
    assert all(part.shape == (1, 4) for part in together)
    longer = drafting([5, 6, 7, 8], [4, 0], num_tokens=7)
    assert all(torch.equal(some, more[:, :4]) for some, more in zip(together, longer, strict=True))
    ids, probs = drafting([5, 6, 7, 8], [3, 1])
    alone_ids, alone_probs = drafting([5, 6, 7], [3, 0])
    assert torch.equal(ids[:1], alone_ids)
    assert torch.equal(probs[:1], alone_probs)


@pytest.mark.parametrize(
    ("token_ids", "num_read", "num_states", "error", "match"),
    [
        ([VOCAB_SIZE], [1], 0, IndexError, "an id beyond the table"),
        ([-1], [1], 0, IndexError, "an id beyond the table"),
        ([3, 4], [1], 0, ValueError, "2 ids and 2 states for 1 tokens"),
        ([3, 4], [2], 3, ValueError, "2 ids and 3 states for 2 tokens"),
    ],
)
def test_a_draft_refuses(
    drafting: Drafting,
    token_ids: list[int],
    num_read: list[int],
    num_states: int,
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        drafting(token_ids, num_read, num_states=num_states)


@pytest.mark.parametrize(
    ("method", "package", "keys"),
    [
        ("mlp_speculator", "specplug_mlp", {"emb_dim": 128, "inner_dim": 64, "vocab_size": VOCAB_SIZE}),
        ("medusa", "specplug_medusa", {"hidden_size": 128, "vocab_size": VOCAB_SIZE}),
    ],
)
def test_heads_on_the_last_state_draft_with_them(
    tmp_path: Path, method: str, package: str, keys: dict[str, Any]
) -> None:
    sample = pytest.importorskip(f"{package}.sample")
    sizes = {"hidden_size": 128, "intermediate_size": 224, "head_dim": 32}
    tiny_model("llama", **sizes).to(torch.bfloat16).save_pretrained(tmp_path / "target")
    head = sample.write_sample(tmp_path / "head", **keys)
    config = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    plain, _ = generate(str(tmp_path / "target"), None)
    texts, drafts = generate(str(tmp_path / "target"), config)
    assert texts == plain
    assert drafts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_draft_does_not_depend_on_the_default_dtype(drafting: Drafting, dtype: torch.dtype) -> None:
    drafted = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            drafted.append(drafting([5], [1]))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, *drafted))
