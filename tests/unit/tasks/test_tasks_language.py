"""The language model: softmaxes against the textbook, both directions, metrics and errors by group."""

import math
from collections import defaultdict

import pytest
import torch
from task_cases import take_steps
from torch import nn
from torch.nn import functional

from fulltilt.data.text.text import text
from fulltilt.errors import UsageError
from fulltilt.tasks import build_language_model
from fulltilt.tasks.language_chunked import choose_chunk_rows, compute_chunked, compute_ranks
from fulltilt.tasks.language_metrics import GROUPS, assign_groups, derive_figures
from fulltilt.tasks.language_softmax import AdaptiveSoftmax, LinearSoftmax, choose_cutoffs, draw_words, score_sampled
from fulltilt.tasks.models.bilm import BiLM

N, P, V = 23, 6, 40


def build_problem(dtype=torch.float64):
    torch.manual_seed(0)
    features, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((N, P), (V, P), (V,)))
    return features.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), torch.randint(V, (N,))


def are_parallel(mine, theirs):
    return all(
        functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999 for a, b in zip(mine, theirs, strict=True)
    )


def run_full(x, w, b, t):
    logits = x @ w.T + b
    return functional.cross_entropy(logits, t), logits


@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 100])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_chunked_is_full_in_loss_gradients_and_ranks(chunk_rows, scale):
    x, w, b, t = build_problem()
    loss, logits = run_full(x, w, b, t)
    mine, losses, ranks = compute_chunked(x, w, b, t, chunk_rows=chunk_rows, wants_ranks=scale > 1)
    order = logits.argsort(dim=1, descending=True)
    assert ranks is None if scale == 1 else ranks.tolist() == (order == t[:, None]).nonzero()[:, 1].tolist()
    torch.testing.assert_close([mine, losses.mean()], [loss, loss])
    expected, found = (torch.autograd.grad(value * scale, (x, w, b)) for value in (loss, mine))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        pytest.param("cuda", None, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_chunked_under_autocast_is_near_full_and_keeps_gradients_in_fp32(device, dtype):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    x, w, b, t = (part.detach().to(device) for part in build_problem(torch.float32))
    leaves = x.requires_grad_(), w.requires_grad_()
    loss, _ = run_full(x, w, b, t)
    expected = torch.autograd.grad(loss, leaves)
    with torch.autocast(device, dtype=dtype or torch.float32, enabled=dtype is not None):
        mine, losses, _ = compute_chunked(x, w, b, t, chunk_rows=7, wants_ranks=True)
    got = torch.autograd.grad(mine, leaves)
    assert losses.dtype == got[0].dtype == got[1].dtype == torch.float32
    assert mine.item() == pytest.approx(loss.item(), rel=0.02)
    assert are_parallel(got, expected)


def test_chunked_takes_little_memory_and_its_backward_once_and_no_gradient_in_evaluation():
    x, w, b, t = build_problem()
    with torch.no_grad():
        assert not compute_chunked(x, w, b, t, chunk_rows=4, wants_ranks=True)[0].requires_grad
    loss, _, _ = compute_chunked(x, w, b, t, chunk_rows=4, wants_ranks=False)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()
    assert choose_chunk_rows(50_000, "cpu") * 50_000 * 4 <= 64 << 20
    assert choose_chunk_rows(10**9, "cpu") == 16


def test_of_equal_words_the_smaller_id_ranks_first():
    """a tie counted as a miss: accuracy was too low wherever logits are rounded"""
    assert compute_ranks(torch.zeros(4, 4), torch.arange(4)[:, None]).tolist() == [0, 1, 2, 3]
    assert compute_ranks(torch.full((1, 4), math.nan), torch.zeros(1, 1, dtype=torch.long)).tolist() == [4]


@pytest.mark.parametrize("method", ["full", "chunked"])
def test_ranks_in_bf16_are_those_of_argmax(method):
    torch.manual_seed(0)
    layer, x = LinearSoftmax(P, 3000, method, chunk_rows=64), torch.randn(200, P)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer.linear(x)
        best = logits.argmax(1)
        assert (logits == logits.gather(1, best[:, None])).sum(1).max() > 1, "there are ties"
        ranks = layer.eval()(x, best, wants_ranks=True).ranks
    assert ranks.tolist() == [0] * 200


def test_adaptive_is_a_distribution_and_evaluates_what_it_trains():
    torch.manual_seed(0)
    layer = AdaptiveSoftmax(P, V, cutoffs=[5, 15], div_value=2.0, chunk_rows=6)
    x, t = torch.randn(N, P), torch.randint(V, (N,))
    probabilities = layer.softmax.log_prob(x).exp()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(N))
    trained = layer.train()(x, t, wants_ranks=False)
    assert trained.ranks is None
    evaluated = layer.eval()(x, t, wants_ranks=True)
    torch.testing.assert_close(trained.losses, evaluated.losses)
    torch.testing.assert_close(evaluated.losses, -probabilities.log().gather(1, t[:, None]).squeeze(1).detach())
    assert torch.equal(evaluated.ranks == 0, probabilities.argmax(1) == t)


def test_adaptive_runs_under_autocast():
    layer = AdaptiveSoftmax(P, V, cutoffs=None, div_value=2.0, chunk_rows=None).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = layer(torch.randn(N, P).bfloat16(), torch.randint(V, (N,)), wants_ranks=False).loss
    loss.backward()
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("n_features", "cutoffs", "div_value", "said"),
    [
        *((P, cutoffs, 2.0, "cutoffs") for cutoffs in ([], [5, 5], [9, 3], [0, 4], [V])),
        (12, [5, 15], 4.0, "lower div_value"),
    ],
)
def test_cutoffs_that_make_no_groups_and_groups_without_a_feature_are_refused(n_features, cutoffs, div_value, said):
    with pytest.raises(UsageError, match=said):
        AdaptiveSoftmax(n_features, V, cutoffs=cutoffs, div_value=div_value, chunk_rows=None)


def test_cutoffs_suit_any_vocabulary():
    assert choose_cutoffs(50_000) == [2000, 10_000]
    for n_words in (2, 3, 10, 30):
        assert 0 < choose_cutoffs(n_words)[0] <= choose_cutoffs(n_words)[-1] < n_words


def test_words_are_drawn_with_the_probability_that_is_told():
    torch.manual_seed(0)
    words, log_probability = draw_words(200_000, V, torch.device("cpu"))
    counts = torch.bincount(words, minlength=V) / len(words)
    every = torch.zeros(V).index_put((words,), log_probability.exp())
    assert every.sum().item() == pytest.approx(1.0, abs=1e-5)
    error = (every * (1 - every) / len(words)).sqrt()
    assert ((counts - every).abs() < 5 * error).all()


def test_the_sampled_denominator_is_unbiased():
    x, w, b, t = (part.detach() for part in build_problem(torch.float32))
    w = w / 4
    exact = (x @ w.T + b).exp().sum(1)
    own = (x * w[t]).sum(1) + b[t]
    torch.manual_seed(0)
    draws = torch.stack([(score_sampled(x, w, b, t, n_sampled=20).losses + own).exp() for _ in range(4000)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()
    assert (draws.log().mean(0) - exact.log() < 0).float().mean() > 0.9  # its logarithm lies below


def test_with_many_samples_the_gradient_is_that_of_the_full_softmax():
    x, w, b, t = build_problem(torch.float32)
    expected = torch.autograd.grad(run_full(x, w, b, t)[0], (x, w))
    torch.manual_seed(0)
    got = torch.autograd.grad(score_sampled(x, w, b, t, n_sampled=100_000).loss, (x, w))
    assert are_parallel(got, expected)


@pytest.mark.parametrize("residual", [False, True])
def test_each_direction_sees_its_side_only(residual):
    torch.manual_seed(0)
    model = BiLM(vocab_size=V, depth=2, embedding=8, hidden=9, projection=5, dropout=0.0, residual=residual).eval()
    words = torch.randint(V, (2, 12))
    changed = words.clone()
    changed[:, 6] = (changed[:, 6] + 1) % V
    assert torch.backends.mkldnn.enabled, "it is off in the LSTMs only"
    sees = [(a != c).any(dim=2).any(dim=0).tolist() for a, c in zip(model(words), model(changed), strict=True)]
    assert sees[0] == [s >= 6 for s in range(11)]  # predicts word s + 1 from words 0…s
    assert sees[1] == [s + 1 <= 6 for s in range(11)]  # predicts word s from words s + 1…


def test_residuals_add_layers_up(monkeypatch):
    torch.manual_seed(0)
    stack = BiLM(vocab_size=V, depth=2, embedding=8, hidden=9, projection=5, dropout=0.0, residual=True).forwards.eval()
    x = torch.randn(1, 4, 8)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # it warns that it has no LSTM with a projection
    first, _ = stack.layers[0](x)
    with torch.no_grad():
        for parameter in stack.layers[1].parameters():
            parameter.zero_()
    torch.testing.assert_close(stack(x), first)


class Windows(torch.utils.data.Dataset):
    """Each word follows the one before it by a fixed step: a bigram either way tells all."""

    vocab_size, n_classes, sample_shape = V, None, (10,)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = (torch.arange(11) * 3 + index) % V
        return words[:-1], words[1:]


def build_encoder(vocab_size=V):
    return BiLM(vocab_size=vocab_size, embedding=16, hidden=24, projection=12, dropout=0.0, depth=1)


def build(**options):
    return build_language_model(**{"model": build_encoder, "train": Windows} | options)


def get_batch(n=64):
    return tuple(torch.stack(part) for part in zip(*[Windows()[i] for i in range(n)], strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"softmax": "full"},
        pytest.param({"softmax": "chunked", "heads": "shared"}, marks=pytest.mark.slow),
        pytest.param({"softmax": "chunked", "tie_embedding": True}, marks=pytest.mark.slow),
        {"softmax": "adaptive", "div_value": 2.0},
        pytest.param({"softmax": "sampled", "n_sampled": 60}, marks=pytest.mark.slow),
    ],
)
def test_every_softmax_learns_and_evaluates_over_all_words(options):
    workload = build(**options)
    torch.manual_seed(0)
    model = workload.model()
    inputs, behind = get_batch()
    words, targets = workload.prepare((inputs, behind), torch.Generator())
    assert torch.equal(words[:, :-1], inputs)
    assert words[:, 1:].equal(targets)
    assert targets is behind
    take_steps(torch.optim.Adam(model.parameters(), lr=0.03), lambda: workload.loss(model(words), targets), 40)
    model.eval()
    with torch.no_grad():
        outputs = model(words)
    means = {name: metric(outputs, targets).mean().item() for name, metric in workload.metrics.items()}
    assert means["accuracy"] > 0.8
    assert means["top5"] >= means["accuracy"]
    loss = workload.loss(outputs, targets).item()
    assert loss == pytest.approx((means["forward_loss"] + means["backward_loss"]) / 2, rel=1e-4)
    assert workload.derive({"loss": loss, **means})["perplexity"] == pytest.approx(math.exp(loss))


def test_the_output_layer_runs_once_a_direction_with_metrics_on(monkeypatch):
    workload = build(softmax="full", training_metrics=True)
    model = workload.model()
    words, targets = workload.prepare(get_batch(8), torch.Generator())
    calls = []
    for layer in model.outputs:
        layer.linear.register_forward_hook(lambda *call: calls.append(1))
    outputs = model(words)
    assert all(metric(outputs, targets).shape == (8,) for metric in workload.metrics.values())
    assert len(calls) == 2


def test_a_shared_head_serves_both_directions_and_a_tied_table_is_one_parameter():
    separate, shared = (sum(p.numel() for p in build(heads=h).model().parameters()) for h in ("separate", "shared"))
    assert separate - shared == V * 12 + V
    model = build(tie_embedding=True).model()
    assert all(head.linear.weight is model.encoder.embedding.weight for head in model.outputs)
    assert isinstance(model.outputs[0].bridge, nn.Linear)  # 12 features, 16 wide


def test_groups_are_told_apart():
    words, counts = ["the", "<unk>", ",", "house", "1990", "<eos>", "seldom"], [900, 400, 300, 50, 40, 30, 10]
    groups = ["frequent", "unknown", "punctuation", "common", "number", "line_end", "rare"]
    assert [GROUPS[g] for g in assign_groups(words, counts)] == groups


def test_errors_by_group_are_exact(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("the cat , sat 3 times\n" * 50)
    dataset = text("train", path=str(path), seq_len=12)
    workload = build(train=lambda: dataset, error_analysis=True)
    torch.manual_seed(0)
    model = workload.model().eval()
    words, targets = workload.prepare(dataset.get_batch(range(6)), torch.Generator())
    with torch.no_grad():
        outputs = model(words)
        logits = [head.linear(x) for head, x in zip(model.outputs, model.encoder(words), strict=True)]
    means = {name: metric(outputs, targets).mean().item() for name, metric in workload.metrics.items()}
    figures = workload.derive({"loss": 1.0, **means})
    is_wrong = defaultdict(list)
    for scores, wanted in zip(logits, (words[:, 1:], words[:, :-1]), strict=True):
        for said, word in zip(scores.argmax(2).flatten(), wanted.flatten(), strict=True):
            is_wrong[f"error_pct/{GROUPS[model.groups[word]]}"].append(said != word)
    expected = {name: 100 * float(sum(found)) / len(found) for name, found in is_wrong.items()}
    assert {name: figures[name] for name in figures if "/" in name} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("error_analysis", [False, True])
def test_the_unknown_word_is_no_hit_and_the_figure_with_it_is_told_too(tmp_path, error_analysis):
    """a third of the hits came from predicting <unk>"""
    path = tmp_path / "t.txt"
    path.write_text("the <unk> sat <unk> there\n" * 50)
    dataset = text("train", path=str(path), seq_len=12)
    workload = build(train=lambda: dataset, error_analysis=error_analysis)
    model = workload.model().eval()
    unknown = dataset.vocabulary.unknown
    with torch.no_grad():
        for head in model.outputs:  # says <unk> whatever comes
            head.linear.weight.zero_()
            head.linear.bias.zero_()[unknown] = 1.0
    words, targets = workload.prepare(dataset.get_batch(range(6)), torch.Generator())
    with torch.no_grad():
        outputs = model(words)
    means = {name: metric(outputs, targets).mean().item() for name, metric in workload.metrics.items()}
    share = torch.stack((words[:, 1:], words[:, :-1])).eq(unknown).float().mean().item()
    assert share > 0.2
    assert (means["accuracy"], means["accuracy_with_unk"]) == (0.0, pytest.approx(share))
    assert 0 < means["top5"] < 1 - share + 1e-6


def test_a_sampled_training_loss_has_no_perplexity():
    assert derive_figures({"loss": 2.0}, trains_on_all_words=False) == {}
    assert derive_figures({"loss": 2.0, "accuracy": 0.1}, trains_on_all_words=False)["perplexity"] == math.exp(2.0)
    assert derive_figures({"loss": 5000.0}, trains_on_all_words=True) == {"perplexity": math.inf}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": nn.CrossEntropyLoss()}, "remove loss"),
        ({"softmax": "adaptive", "tie_embedding": True}, "cannot be tied"),
        ({"softmax": "sampled", "training_metrics": True}, "drop training_metrics"),
        ({"softmax": "chunked", "cutoffs": [4]}, "groups of the adaptive softmax, and softmax is chunked"),
        ({"error_analysis": True}, "has no vocabulary"),
        ({"model": lambda: nn.Linear(2, 2)}, "needs an encoder with embedding"),
        ({"model": lambda: build_encoder(9)}, "knows 9 words, the data has 40"),
    ],
)
def test_options_that_exclude_each_other_and_what_the_model_cannot_do_are_told(options, said):
    with pytest.raises(UsageError, match=said):
        build(**options).model()


def test_metrics_of_a_training_that_computed_none_are_refused():
    workload = build()
    words, targets = workload.prepare(get_batch(2), torch.Generator())
    with pytest.raises(UsageError, match="training_metrics=true"):
        workload.metrics["accuracy"](workload.model()(words), targets)


def test_the_start_says_what_a_step_is():
    assert build().explain(32, 2)[0].startswith("a step predicts 640 words")
    assert "no perplexity" in build(softmax="sampled", n_sampled=9).explain(1, 1)[1]
    assert len(build(softmax="sampled", n_sampled=39).explain(1, 1)) == 2
    assert build(softmax="sampled", n_sampled=40).explain(1, 1)[2].startswith("n_sampled 40 is no less than the 40")
