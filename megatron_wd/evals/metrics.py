"""Scores of sampled answers, one number per problem, and their mean with its uncertainty.

Definitions as in the evaluation of arXiv 2602.11137 (n = 16 samples per problem at temperature 1):

* Pass@1: the one greedy answer is correct.
* Pass@k: any of the first k samples is correct; `pass_at_k` is the unbiased estimate from n >= k samples.
* Maj@k: the answers are put into clusters of equivalent ones; the first member of the largest cluster
  is correct.
* RM@k: the sample that a reward model likes best is correct.
* Correct ratio: share of correct samples, over the problems with at least one correct sample.
* ORM score: mean reward over samples and problems.

An answer that cannot be read counts as wrong. Where a metric is not defined for a problem its number
is NaN, and the mean goes over the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

UNREADABLE = -1
"""Cluster of an answer that could not be read."""

_CHUNK_PROBLEMS = 4_000_000
"""Most weights of a bootstrap that are held at once."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems.

    Attributes:
        value: The mean; 0 if it is defined for no problem.
        standard_error: Of the mean, over problems; 0 for fewer than two.
        low: Lower end of the 95 % bootstrap interval over problems.
        high: Upper end.
        num_problems: Problems that the mean goes over.
    """

    value: float
    standard_error: float
    low: float
    high: float
    num_problems: int


def pass_any(correct: NDArray[np.bool_]) -> Floats:
    """Whether any sample is correct, per problem.

    Args:
        correct: [problems, samples].

    Returns:
        [problems], 0 or 1.
    """
    return _matrix(correct).any(axis=1).astype(np.float64)


def pass_at_k(correct: NDArray[np.bool_], k: int) -> Floats:
    """The chance that k of the n samples, drawn without replacement, hold a correct one.

    1 - C(n - c, k) / C(n, k) with c correct samples (Chen et al. 2021, arXiv 2107.03374), as a product,
    so that nothing overflows.

    Args:
        correct: [problems, samples].
        k: Samples to draw.

    Raises:
        ValueError: Unless 1 <= k <= samples.
    """
    correct = _matrix(correct)
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; there are {num_samples} samples")
    wrong = num_samples - correct.sum(axis=1)  # [problems]
    drawn = np.arange(k)
    # The i-th draw is wrong again with probability (wrong - i) / (n - i); 0 once none is left.
    factors = np.clip(wrong[:, None] - drawn, 0, None) / (num_samples - drawn)
    return 1.0 - factors.prod(axis=1)


def majority(clusters: NDArray[np.int64], correct: NDArray[np.bool_]) -> Floats:
    """Whether the first member of the largest cluster of answers is correct, per problem.

    Between clusters of one size the one whose first member was drawn first wins. Unreadable answers
    form no cluster; a problem that has no other answers counts as wrong.

    Args:
        clusters: [problems, samples], equal numbers for equivalent answers, UNREADABLE for none.
        correct: [problems, samples].
    """
    clusters, correct = np.asarray(clusters), _matrix(correct)
    result = np.zeros(len(correct))
    for problem, (row, right) in enumerate(zip(clusters, correct, strict=True)):
        names, first, sizes = np.unique(row, return_index=True, return_counts=True)
        readable = names != UNREADABLE
        if not readable.any():
            continue
        sizes, first = sizes[readable], first[readable]
        winner = first[sizes == sizes.max()].min()
        result[problem] = right[winner]
    return result


def best_reward(rewards: Floats, correct: NDArray[np.bool_]) -> Floats:
    """Whether the sample with the highest reward is correct, per problem; the first one on ties.

    Args:
        rewards: [problems, samples].
        correct: [problems, samples].
    """
    correct = _matrix(correct)
    best = np.asarray(rewards).argmax(axis=1)
    return correct[np.arange(len(correct)), best].astype(np.float64)


def correct_ratio(correct: NDArray[np.bool_]) -> Floats:
    """Share of correct samples per problem; NaN where there is none.

    Args:
        correct: [problems, samples].
    """
    shares = _matrix(correct).mean(axis=1)
    return np.where(shares > 0, shares, np.nan)


def mean_reward(rewards: Floats) -> Floats:
    """Mean reward per problem.

    Args:
        rewards: [problems, samples].
    """
    return np.asarray(rewards, dtype=np.float64).mean(axis=1)


def majority_class(labels: list[str]) -> tuple[str, float]:
    """The most frequent right answer and its share: what always giving that answer would score.

    Returns:
        The label (the first in the alphabet on ties) and its share; ("", 0) for no labels.
    """
    if not labels:
        return "", 0.0
    names, counts = np.unique(np.asarray(labels, dtype=object).astype(str), return_counts=True)
    winner = int(counts.argmax())
    return str(names[winner]), float(counts[winner] / len(labels))


def estimate(scores: Floats, *, num_resamples: int = 2000, seed: int = 0) -> Estimate:
    """Mean, standard error and bootstrap interval of scores per problem.

    The interval is the 2.5 to 97.5 percentile of the mean over problems drawn with replacement. It has no
    width where all scores are equal: that says nothing about problems that were not asked.

    Args:
        scores: [problems], NaN where not defined.
        num_resamples: Bootstrap draws.
        seed: Of the draws.
    """
    scores = np.asarray(scores, dtype=np.float64)
    defined = scores[~np.isnan(scores)]
    if not len(defined):
        return Estimate(0.0, 0.0, 0.0, 0.0, 0)
    error = defined.std(ddof=1) / np.sqrt(len(defined)) if len(defined) > 1 else 0.0
    means = bootstrap_means(scores[:, None], num_resamples=num_resamples, seed=seed)[:, 0]
    low, high = np.nanpercentile(means, (2.5, 97.5))
    return Estimate(float(defined.mean()), float(error), float(low), float(high), len(defined))


def bootstrap_means(scores: Floats, *, num_resamples: int, seed: int) -> Floats:
    """Means over problems drawn with replacement; the same draw for all columns (paired).

    Args:
        scores: [problems, columns], NaN where not defined.
        num_resamples: Draws.
        seed: Of the draws.

    Returns:
        [num_resamples, columns]; NaN where a draw has no problem that the column is defined for.
    """
    scores = np.asarray(scores, dtype=np.float64)
    num_problems = len(scores)
    defined = ~np.isnan(scores)
    values = np.where(defined, scores, 0.0)
    generator = np.random.default_rng(seed)
    chances = np.full(num_problems, 1.0 / num_problems)
    step = max(1, _CHUNK_PROBLEMS // num_problems)
    means = np.empty((num_resamples, scores.shape[1]))
    for start in range(0, num_resamples, step):
        size = min(step, num_resamples - start)
        weights = generator.multinomial(num_problems, chances, size=size).astype(np.float64)
        with np.errstate(invalid="ignore"):
            means[start : start + size] = (weights @ values) / (weights @ defined)
    return means


def _matrix(correct: NDArray[np.bool_]) -> NDArray[np.bool_]:
    correct = np.asarray(correct, dtype=bool)
    assert correct.ndim == 2, "one row per problem, one column per sample"
    return correct
