"""Figures of clusters by hand; neighbours, linear probe and pseudo-labels on features that are known."""

import math

import numpy as np
import pytest
import torch
from task_cases import take_steps
from torch import nn

from fulltilt.errors import UsageError
from fulltilt.tasks.clustering import (
    PseudoLabels,
    build_clustering,
    compute_figures,
    find_pseudo_labels,
    match_clusters,
)
from fulltilt.tasks.features import standardise
from fulltilt.tasks.linear_probe import WEIGHT_DECAY, build_linear_probe
from fulltilt.tasks.neighbours import choose_k, compute_knn_accuracy, predict_by_neighbours


def test_figures_by_hand_of_one_cluster_for_all_and_of_the_classes_under_other_names():
    """Clusters 0: a a b; 1: b b; 2: a. Named 0 → a, 1 → b, 2 is left over: 4 of 6 right."""
    found = compute_figures(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 1, 0]))
    assert found["cluster_accuracy"] == pytest.approx(4 / 6)
    assert found["purity"] == pytest.approx(5 / 6)
    # Class a: 2 found, 1 wrong of the 3 called a, 1 missed of 3. Class b: 2 found, none wrong, 1 missed of 3.
    assert found["f1"] == pytest.approx(((2 * 2) / (3 + 3) + (2 * 2) / (2 + 3)) / 2)
    joint = {(0, 0): 2, (0, 1): 1, (1, 1): 2, (2, 0): 1}
    sizes, classes = {0: 3, 1: 2, 2: 1}, {0: 3, 1: 3}
    mutual = sum(n / 6 * math.log(n * 6 / (sizes[c] * classes[t])) for (c, t), n in joint.items())
    entropies = [-sum(n / 6 * math.log(n / 6) for n in counts.values()) for counts in (sizes, classes)]
    assert found["nmi"] == pytest.approx(mutual / (sum(entropies) / 2))
    found = compute_figures(np.zeros(6, dtype=np.int64), np.array([0, 0, 0, 1, 1, 2]))
    assert [found[name] for name in ("nmi", "cluster_accuracy", "purity")] == pytest.approx([0.0, 0.5, 0.5])
    found = compute_figures(np.array([2, 2, 0, 1, 1]), np.array([0, 0, 1, 2, 2]))
    assert found == pytest.approx(dict.fromkeys(("cluster_accuracy", "nmi", "purity", "f1"), 1.0))


def test_the_matching_is_the_best_and_not_the_greedy_one():
    """Greedy takes 0 → a (10) and is left with 1 → b (0): 10. The best is 0 → b, 1 → a: 18."""
    assert match_clusters(np.array([[10, 9], [9, 0]])).tolist() == [1, 0]


def test_samples_without_a_label_count_nowhere():
    assert compute_figures(np.array([0, 1, 1, 0]), np.array([0, 1, -1, -1]))["cluster_accuracy"] == 1.0
    with pytest.raises(UsageError, match="no sample has a label"):
        compute_figures(np.array([0, 1]), np.array([-1, -1]))


def test_neighbours_vote_with_the_weight_of_their_similarity():
    """One very near neighbour of class 1 against two far ones of class 0: the weights decide, not the heads."""
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    targets, query = torch.tensor([1, 0, 0]), torch.tensor([[1.0, 0.2]])
    assert predict_by_neighbours(bank, targets, query, k=3, n_classes=2).tolist() == [1]
    flat = predict_by_neighbours(bank, targets, query, k=3, n_classes=2, temperature=1e6)
    assert flat.tolist() == [0], "where all weigh the same, two are more than one"


def test_neighbours_by_hand():
    angles = torch.tensor([0.0, 0.1, 1.5, 1.6, 3.0, 3.1])
    bank = 7 * torch.stack([angles.cos(), angles.sin()], dim=1)  # the length does not matter
    targets = torch.tensor([0, 0, 1, 1, 2, 2])
    asked = torch.tensor([0.05, 1.45, 2.9, 0.9])
    queries = torch.stack([asked.cos(), asked.sin()], dim=1)
    assert compute_knn_accuracy(bank, targets, queries, torch.tensor([0, 1, 2, 0]), k=2) == pytest.approx(3 / 4)


def test_chunks_of_queries_do_not_change_the_answer():
    generator = torch.Generator().manual_seed(0)
    bank, queries = torch.randn(50, 4, generator=generator), torch.randn(1500, 4, generator=generator)
    targets = torch.randint(3, (50,), generator=generator)
    whole = predict_by_neighbours(bank, targets, queries, k=5, n_classes=3)
    alone = [predict_by_neighbours(bank, targets, query[None], k=5, n_classes=3) for query in queries[1020:1030]]
    assert torch.equal(torch.cat(alone), whole[1020:1030])


def test_k_follows_the_number_of_labelled_images():
    assert [choose_k(n) for n in (5, 5_000, 50_000)] == [5, 20, 200]
    with pytest.raises(UsageError, match="k 6"):
        predict_by_neighbours(torch.ones(5, 2), torch.zeros(5).long(), torch.ones(1, 2), k=6, n_classes=1)


def make_blobs(n, n_classes=3, n_features=5, spread=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.eye(n_features)[:n_classes] * 2
    targets = torch.arange(n) % n_classes
    return centers[targets] + spread * torch.randn(n, n_features, generator=generator), targets


def test_the_linear_probe_reaches_the_optimum_of_logistic_regression():
    """The same objective, minimised by scikit-learn."""
    from sklearn.linear_model import LogisticRegression

    features, targets = make_blobs(300, spread=1.5)
    workload = build_linear_probe((features, targets), make_blobs(99, seed=1), classes=("a", "b", "c"))
    torch.manual_seed(0)
    model, dataset = workload.model(), workload.dataset()
    samples, labels = dataset.get_batch(range(300))
    take_steps(workload.optimizer(model.parameters()), lambda: workload.loss(model(samples), labels), 300)
    (inputs,) = standardise(features)
    reference = LogisticRegression(C=1 / (WEIGHT_DECAY * 300), max_iter=2000, tol=1e-8).fit(inputs, targets)
    theirs = -reference.predict_log_proba(inputs)[range(300), targets].mean()
    assert workload.loss(model(inputs), targets).item() == pytest.approx(theirs, rel=0.02)


def test_validation_features_are_scaled_as_training_features_are_and_a_probe_needs_labels():
    features, targets = make_blobs(60)
    workload = build_linear_probe((features, targets), (features[:9] + 5, targets[:9]), classes="abc")
    known, asked = workload.dataset()[:9][0], workload.validation()[:][0]
    torch.testing.assert_close(asked, known + 5 / features.std(0), rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="needs labelled images"):
        build_linear_probe((torch.zeros(0, 4), torch.zeros(0).long()), make_blobs(9), classes="ab")


def test_pseudo_labels_are_the_blobs_and_clear_ones_lie_near_their_centre():
    features, targets = make_blobs(90, spread=0.2)
    pseudo = find_pseudo_labels(features, n_clusters=3, seed=0)
    assert compute_figures(pseudo.clusters, targets.numpy())["cluster_accuracy"] == 1.0
    between = torch.cat([features, (features[:1] / features[0].norm() + features[1:2] / features[1].norm()) / 2])
    found = find_pseudo_labels(between, n_clusters=3, seed=0)
    assert found.margins[-1] < np.quantile(found.margins, 0.05)
    assert np.all((found.margins >= 0) & (found.margins <= 1))


def test_clear_ones_are_chosen_in_every_cluster():
    margins = np.array([0.9, 0.1, 0.8, 0.2, 0.05, 0.01, 0.0])
    pseudo = PseudoLabels(clusters=np.array([0, 0, 0, 0, 1, 1, 2]), margins=margins)
    assert pseudo.choose_clear(0.5).tolist() == [0, 2, 4, 6]
    assert pseudo.choose_clear(1.0).tolist() == list(range(7))
    with pytest.raises(UsageError, match="share"):
        pseudo.choose_clear(0.0)


def test_the_head_is_judged_by_real_labels_and_trained_without():
    features, targets = make_blobs(90, spread=0.2)
    pseudo = find_pseudo_labels(features, n_clusters=3, seed=0)
    unseen = torch.where(torch.arange(30) < 20, targets[:30], -1)
    workload = build_clustering(features, pseudo, (features[:30], unseen), n_clusters=3, share=0.5)
    assert len(workload.dataset()) == sum(round(0.5 * n) for n in np.bincount(pseudo.clusters))
    model = workload.model()
    inputs, labels = workload.dataset().get_batch(range(len(workload.dataset())))
    optimizer = workload.optimizer(model.parameters())
    take_steps(optimizer, lambda: nn.functional.cross_entropy(model(inputs), labels), 50)
    assert workload.assess(model, torch.device("cpu"))["cluster_accuracy"] == 1.0


@pytest.mark.parametrize("n_clusters", [1, 10])
def test_a_number_of_clusters_that_cannot_be_is_told(n_clusters):
    with pytest.raises(UsageError, match=f"n_clusters {n_clusters}"):
        find_pseudo_labels(torch.randn(9, 2), n_clusters=n_clusters, seed=0)
