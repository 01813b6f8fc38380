from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from specplug.methods import NoOptions, PluginConfig, PluginContext
from specplug.metrics import AcceptanceMetrics, Counter, Vector, acceptance_line, merge, stats_lines
from specplug.metrics.acceptance import specplug_register
from specplug.sampling_params import SamplingParams
from specplug.types import Request, RequestStep, Session, SourceCount, StepOutcome, TokenIds


def request(request_id: str) -> Request:
    return Request(request_id, TokenIds(np.array([1], dtype=np.int32)), SamplingParams(), seed=0)


def row(
    request_id: str,
    drafted: int,
    accepted: int,
    *,
    emitted: int | None = None,
    verified: int | None = None,
    skip: str | None = None,
    sources: tuple[SourceCount, ...] = (),
) -> RequestStep:
    return RequestStep(
        request_id=request_id,
        num_draft_tokens=drafted,
        num_verified_accepted_tokens=accepted if verified is None else verified,
        num_accepted_tokens=accepted,
        num_emitted_tokens=accepted + 1 if emitted is None else emitted,
        sources=sources,
        skip_reason=skip,
    )


def observe(steps: Sequence[Sequence[RequestStep]], *, k: int) -> AcceptanceMetrics:
    metrics = AcceptanceMetrics(k)
    ids = dict.fromkeys(part.request_id for rows in steps for part in rows)
    for request_id in ids:
        metrics.specplug_start_request(request(request_id))
    for number, rows in enumerate(steps):
        metrics.specplug_accept_metrics(StepOutcome(number, tuple(rows)))
    return metrics


def test_B106_nothing_drafted_has_no_rate() -> None:
    metrics = observe([[row("a", 0, 0, skip="no_proposal")]] * 5, k=3)
    counts = metrics.aggregate()
    assert counts.draft_acceptance_rate is None
    assert counts.verified_draft_acceptance_rate is None
    assert counts.acceptance_rate_per_pos is None
    assert (counts.num_draft_tokens, counts.num_steps, counts.mean_acceptance_length) == (0, 5, 1.0)
    assert counts.tokens_per_step == 1.0
    assert counts.skipped == {"no_proposal": 5}
    one = metrics.request_metrics("a")
    assert one is not None
    for reported in (counts, one):
        text = json.dumps(reported.as_dict(), allow_nan=False)
        assert json.loads(text)["draft_acceptance_rate"] is None


def test_B106_before_the_first_step() -> None:
    counts = AcceptanceMetrics(3).aggregate()
    assert (counts.mean_acceptance_length, counts.draft_acceptance_rate, counts.tokens_per_step) == (1.0, None, None)
    json.dumps(counts.as_dict(), allow_nan=False)


def test_B107_the_bonus_token_is_not_an_accepted_token() -> None:
    counts = observe([[row("a", 1, 1)]] * 10, k=1).aggregate()
    assert counts.draft_acceptance_rate == 1.0
    assert counts.mean_acceptance_length == 2.0


def test_B108_the_denominator_is_what_was_drafted() -> None:
    counts = observe([[row("a", 3, 2)], [row("a", 1, 1)]], k=3).aggregate()
    assert counts.draft_acceptance_rate == 3 / 4


def test_B109_a_stop_inside_the_accepted_prefix() -> None:
    counts = observe([[row("a", 6, 2, emitted=2, verified=6)]], k=6).aggregate()
    assert (counts.num_emitted_tokens, counts.num_accepted_tokens) == (2, 2)
    assert counts.mean_acceptance_length == 2.0
    assert counts.draft_acceptance_rate == 2 / 6
    assert counts.num_verified_accepted_tokens == 6
    assert counts.verified_mean_acceptance_length == 7.0
    assert counts.verified_draft_acceptance_rate == 1.0
    assert counts.num_accepted_tokens_per_pos == [1, 1, 0, 0, 0, 0]
    assert counts.num_verified_accepted_tokens_per_pos == [1] * 6


def test_B111_per_request_fields_agree_with_each_other() -> None:
    accepts = [0] * 4 + [1] * 3 + [2] * 2 + [3]
    metrics = observe([[row("a", 3, accepted)] for accepted in accepts], k=3)
    counts = metrics.request_metrics("a")
    assert counts is not None
    assert counts.histogram == (4, 3, 2, 1)
    assert (counts.num_drafts, counts.num_accepted_tokens, counts.num_draft_tokens) == (10, 10, 30)
    assert counts.draft_acceptance_rate == pytest.approx(1 / 3)
    assert counts.mean_acceptance_length == 2.0
    assert sum(j * count for j, count in enumerate(counts.histogram)) == counts.num_accepted_tokens
    assert sum(counts.histogram) == counts.num_drafts
    assert counts.per_step_accepted == accepts
    assert counts.per_step_drafted == [3] * 10


def test_B111_requests_sum_to_the_global_counters() -> None:
    steps = [[row("a", 3, 3), row("b", 2, 0)], [row("a", 0, 0, skip="limit"), row("b", 3, 1)], [row("b", 1, 1)]]
    metrics = observe(steps, k=3)
    parts = [metrics.request_metrics(name) for name in ("a", "b")]
    counts = metrics.aggregate()
    for name in (
        "num_steps",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_emitted_tokens",
        "num_draft_emitted_tokens",
        "num_verified_accepted_tokens",
    ):
        assert sum(getattr(part, name) for part in parts) == getattr(counts, name)
    assert counts.num_accepted_tokens_per_pos == [3, 1, 1]


def test_B112_metrics_equal_the_step_log_and_are_absent_without_a_record() -> None:
    metrics = observe([[row("a", 4, 3)], [row("a", 4, 1)]], k=4)
    counts = metrics.request_metrics("a")
    assert counts is not None
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (2, 8, 4)
    assert metrics.request_metrics("never started") is None


def test_B113_the_names_carry_the_definition() -> None:
    counts = observe([[row("a", 3, 1)], [row("a", 0, 0)]], k=3).aggregate()
    assert counts.mean_acceptance_length == 2.0  # per draft, bonus included
    assert counts.draft_acceptance_rate == 1 / 3  # per drafted token, bonus left out
    assert counts.tokens_per_step == 1.5  # over all steps
    assert acceptance_line(counts) == "length 2.00 (incl. bonus), rate 33 % of drafted, K=3"


def test_B115_an_id_that_comes_again_starts_at_zero() -> None:
    metrics = observe([[row("a", 2, 2)], [row("a", 2, 0)]], k=2)
    metrics.specplug_finish_request(request("a"))
    assert metrics.request_metrics("a") is None
    metrics.specplug_start_request(request("a"))
    again = metrics.request_metrics("a")
    assert again is not None
    assert (again.num_steps, again.num_drafts) == (0, 0)
    metrics.specplug_accept_metrics(StepOutcome(2, (row("a", 1, 1),)))
    counts = metrics.aggregate()
    assert (counts.num_requests, counts.num_drafts, counts.num_draft_tokens) == (2, 3, 5)


def test_no_request_state_is_left_after_finish() -> None:
    metrics = observe([[row(name, 2, 1) for name in "abc"]], k=2)
    for name in "abc":
        metrics.specplug_finish_request(request(name))
    assert metrics._requests == {}


# vLLM's scheduler tests restated: (drafted, accepted) per row of one step -> counts and per-position counts.
VLLM_STEPS = [
    ([(3, 3)], (1, 3, 3), [1, 1, 1], [(0, 0, 0, 1)]),
    ([(3, 1)], (1, 3, 1), [1, 0, 0], [(0, 1, 0, 0)]),
    ([(2, 2), (1, 1)], (2, 3, 3), [2, 1], [(0, 0, 1), (0, 1, 0)]),
    ([(1, 1)], (1, 1, 1), [1], [(0, 1)]),
    ([(0, 0)], (0, 0, 0), [0], [(0, 0)]),
    ([(3, 2), (3, 1)], (2, 6, 3), [2, 1, 0], [(0, 0, 1, 0), (0, 1, 0, 0)]),
]


@pytest.mark.parametrize(("rows", "totals", "per_pos", "histograms"), VLLM_STEPS)
def test_vllm_scheduler_table(
    rows: list[tuple[int, int]],
    totals: tuple[int, int, int],
    per_pos: list[int],
    histograms: list[tuple[int, ...]],
) -> None:
    step = [row(str(number), drafted, accepted) for number, (drafted, accepted) in enumerate(rows)]
    metrics = observe([step], k=max(1, *(drafted for drafted, _ in rows)))
    names = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"]
    found = {metric.name: metric for metric in metrics.metrics()}
    for name, expected in zip(names, totals, strict=True):
        counter = found[f"vllm:spec_decode_{name}"]
        assert isinstance(counter, Counter)
        assert counter.value == expected
    vector = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(vector, Vector)
    assert vector.values == per_pos
    for number, histogram in enumerate(histograms):
        one = metrics.request_metrics(str(number))
        assert one is not None
        assert one.histogram == histogram


def test_vllm_request_acceptance_data() -> None:
    accepts = [0, 3, 2, 3, 1]
    counts = observe([[row("a", 3, accepted)] for accepted in accepts], k=3).request_metrics("a")
    assert counts is not None
    assert counts.histogram == (1, 1, 1, 2)
    assert counts.mean_acceptance_length == 1 + 9 / 5
    assert counts.draft_acceptance_rate == 9 / 15
    assert counts.as_dict()["acceptance_histogram"] == [1, 1, 1, 2]


def test_vllm_detailed_fields() -> None:
    counts = observe([[row("a", 3, accepted)] for accepted in (3, 1, 0)], k=3).request_metrics("a")
    assert counts is not None
    assert counts.per_step_accepted == [3, 1, 0]
    assert counts.per_step_drafted == [3, 3, 3]
    assert counts.num_spec_tokens == 3


@pytest.mark.parametrize(("kept", "accepted"), [(1, 1), (2, 2)])
def test_vllm_stops_inside_accepted_tokens(kept: int, accepted: int) -> None:
    counts = observe([[row("a", 2, accepted, emitted=kept, verified=2)]], k=2).aggregate()
    assert counts.num_emitted_tokens == kept
    assert counts.num_accepted_tokens == accepted
    assert counts.num_verified_accepted_tokens == 2


def test_sources_are_attributed() -> None:
    first = (SourceCount("ngram", 2, 2, 2), SourceCount("suffix", 2, 1, 1))
    second = (SourceCount("ngram", 1, 0, 1),)
    metrics = observe([[row("a", 4, 3, sources=first)], [row("b", 1, 0, verified=1, sources=second)]], k=4)
    sources = metrics.aggregate().sources
    assert (sources["ngram"].num_draft_tokens, sources["ngram"].num_accepted_tokens) == (3, 2)
    assert sources["ngram"].num_verified_accepted_tokens == 3
    assert sources["suffix"].num_accepted_tokens == 1
    labelled = {(metric.name, metric.labels.get("source")) for metric in metrics.metrics()}
    assert ("specplug:source_num_draft_tokens", "suffix") in labelled


def test_requests_merge_to_the_aggregate() -> None:
    source = (SourceCount("ngram", 3, 2, 3),)
    steps = [[row("a", 3, 2, verified=3, sources=source), row("b", 0, 0, skip="limit")], [row("b", 2, 0)]]
    metrics = observe(steps, k=3)
    parts = [metrics.request_metrics(name) for name in "ab"]
    merged = merge(part for part in parts if part is not None)
    aggregate = metrics.aggregate()
    for name, value in merged.as_dict().items():
        assert value == aggregate.as_dict()[name]
    assert merge([]).as_dict()["draft_acceptance_rate"] is None


def test_times_faults_and_methods_add_up() -> None:
    metrics = AcceptanceMetrics(2)
    for number in range(2):
        metrics.specplug_accept_metrics(
            StepOutcome(
                number,
                (row("a", 2, 1),),
                num_prefill_tokens=7,
                verify_method="greedy",
                propose_s=0.5,
                forward_s=1.0,
                verify_s=0.25,
                host_s=0.125,
                faults={"propose_raised:x": 1},
            )
        )
    metrics.specplug_accept_metrics(StepOutcome(2, (), num_prefill_tokens=1, verify_method="greedy"))
    counts = metrics.aggregate()
    assert (counts.propose_s, counts.forward_s, counts.verify_s, counts.host_s) == (1.0, 2.0, 0.5, 0.25)
    assert counts.faults == {"propose_raised:x": 2}
    assert counts.num_prefill_tokens == 15
    assert counts.num_batch_steps == 3
    assert counts.verify_method_effective == {"greedy": 2}


def test_a_report_does_not_change_later() -> None:
    metrics = observe([[row("a", 2, 1)]], k=2)
    before, one = metrics.aggregate(), metrics.request_metrics("a")
    assert one is not None
    metrics.specplug_accept_metrics(StepOutcome(1, (row("a", 2, 2),)))
    assert (before.histogram, one.per_step_accepted) == ((0, 1, 0), [1])


def test_a_new_session_starts_at_zero_with_its_own_k() -> None:
    metrics = observe([[row("a", 2, 1)]], k=2)
    metrics.specplug_start_session(Session(vocab_size=8, max_num_seqs=1, max_model_len=8, num_speculative_tokens=5))
    counts = metrics.aggregate()
    assert (counts.num_spec_tokens, counts.num_drafts, len(counts.histogram)) == (5, 0, 6)


def test_registration_builds_the_observer_with_the_sessions_k() -> None:
    (spec,) = specplug_register()
    assert (spec.name, spec.kind) == ("acceptance", "observer")
    session = Session(vocab_size=8, max_num_seqs=1, max_model_len=8, num_speculative_tokens=4)
    context = PluginContext(session, None, lambda _name, _options: None, lambda _draft: None)
    built = spec.factory(PluginConfig("acceptance", 4, NoOptions()), context)
    assert isinstance(built, AcceptanceMetrics)
    assert built.aggregate().num_spec_tokens == 4


def test_stats_lines_say_what_happened() -> None:
    metrics = observe([[row("a", 3, 2)], [row("a", 3, 1, verified=3)], [row("a", 0, 0, skip="no_proposal")]], k=3)
    text = "\n".join(stats_lines(metrics.aggregate(), 2.0))
    assert "3.0 tokens/s (6 tokens in 2.00 s with prefill)" in text
    assert "length 2.50 (incl. bonus), rate 50 % of drafted, K=3" in text
    assert "1: 100 %  2: 50 %  3 on: 0 %" in text
    assert "2.00 tokens over all 3 steps" in text
    assert "2 accepted tokens discarded by a stop or length limit" in text
    assert "no_proposal 1" in text
    assert "warning" not in text


def test_stats_of_plain_decoding_speak_of_no_draft() -> None:
    text = "\n".join(stats_lines(observe([[row("a", 0, 0)]], k=0).aggregate(), 1.0))
    assert "acceptance" not in text
    assert "per position" not in text


def test_many_drafts_without_acceptance_are_warned_about() -> None:
    text = "\n".join(stats_lines(observe([[row("a", 4, 0)]] * 50, k=4).aggregate(), 1.0))
    assert "200 tokens drafted, none accepted" in text


def calls_per_step(k: int, batch: int) -> int:
    rows = tuple(row(str(number), k, k, sources=(SourceCount("ngram", k, k, k),)) for number in range(batch))
    metrics = observe([rows], k=k)
    calls = 0

    def count(_frame: object, _event: str, _argument: object) -> None:
        nonlocal calls
        calls += 1

    outcome = StepOutcome(1, rows, propose_s=0.1)
    sys.setprofile(count)
    try:
        metrics.specplug_accept_metrics(outcome)
    finally:
        sys.setprofile(None)
    return calls


def test_nothing_of_the_size_of_k_is_kept_per_request() -> None:
    metrics = observe([[row("a", 3, 2)]], k=2**15)
    assert len(metrics._requests["a"].histogram) == 3
    found = metrics.request_metrics("a")
    assert found is not None
    assert (found.num_spec_tokens, len(found.histogram), found.histogram[:4]) == (2**15, 2**15 + 1, (0, 0, 1, 0))


def test_a_step_costs_per_request_and_never_per_token() -> None:
    assert calls_per_step(k=2, batch=8) == calls_per_step(k=64, batch=8)
    assert calls_per_step(k=2, batch=8) - calls_per_step(k=2, batch=4) <= 4 * 20
