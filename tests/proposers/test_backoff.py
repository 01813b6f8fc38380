from __future__ import annotations

from collections.abc import Callable, Iterable

from specplug.proposers import BackOff

HIT, MISS = 1, 2


def run(back_off: BackOff, drafts: Iterable[list[int]], next_tokens: Callable[[list[int]], list[int]]) -> list[int]:
    """One step per draft; ``next_tokens`` says what the text goes on with. Returns how much of each went out."""
    text: list[int] = [0]
    offered = []
    for draft in drafts:
        back_off.review(text)
        out = back_off.offer(draft, len(text))
        offered.append(len(out))
        text += next_tokens(out)
    return offered


def misses(out: list[int]) -> list[int]:
    return [MISS]


def hits(out: list[int]) -> list[int]:
    return [*out, HIT]


def test_stands_down_after_two_full_misses() -> None:
    back_off = BackOff(5)
    assert run(back_off, [[HIT] * 5] * 10, misses) == [5, 5, 0, 0, 0, 0, 0, 0, 0, 0]
    assert back_off.standing_down


def test_short_misses_count_by_their_length() -> None:
    assert run(BackOff(5), [[HIT]] * 12, misses) == [1] * 10 + [0, 0]


def test_patience_is_longer_after_a_good_stretch() -> None:
    back_off = BackOff(5)
    num_steps = iter(range(100))

    def hits_then_misses(out: list[int]) -> list[int]:
        return hits(out) if next(num_steps) < 20 else misses(out)

    assert run(back_off, [[HIT] * 5] * 30, hits_then_misses) == [5] * 26 + [0] * 4


def test_never_stands_down_while_one_token_in_ten_hits() -> None:
    calls = iter(range(1000))

    def one_hit_in_two_drafts(out: list[int]) -> list[int]:
        return [HIT, MISS] if next(calls) % 2 else [MISS]

    assert run(BackOff(5), [[HIT] * 5] * 100, one_hit_in_two_drafts) == [5] * 100


def after_two_misses() -> tuple[BackOff, list[int]]:
    back_off, text = BackOff(5), [0, MISS, MISS]
    run(back_off, [[HIT] * 5] * 2, misses)
    back_off.review(text)
    assert back_off.standing_down
    assert back_off.offer([HIT] * 5, len(text)) == []
    return back_off, text


def test_comes_back_as_soon_as_a_trial_pays() -> None:
    back_off, text = after_two_misses()
    text.append(HIT)
    back_off.review(text)
    assert back_off.offer([HIT], len(text)) == [HIT]


def test_after_the_weakest_trial_one_miss_stands_down_again() -> None:
    back_off, text = after_two_misses()
    text.append(HIT)
    back_off.review(text)
    assert back_off.offer([HIT] * 5, len(text)) == [HIT] * 5
    text.append(MISS)
    back_off.review(text)
    assert back_off.offer([HIT] * 5, len(text)) == []


def test_a_trial_that_misses_is_followed_by_another() -> None:
    back_off, text = after_two_misses()
    text.append(MISS)
    back_off.review(text)
    assert back_off.offer([HIT] * 5, len(text)) == []
    text.append(HIT)
    back_off.review(text)
    assert not back_off.standing_down


def test_a_trial_stays_open_while_it_matches_without_paying_yet() -> None:
    back_off = BackOff(20)
    text = [0]
    for _ in range(2):
        back_off.offer([HIT] * 20, len(text))
        text.append(MISS)
        back_off.review(text)
    assert back_off.standing_down
    back_off.offer([HIT] * 20, len(text))
    came_back = []
    for _ in range(3):
        text.append(HIT)
        back_off.review(text)
        back_off.offer([MISS], len(text))
        came_back.append(not back_off.standing_down)
    assert came_back == [False, False, True]


def test_asking_again_about_the_same_text_changes_nothing() -> None:
    back_off = BackOff(5)
    for _ in range(10):
        back_off.review([1, 2, 3])
        assert back_off.offer([HIT] * 5, 3) == [HIT] * 5


def test_equal_texts_give_equal_decisions() -> None:
    def only_single_tokens_hit(out: list[int]) -> list[int]:
        return hits(out) if len(out) == 1 else misses(out)

    drafts = [[HIT] * (step % 5 + 1) for step in range(200)]
    first, second = run(BackOff(5), drafts, only_single_tokens_hit), run(BackOff(5), drafts, only_single_tokens_hit)
    assert first == second
    assert 0 in first


def test_book_settles_like_offer_and_review() -> None:
    offered, booked = BackOff(5), BackOff(5)
    text: list[int] = [1]
    for num_accepted in (0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0):
        draft = [2] * 5
        assert offered.standing_down == booked.standing_down
        if booked.standing_down:
            break
        offered.offer(draft, len(text))
        text += [2] * num_accepted + [3]
        offered.review(text)
        booked.book(5, num_accepted)
    assert booked.standing_down
