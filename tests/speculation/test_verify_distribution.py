"""Verification changes nothing: distributions of committed tokens, enumerated and compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch

from peagle.speculation.verify import verify_coupled, verify_rejection

Prefix = tuple[int, ...]
Distribution = dict[Prefix, Fraction]


class ToyModel:
    """A next-token distribution for every prefix, in whole units of 1/`units`, zeros included."""

    def __init__(self, vocab_size: int, units: int, seed: int) -> None:
        self.vocab_size, self.units, self.seed = vocab_size, units, seed

    def counts(self, prefix: Prefix) -> list[int]:
        rng = random.Random(f"{self.seed} {prefix}")
        draws = Counter(rng.randrange(self.vocab_size) for _ in range(self.units))
        return [draws[token] for token in range(self.vocab_size)]

    def prob(self, prefix: Prefix, token: int) -> Fraction:
        return Fraction(self.counts(prefix)[token], self.units)

    def floats(self, prefix: Prefix) -> list[float]:
        return [count / self.units for count in self.counts(prefix)]

    def sample(self, prefix: Prefix, cell: int) -> int:
        """The token for the noise `cell` of 0..units-1: its distribution over cells is `prob`."""
        for token, count in enumerate(self.counts(prefix)):
            cell -= count
            if cell < 0:
                return token
        raise AssertionError(cell)

    def distribution(self, length: int) -> Distribution:
        """The autoregressive distribution of the first `length` tokens."""
        return complete({(): Fraction(1)}, self, length)


class OneHot(ToyModel):
    def counts(self, prefix: Prefix) -> list[int]:
        best = random.Random(f"{self.seed} {prefix}").randrange(self.vocab_size)
        return [self.units * (token == best) for token in range(self.vocab_size)]


def complete(committed: Distribution, model: ToyModel, length: int) -> Distribution:
    """Continues every sequence with the model's own tokens up to `length`."""
    total: Counter[Prefix] = Counter()
    for prefix, weight in committed.items():
        if len(prefix) == length:
            total[prefix] += weight
            continue
        longer = {(*prefix, x): weight * model.prob(prefix, x) for x in range(model.vocab_size)}
        total.update(complete(longer, model, length))
    return {prefix: weight for prefix, weight in total.items() if weight}


# --- coupled

Propose = Callable[[ToyModel, Prefix, list[int], int], list[int]]


def oracle(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    return roll_out(target, prefix, cells, k)


def always_wrong(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    return [(token + 1) % target.vocab_size for token in roll_out(target, prefix, cells, k)]


def wrong_then_right(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    drafts = always_wrong(target, prefix, cells, 1)[:k]
    return drafts + roll_out(target, prefix + tuple(drafts), cells, k - len(drafts))


def shares_the_noise(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    drafter = ToyModel(target.vocab_size, target.units, seed=target.seed + 1)
    return roll_out(drafter, prefix, cells, k)


def fixed(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    return [len(prefix) % target.vocab_size] * k


def shorter_and_shorter(target: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    return oracle(target, prefix, cells, max(k - len(prefix), 0))


def roll_out(model: ToyModel, prefix: Prefix, cells: list[int], k: int) -> list[int]:
    start = len(prefix)
    for _ in range(k):
        prefix += (model.sample(prefix, cells[len(prefix)]),)
    return list(prefix[start:])


def generate(target: ToyModel, propose: Propose, cells: list[int], k: int, length: int) -> Prefix:
    """Chains verification steps until `length` tokens are committed; cells: noise by position."""
    committed: Prefix = ()
    while len(committed) < length:
        drafts = propose(target, committed, cells, k)
        padded = drafts + [0] * (k - len(drafts))  # 0 is a token too: padding must not be read
        contexts = [committed + tuple(padded[:i]) for i in range(k + 1)]
        sampled = [target.sample(context, cells[len(context)]) for context in contexts]
        verified = verify_coupled(
            torch.tensor([sampled]), torch.tensor([padded]), torch.tensor([len(drafts)])
        )
        count = int(verified.num_accepted) + 1
        committed += tuple(verified.token_ids[0, :count].tolist())
    return committed[:length]


@pytest.mark.parametrize(
    "propose",
    [oracle, always_wrong, wrong_then_right, shares_the_noise, fixed, shorter_and_shorter],
)
@pytest.mark.parametrize(("vocab_size", "units", "k"), [(2, 3, 1), (3, 4, 2), (4, 4, 3)])
def test_coupled_output_has_the_targets_distribution(
    propose, vocab_size: int, units: int, k: int
) -> None:
    length = 3
    target = ToyModel(vocab_size, units, seed=vocab_size)
    total: Counter[Prefix] = Counter()
    for noise in product(range(units), repeat=length):
        cells = [*noise, *([0] * (2 * k + 2))]  # later positions cannot matter
        total[generate(target, propose, cells, k, length)] += Fraction(1, units**length)
    assert dict(total) == target.distribution(length)


@pytest.mark.parametrize("propose", [oracle, always_wrong, wrong_then_right, shares_the_noise])
def test_coupled_output_is_the_same_with_any_drafter_or_none(propose) -> None:
    target = ToyModel(vocab_size=3, units=4, seed=11)
    for noise in product(range(4), repeat=4):
        cells = [*noise, *([0] * 8)]
        plain = roll_out(target, (), cells, 4)
        assert list(generate(target, propose, cells, 3, 4)) == plain


# --- rejection

NUM_UNIFORMS = {
    2: 2,
    3: 6,
    4: 12,
}  # lcm(1..units): every ratio of counts is a whole number of them


def uniform_grid(units: int) -> list[float]:
    return [(i + 0.5) / NUM_UNIFORMS[units] for i in range(NUM_UNIFORMS[units])]


def rejection_distribution(
    target: ToyModel, drafter: ToyModel, k: int, num_drafts: int
) -> Distribution:
    """The distribution of the tokens one step commits, over all drafts and all uniforms."""
    v, grid = target.vocab_size, uniform_grid(target.units)
    drafts = [
        (tokens, weight)
        for tokens in product(range(v), repeat=num_drafts)
        if (weight := sequence_prob(drafter, tokens))
    ]
    uniforms = torch.tensor(list(product(grid, repeat=num_drafts + 1)), dtype=torch.float64)
    total: Counter[Prefix] = Counter()
    for tokens, weight in drafts:
        committed = verify_one(target, drafter, tokens, k, uniforms)
        for sequence in committed:
            total[sequence] += weight / len(uniforms)
    return dict(total)


def verify_one(target, drafter, tokens: Prefix, k: int, uniforms) -> list[Prefix]:
    """Runs the real code on one draft with many uniforms; what lies past the drafts is junk."""
    n, b = len(tokens), len(uniforms)
    prefixes = [tokens[:i] for i in range(n + 1)]
    p = torch.tensor([target.floats(prefix) for prefix in prefixes], dtype=torch.float64)
    q = torch.full((k, target.vocab_size), torch.nan, dtype=torch.float64)
    for depth in range(n):
        q[depth] = torch.tensor(drafter.floats(prefixes[depth]))
    p = torch.cat([p, torch.full((k - n, target.vocab_size), torch.nan)])
    padded = torch.tensor([*tokens, *([-1] * (k - n))], dtype=torch.int64)
    accept = torch.zeros(b, k, dtype=torch.float64)
    accept[:, :n] = uniforms[:, :n]
    verified = verify_rejection(
        p.expand(b, -1, -1),
        q.expand(b, -1, -1),
        padded.expand(b, -1),
        torch.full((b,), n),
        accept,
        uniforms[:, -1:].expand(b, k + 1),
    )
    rows = zip(verified.token_ids.tolist(), verified.num_accepted.tolist(), strict=True)
    return [tuple(ids[: count + 1]) for ids, count in rows]


def sequence_prob(model: ToyModel, tokens: Prefix) -> Fraction:
    weight = Fraction(1)
    for depth, token in enumerate(tokens):
        weight *= model.prob(tokens[:depth], token)
    return weight


@pytest.mark.parametrize("drafter_type", [ToyModel, OneHot])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("vocab_size", "units", "k", "num_drafts"),
    [(2, 4, 1, 1), (4, 4, 1, 1), (3, 4, 2, 2), (3, 4, 3, 1), (2, 3, 3, 3), (3, 3, 2, 0)],
)
def test_rejection_output_has_the_targets_distribution(
    drafter_type, seed: int, vocab_size: int, units: int, k: int, num_drafts: int
) -> None:
    target = ToyModel(vocab_size, units, seed)
    drafter = drafter_type(vocab_size, units, seed + 100)
    committed = rejection_distribution(target, drafter, k, num_drafts)
    assert complete(committed, target, k + 1) == target.distribution(k + 1)


def test_a_drafter_that_is_the_target_is_never_rejected() -> None:
    target = ToyModel(vocab_size=3, units=4, seed=3)
    assert all(len(tokens) == 3 for tokens in rejection_distribution(target, target, 2, 2))


def test_rejected_token_is_resampled_from_the_residual() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniforms = torch.tensor(uniform_grid(4), dtype=torch.float64)
    b = len(uniforms)
    verified = verify_rejection(
        p.expand(b, 2, 4),
        q.expand(b, 1, 4),
        torch.full((b, 1), 2),
        torch.ones(b, dtype=torch.int64),
        torch.full((b, 1), 0.75),  # above p/q = 0.5: all rejected
        uniforms.unsqueeze(1).expand(b, 2),
    )
    assert verified.num_accepted.tolist() == [0] * b
    # max(p - q, 0) is [1/4, 1/4, 0, 0]
    assert Counter(verified.token_ids[:, 0].tolist()) == {0: b // 2, 1: b // 2}
