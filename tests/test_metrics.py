"""The metrics against slow, obvious references on random score matrices."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from megatron_wd.evals import metrics


@pytest.fixture(params=range(5))
def samples(request):
    rng = np.random.default_rng(request.param)
    num_problems, num_samples = int(rng.integers(1, 30)), int(rng.integers(1, 9))
    correct = rng.random((num_problems, num_samples)) < rng.random((num_problems, 1))
    clusters = rng.integers(-1, 4, (num_problems, num_samples))
    rewards = rng.integers(0, 4, (num_problems, num_samples)).astype(float)  # with ties
    return correct, clusters, rewards


def test_per_problem_scores_equal_the_reference(samples):
    correct, clusters, rewards = samples
    for p in range(len(correct)):
        right = list(correct[p])
        assert metrics.pass_any(correct)[p] == float(any(right))
        ratio = metrics.correct_ratio(correct)[p]
        assert math.isnan(ratio) if not any(right) else ratio == sum(right) / len(right)
        best = max(range(len(right)), key=lambda s, p=p: (rewards[p, s], -s))
        assert metrics.best_reward(rewards, correct)[p] == right[best]
        assert metrics.mean_reward(rewards)[p] == pytest.approx(sum(rewards[p]) / len(right))
        answers = [c for c in clusters[p] if c != metrics.UNREADABLE]
        if answers:
            # Counter.most_common keeps the order of first appearance on ties.
            winner = list(clusters[p]).index(Counter(answers).most_common(1)[0][0])
        assert metrics.majority(clusters, correct)[p] == (right[winner] if answers else 0)


def test_pass_at_k_counts_subsets_and_agrees_with_the_closed_form(samples):
    correct, _, _ = samples
    num_samples = correct.shape[1]
    for k in range(1, num_samples + 1):
        estimates = metrics.pass_at_k(correct, k)
        for p, row in enumerate(correct):
            subsets = list(itertools.combinations(row, k))
            assert estimates[p] == pytest.approx(sum(map(any, subsets)) / len(subsets))
            c = int(row.sum())
            closed = 1 - math.comb(num_samples - c, k) / math.comb(num_samples, k)
            assert estimates[p] == pytest.approx(closed)
    assert np.array_equal(metrics.pass_at_k(correct, num_samples), metrics.pass_any(correct))
    with pytest.raises(ValueError, match="samples"):
        metrics.pass_at_k(correct, num_samples + 1)


def test_estimate_is_the_mean_with_its_error():
    rng = np.random.default_rng(0)
    scores = (rng.random(400) < 0.3).astype(float)
    found = metrics.estimate(scores)
    assert found.value == scores.mean()
    assert found.standard_error == pytest.approx(scores.std(ddof=1) / 20)
    assert found.low == pytest.approx(found.value - 1.96 * found.standard_error, abs=0.01)
    assert found.high == pytest.approx(found.value + 1.96 * found.standard_error, abs=0.01)
    assert metrics.estimate(scores) == found


def test_estimate_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = metrics.estimate((rng.random(100) < 0.4).astype(float), num_resamples=400)
        hits += found.low <= 0.4 <= found.high
    assert 180 <= hits <= 199


def test_undefined_problems_are_left_out():
    found = metrics.estimate(np.array([0.5, np.nan, 1.0]))
    assert (found.value, found.num_problems) == (0.75, 2)
    assert metrics.estimate(np.array([np.nan, np.nan])) == metrics.Estimate(0, 0, 0, 0, 0)
    assert metrics.estimate(np.array([1.0])).standard_error == 0


def test_bootstrap_draws_the_same_problems_for_every_column():
    scores = np.random.default_rng(2).random((50, 1))
    means = metrics.bootstrap_means(np.hstack([scores, scores + 1]), num_resamples=100, seed=0)
    assert np.allclose(means[:, 1] - means[:, 0], 1)
    assert means[:, 0].std() > 0.01


def test_majority_class():
    assert metrics.majority_class(["B", "A", "B", "C"]) == ("B", 0.5)
    assert metrics.majority_class([]) == ("", 0.0)
