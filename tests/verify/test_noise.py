"""Counter-based noise: known answers, one definition in numpy and torch, separate streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specplug.verify import noise
from specplug.verify.noise import Purpose

FULL = 2**32 - 1


@pytest.mark.parametrize(
    ("seed", "counter", "words"),
    [
        (0, (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, (FULL, FULL, FULL, FULL), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_the_published_generator(seed: int, counter: tuple[int, ...], words: str) -> None:
    index, position, step, purpose = counter
    found = noise.philox(seed, purpose, step, position, index)
    assert [f"{int(word):08x}" for word in found] == words.split()


def test_torch_draws_the_same_noise() -> None:
    seed, position, vocab_size = 2**63 + 12345, 77, 1003
    words = noise.philox(seed, Purpose.COUPLED, 0, position, np.arange(-(-vocab_size // 4))).reshape(-1)[:vocab_size]
    expected = -np.log(noise.exponentials(words))
    assert np.allclose(noise.gumbel(seed, position, vocab_size).numpy(), expected, rtol=1e-14, atol=0)
    draft = noise.gumbel(seed, position, vocab_size, purpose=Purpose.DRAFT, step=3)
    assert not torch.equal(draft, noise.gumbel(seed, position, vocab_size, purpose=Purpose.DRAFT, step=4))


def test_arguments_broadcast_to_one_call() -> None:
    seeds, positions = np.array([[1], [2**64 - 1]], dtype=np.uint64), np.arange(3)
    words = noise.philox(seeds, Purpose.TARGET, 0, positions, 0)
    assert words.shape == (2, 3, 4)
    assert (words[1, 2] == noise.philox(2**64 - 1, Purpose.TARGET, 0, 2, 0)).all()


def test_streams_are_kept_apart_by_every_part_of_the_key() -> None:
    base = {"seed": 5, "purpose": Purpose.ACCEPT, "step": 1, "position": 9, "index": 0}
    changes = [
        {},
        {"seed": 6},
        {"seed": 5 + 2**32},
        {"purpose": Purpose.RECOVER},
        {"step": 2},
        {"position": 10},
        {"index": 1},
    ]
    drawn = {tuple(noise.philox(**{**base, **change}).tolist()) for change in changes}
    assert len(drawn) == len(changes)


def test_uniforms_and_exponentials_stay_inside_their_range() -> None:
    extremes = np.array([[0, 0, 0, 0], [FULL, FULL, 0, 0]], dtype=np.uint64)
    low, high = noise.uniforms(extremes)
    assert 0.0 < low < high < 1.0
    tickets = noise.exponentials(np.array([0, FULL], dtype=np.uint64))
    assert (tickets > 0).all()
    assert np.isfinite(tickets).all()


def test_noise_has_the_moments_of_its_law() -> None:
    words = noise.philox(3, Purpose.ACCEPT, np.arange(40_000), 0, 0)
    uniforms, tickets = noise.uniforms(words), noise.exponentials(words[:, 0])
    assert abs(uniforms.mean() - 0.5) < 6 * 12**-0.5 / 200
    assert abs(tickets.mean() - 1.0) < 6 / 200


def test_a_draw_reads_a_block_for_the_uniform_and_one_for_each_four_tiles() -> None:
    assert noise.num_tiles(1024) == 1
    assert noise.num_tiles(1025) == 2
    assert noise.draw_blocks(1024 * 5).tolist() == [0, 1, 2]
