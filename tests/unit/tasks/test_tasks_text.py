"""Text models and their tasks: padding counts for nothing, a cache changes nothing, parts are runs of their text."""

import pytest
import torch
from task_cases import take_steps

from fulltilt.config import load_config
from fulltilt.engine import build_workload
from fulltilt.errors import ConfigError, UsageError
from fulltilt.tasks import build_model
from fulltilt.tasks.models.gpt import GPT
from fulltilt.tasks.models.text_encoder import TextClassifier
from fulltilt.tasks.sentences import SentenceModel, draw_parts, halve

SIZES = "(vocab_size=50, max_len=32, depth=2, width=16, heads=2"


def build(name="text_encoder", more=""):
    torch.manual_seed(0)
    return build_model(f"{name}{SIZES}{more})").eval()


def draw_texts(lengths=(3, 11, 7), seed=0):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(1, 50, (n,), generator=generator) for n in lengths]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), texts


@pytest.mark.parametrize("name", ["text_encoder", "text_classifier"])
def test_a_text_has_the_same_outputs_alone_and_in_a_padded_batch(name):
    model, (batch_BL, texts) = build(name), draw_texts()
    together = model(batch_BL)
    for row, text in zip(together, texts, strict=True):
        torch.testing.assert_close(row, model(text[None])[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(together[0], together[1])
    if name == "text_encoder":
        torch.testing.assert_close(together.norm(dim=1), torch.ones(3))


def test_padding_alone_still_gives_numbers():
    assert build()(torch.zeros(2, 5, dtype=torch.long)).isfinite().all()


def test_the_known_encoders_can_be_had_by_arguments():
    with torch.device("meta"):
        model = build_model("text_encoder(vocab_size=30522, max_len=512, depth=6, width=384, heads=12)")
    assert 22e6 < sum(p.numel() for p in model.parameters()) < 23e6, "MiniLM has 22.7 million"
    with pytest.raises(UsageError, match=r"33 words, the model has places for 32; raise its max_len"):
        build()(torch.ones(1, 33, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"width 16 is not a multiple of heads 3; heads: \[1, 2, 4, 8, 16\]"):
        build_model("text_encoder(vocab_size=50, width=16, heads=3)")


def test_a_classifier_exports_with_any_batch_and_length():
    model, (batch_BL, _) = build("text_classifier"), draw_texts()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=32)},)
    exported = torch.export.export(model, (batch_BL,), dynamic_shapes=shapes).module()
    for lengths in ((1,), (4, 32, 9, 9), (11, 2)):
        other_BL, _ = draw_texts(lengths, seed=1)
        torch.testing.assert_close(exported(other_BL), model(other_BL))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # the exporter's own
def test_a_classifier_answers_the_same_in_onnx_runtime(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, (batch_BL, _) = build("text_classifier"), draw_texts()
    shapes = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=32)},)
    program = torch.onnx.export(model, (batch_BL,), dynamo=True, dynamic_shapes=shapes, input_names=["words"])
    program.save(str(tmp_path / "model.onnx"))
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for lengths in ((1,), (4, 32, 9, 9)):
        other_BL, _ = draw_texts(lengths, seed=1)
        (scores,) = session.run(None, {"words": other_BL.numpy()})
        torch.testing.assert_close(torch.from_numpy(scores), model(other_BL), atol=1e-4, rtol=1e-4)


def test_reading_with_a_cache_gives_what_reading_anew_gives():
    model, (batch_BT, texts) = build("gpt"), draw_texts()
    cache = model.build_cache(3, 32)
    scores_BV = model.read_on(batch_BT, cache, torch.tensor([len(text) for text in texts]))
    for _ in range(4):
        for row, text in enumerate(texts):
            torch.testing.assert_close(scores_BV[row], model(text[None])[0, -1], atol=1e-4, rtol=1e-4)
        next_B = scores_BV.argmax(-1)
        texts = [torch.cat((text, word[None])) for text, word in zip(texts, next_B, strict=True)]
        scores_BV = model.read_on(next_B[:, None], cache)


def test_no_word_is_predicted_from_what_follows():
    model, (batch_BT, _) = build("gpt"), draw_texts((12,))
    changed_BT = batch_BT.clone()
    changed_BT[:, 8:] = 3
    torch.testing.assert_close(model(batch_BT)[:, :8], model(changed_BT)[:, :8])
    assert not torch.allclose(model(batch_BT)[:, 8:], model(changed_BT)[:, 8:])


def test_parts_of_a_text_are_runs_of_its_words_and_differ():
    batch_BL, texts = draw_texts((20, 9, 30))
    torch.manual_seed(1)
    rows_RL = draw_parts(batch_BL)
    assert rows_RL.shape == (6, 18)
    runs = [[word for word in row.tolist() if word] for row in rows_RL]
    for row, run in enumerate(runs):
        text = texts[row // 2].tolist()
        assert 0.2 * len(text) <= len(run) <= 0.6 * len(text) + 1
        assert any(text[at : at + len(run)] == run for at in range(len(text)))
    assert any(runs[2 * i] != runs[2 * i + 1] for i in range(3))
    first, second = halve(batch_BL, 0), halve(batch_BL, 1)
    for text, a, b in zip(texts, first.tolist(), second.tolist(), strict=True):
        assert [word for word in a + b if word] == text.tolist()


def test_a_sentence_model_takes_parts_in_training_only():
    model, (batch_BL, _) = SentenceModel(build()), draw_texts()
    assert model.train()(batch_BL).shape == (6, 16)
    torch.testing.assert_close(model.eval()(batch_BL), model.encoder(batch_BL))


@pytest.mark.parametrize("name", ["text_classifier.yaml", "sentence_encoder.yaml", "gpt.yaml"])
def test_configurations_learn_from_one_batch(name):
    workload = build_workload(load_config(f"configs/{name}", ["optim.lr=3e-3"]))
    torch.manual_seed(0)
    model, dataset = workload.model(), workload.dataset()
    samples = [dataset[row] for row in range(0, 160, 20)]
    inputs, targets = (workload.collate or torch.utils.data.default_collate)(samples)
    optimizer = workload.optimizer(model.parameters())
    losses = take_steps(optimizer, lambda: workload.loss(model(inputs), targets), 12)
    assert losses[-1] < 0.8 * losses[0]
    assert isinstance(model, GPT | SentenceModel | TextClassifier)


def test_a_sentence_encoder_is_judged_by_its_neighbours():
    workload = build_workload(load_config("configs/sentence_encoder.yaml", ["task=sentence_encoder(limit=60)"]))
    torch.manual_seed(0)
    figures = workload.assess(workload.model().eval(), torch.device("cpu"))
    assert figures.keys() == {"retrieval_accuracy", "knn_accuracy"}
    assert all(0 <= value <= 1 for value in figures.values())
    assert workload.explain(64, 1) == ["NT-Xent over batches of 64: 126 negatives per anchor"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.gpu
def test_a_cache_on_a_gpu_gives_what_reading_anew_gives():
    model, (batch_BT, texts) = build("gpt").cuda(), draw_texts()
    cache = model.build_cache(3, 32)
    scores_BV = model.read_on(batch_BT.cuda(), cache, torch.tensor([len(text) for text in texts], device="cuda"))
    for row, text in enumerate(texts):
        torch.testing.assert_close(scores_BV[row], model(text[None].cuda())[0, -1], atol=1e-3, rtol=1e-3)
