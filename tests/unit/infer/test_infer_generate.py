"""Text written word by word: with a cache as without, sampled by a seed, measured from arrival, served as it comes."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fulltilt.config import config_from_values
from fulltilt.errors import ConfigError, DataError, FulltiltError, UsageError
from fulltilt.infer.generate.decoding import Sampling, choose, find_writer
from fulltilt.infer.load.arrivals import cut_prompt
from fulltilt.infer.measuring import open_model
from fulltilt.infer.targets import Figures, Load, Target, estimate_figure, judge, plan_load, plan_targets
from fulltilt.records.words import WordTable
from fulltilt.tasks.models.gpt import GPT
from fulltilt.tasks.vision import import_torchvision

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]


def build_gpt(max_len=32):
    torch.manual_seed(0)
    return GPT(vocab_size=40, max_len=max_len, depth=2, width=16, heads=2).eval()


def collect(write, prompts=PROMPTS, n_new=6, sampling=None):
    columns = []
    write(prompts, n_new, columns.append, *([sampling] if sampling else []))
    return [list(row) for row in zip(*columns, strict=True)]


def test_prompts_of_different_lengths_are_written_on_as_each_would_be_without_a_cache():
    model = build_gpt()
    for prompt, written in zip(PROMPTS, collect(find_writer(model)), strict=True):
        words = list(prompt)
        with torch.no_grad():
            for _ in range(6):
                words.append(int(model(torch.tensor([words]))[0, -1].argmax()))
        assert written == words[len(prompt) :]


def test_sampling_repeats_by_its_seed_and_keeps_to_the_likeliest_words():
    write = find_writer(build_gpt())
    hot = Sampling(temperature=5.0, seed=1)
    assert collect(write, sampling=hot) == collect(write, sampling=hot)
    assert collect(write, sampling=hot) != collect(write, sampling=Sampling(temperature=5.0, seed=2))
    assert collect(write, sampling=Sampling(temperature=5.0, top_k=1)) == collect(write)
    scores_BV = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(500, 4)
    drawn_B = choose(scores_BV, Sampling(temperature=1.0, top_k=2), torch.Generator().manual_seed(0))
    assert set(drawn_B.tolist()) == {2, 3}
    share = (drawn_B == 3).double().mean().item()
    assert share == pytest.approx(0.731, abs=0.08), "e / (1 + e)"


def test_whoever_listens_can_end_the_writing():
    seen = []
    find_writer(build_gpt())([[1]], 9, lambda words: seen.append(words) or len(seen) == 3)
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("prompts", "n_new", "said"),
    [
        ([[]], 3, "a prompt is empty"),
        ([[1] * 30], 3, "30 words and 3 new ones are 33, the model was trained on 32"),
    ],
)
def test_prompts_that_cannot_be_written_on_are_refused(prompts, n_new, said):
    with pytest.raises(UsageError, match=said):
        collect(find_writer(build_gpt()), prompts, n_new)


def test_scores_that_are_no_numbers_are_told():
    model = build_gpt()
    torch.nn.init.constant_(model.norm.bias, float("nan"))
    with pytest.raises(FulltiltError, match="NaN or infinite"):
        collect(find_writer(model))


@pytest.mark.filterwarnings("ignore")  # of transformers' own imports
def test_a_model_of_hugging_face_writes_by_its_own_generate():
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    with contextlib.suppress(ConfigError):  # transformers asks for torchvision where it is there
        import_torchvision()
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 39}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    for prompt, written in zip(PROMPTS, collect(find_writer(model)), strict=True):
        assert written == collect(find_writer(model), [prompt])[0], "padding on the left changes nothing"
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert written == whole[0, len(prompt) :].tolist()
    seen = []
    find_writer(model)([[1]], 9, lambda words: seen.append(words) or len(seen) == 3)
    assert len(seen) == 3
    with pytest.raises(UsageError, match="the model was trained on 32"):
        collect(find_writer(model), [[1] * 30], 3)


SMALL = {
    "task": "generation",
    "model": "gpt(depth=1, width=8, heads=2)",
    "data": {"dataset": "text(seq_len=24, vocab_size=100)"},
}


def build_requests(new_tokens=4, **speed):
    values = {**SMALL, "speed": {"threads": 1, **speed}}
    load = Load(requests_per_s=2.0, samples_per_request=2, n_requests=1, seed=0, new_tokens=new_tokens)
    parts = {"base_dir": "", "provenance": {}, "device": "cpu", "weights": None}
    return open_model({"config": config_from_values(values, base_dir="").to_values(), **parts}, load)


def test_requests_write_on_from_beginnings_of_real_samples_and_note_the_first_word():
    threads = torch.get_num_threads()
    try:
        requests = build_requests()
        calls_s = [requests.answer() for _ in range(3)]
        assert requests.said["inputs"] == "validation set, cut to prompts, 4 new words each"
        assert all(0 < first < call for first, call in zip(requests.first_s, calls_s, strict=True))
        lengths = [len(cut_prompt(list(range(24)), requests._draws)) for _ in range(99)]
        assert (min(lengths), max(lengths)) == (3, 12), "an eighth to a half"
        with pytest.raises(UsageError, match="new_tokens 24 leaves no word for a prompt"):
            build_requests(new_tokens=24)
    finally:
        torch.set_num_threads(threads)


def test_a_model_in_a_shorter_format_writes_in_it():
    assert build_requests(precision="bf16").said["levers"]["precision"] == "bf16"
    assert build_requests(precision="bf16")._writer.model.norm.weight.dtype == torch.bfloat16
    build_requests(precision="bf16").answer()


def test_first_word_and_words_a_second_are_targets():
    values = {"first_token_s": {"p95": 0.5}, "tokens_per_s": 100, "requests_per_s": 2}
    values |= {"new_tokens": 10, "samples_per_request": 1}
    config = config_from_values({"task": "generation", "targets": values}, base_dir="")
    targets = plan_targets(config)
    assert [target.name for target in targets] == ["first_token_s_p95", "tokens_per_s"]
    load = plan_load(config, targets)
    assert (load.requests_per_s, load.n_requests, load.new_tokens) == (2, 100, 10)
    times = {"call_s": (0.1,) * 200, "response_s": (0.1,) * 200, "first_token_s": (0.02,) * 200}
    figures = Figures(**times, block_samples=(12,) * 5, block_s=(1.0, 0.99, 1.01, 1.0, 1.0), memory_peak_gib=1.0)
    assert estimate_figure("tokens_per_s", None, figures, load).measured == pytest.approx(120)
    judged = [judge(target, figures, load) for target in targets]
    assert [(j.measured, j.verdict) for j in judged] == [(0.02, "met"), (pytest.approx(120), "met")]
    slow = Target(figure="tokens_per_s", statistic=None, limit=130)
    assert judge(slow, figures, load).verdict == "missed"
    too_much = Load(requests_per_s=20.0, samples_per_request=1, n_requests=100, seed=0, new_tokens=10)
    assert judge(targets[0], figures, too_much).verdict == "missed", "the queue grows, so the first word is late"


def build_client(model=None, max_waiting=16):
    """Build a server that writes → a client of it, its service, and the settings that its route reads."""
    testclient = pytest.importorskip("fastapi.testclient")
    from tests.unit.infer.test_infer_service import Server

    from fulltilt.infer.generate.endpoint import TextService, build_router

    words = ("<unk>", "<eos>", *(f"w{number}" for number in range(38)))
    table = WordTable(words=words, tokenizer="words", ends_lines=True)
    service = TextService(find_writer(model or build_gpt()), table, max_waiting=max_waiting)
    server, settings = Server(), SimpleNamespace(deadline_s=None)
    server.service.close()
    server.app.include_router(build_router(service, settings))
    return testclient.TestClient(server.app, base_url="http://localhost"), server.service, settings


def list_statuses(host):
    """Say how the requests so far are noted to have ended."""
    (*requests,), _ = host.figures.list_requests()
    return [int(status) for _, _, status in requests]


def read_events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_the_service_sends_every_word_and_then_its_times():
    client, host, _ = build_client()
    *words, last = read_events(client.post("/v1/generate", json={"tokens": [1, 2, 3], "max_new_tokens": 5}))
    assert [event["token"] for event in words] == collect(find_writer(build_gpt()), [[1, 2, 3]], 5)[0]
    assert all(event["text"] for event in words)
    assert last["done"]
    assert last["n_tokens"] == 5
    assert 0 < last["first_token_s"] <= last["seconds"]
    ((_, response_s, status),), _ = host.figures.list_requests()
    assert (status, host.n_open) == (200, 0)
    assert response_s >= last["seconds"]
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d says
    text = json.dumps({"prompt": "<eos> w0 w1", "max_new_tokens": 5})
    by_text = read_events(client.post("/v1/generate", content=text, headers=form))
    assert by_text[:-1] == words


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either prompt"),
        ({"prompt": "a", "tokens": [1]}, "either prompt"),
        ({"prompt": ""}, "empty"),
        ({"tokens": [40]}, "the model knows words 0 to 39"),
        ({"tokens": [1] * 30, "max_new_tokens": 3}, "trained on 32"),
        ({"tokens": [1], "beams": 3}, "Extra inputs"),
    ],
)
def test_the_service_says_what_it_cannot_write_on_from(body, said):
    client, host, _ = build_client()
    response = client.post("/v1/generate", json=body)
    assert response.status_code == 422
    assert list_statuses(host) == [422]
    assert said in json.dumps(response.json())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"tokens": [1], "temperature": NaN}', "temperature: Input should be a finite number"),
        (b'{"tokens": [1], "\\ud800": 1}', "Invalid JSON: unexpected end of hex escape"),
        (b'{"tokens": [1], "seed": 1' + 30 * b"0" + b"}", "seed: Input should be less than or equal to"),
        (b"{", "Invalid JSON: EOF while parsing"),
        (b'{"prompt": "\xff"}', "Invalid JSON: invalid unicode"),
    ],
)
def test_what_is_refused_is_not_repeated_since_it_may_have_no_form_in_json(body, said):
    from tests.unit.infer.test_infer_service import Server

    from fulltilt.infer.generate.endpoint import TextService, build_router

    server = Server()
    server.app.include_router(build_router(TextService(find_writer(build_gpt()), None), server.service.settings))

    async def converse(client):
        return await client.post("/v1/generate", content=body)

    answer = server.run(converse)
    assert answer.status_code in (400, 422)
    assert said in answer.json()["error"]


def test_no_more_wait_than_may_although_all_come_at_once():
    from tests.unit.infer.test_infer_service import Server

    from fulltilt.infer.generate.endpoint import TextService, build_router

    server = Server()
    text = TextService(find_writer(build_gpt()), None, max_waiting=2)
    server.app.include_router(build_router(text, server.service.settings))

    async def converse(client):
        asked = (client.post("/v1/generate", json={"tokens": [1], "max_new_tokens": 2}) for _ in range(20))
        return Counter([answer.status_code for answer in await asyncio.gather(*asked)])

    assert server.run(converse) == {200: 3, 429: 17}
    assert (text.n_inside, server.service.n_open) == (0, 0)


@pytest.mark.parametrize("n_heard", [0, 1], ids=["before the first word", "after it"])
def test_a_stream_that_its_client_leaves_is_noted_as_left(n_heard):
    from tests.unit.infer.test_infer_service import Server

    from fulltilt.infer.generate.endpoint import TextService, build_router

    model, server = build_gpt(), Server()
    read_on = model.read_on
    model.read_on = lambda *given: time.sleep(0.05) or read_on(*given)
    text = TextService(find_writer(model), None)
    server.app.include_router(build_router(text, server.service.settings))
    body = json.dumps({"tokens": [1], "max_new_tokens": 25}).encode()

    async def converse(client):
        heard, sent = asyncio.Event(), [{"type": "http.request", "body": body}]

        async def receive():
            if sent:
                return sent.pop()
            if n_heard:
                await heard.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body"):
                heard.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/generate", "query_string": b"", "http_version": "1.1"}
        await server.app(scope | {"headers": [(b"host", b"localhost")], "asgi": {"spec_version": "2.3"}}, receive, send)

    server.run(converse)
    assert list_statuses(server.service) == [499]
    assert (text.n_inside, server.service.n_open) == (0, 0)


def test_a_temperature_near_zero_takes_the_likeliest_word():
    write = find_writer(build_gpt())
    assert collect(write, sampling=Sampling(temperature=1e-300)) == collect(write)


def test_a_flood_is_refused_and_an_error_midway_is_the_last_event():
    client, host, _ = build_client(max_waiting=-1)
    response = client.post("/v1/generate", content=b"no JSON: it is not read")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    host.is_draining = True
    response = client.post("/v1/generate", json={"tokens": [1]})
    assert (response.status_code, response.headers["connection"]) == (503, "close")
    assert list_statuses(host) == [429, 503]
    model = build_gpt()
    read_on = model.read_on

    def break_down(words, cache, n_new=None):
        if n_new is None:
            raise ValueError("planted")
        return read_on(words, cache, n_new)

    model.read_on = break_down
    client, host, _ = build_client(model)
    first, last = read_events(client.post("/v1/generate", json={"tokens": [1], "max_new_tokens": 5}))
    assert "token" in first
    assert "ValueError: planted" in last["error"]
    assert (list_statuses(host), host.n_open) == ([500], 0), "though 200 was sent before"


def test_a_deadline_is_noted_as_one_also_where_it_is_heard_of_a_moment_early(monkeypatch):
    from fulltilt.infer.generate import endpoint

    model, now_s = build_gpt(), time.monotonic()
    read_on = model.read_on
    model.read_on = lambda *given: time.sleep(0.05) or read_on(*given)
    clocks = {"monotonic": lambda: now_s, "perf_counter": time.perf_counter}
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(**clocks))  # it stands still before the deadline
    client, host, _ = build_client(model)
    asked = {"json": {"tokens": [1], "max_new_tokens": 3}, "headers": {"X-Deadline-Ms": "1"}}
    assert "the deadline passed after 0 words" in read_events(client.post("/v1/generate", **asked))[-1]["error"]
    assert list_statuses(host) == [504]


def test_a_deadline_is_noted_as_one_also_where_its_timer_comes_after_the_end_of_the_writing(monkeypatch):
    from fulltilt.infer.generate import endpoint

    model = build_gpt()
    read_on = model.read_on
    model.read_on = lambda *given: time.sleep(0.05) or read_on(*given)
    without_timer = {name: getattr(asyncio, name) for name in ("get_running_loop", "Queue")}
    monkeypatch.setattr(endpoint, "asyncio", SimpleNamespace(**without_timer, wait_for=lambda word, _: word))
    client, host, _ = build_client(model)
    asked = {"json": {"tokens": [1], "max_new_tokens": 9}, "headers": {"X-Deadline-Ms": "120"}}
    *words, last = read_events(client.post("/v1/generate", **asked))
    assert 0 < len(words) < 9
    assert f"the deadline passed after {len(words)} words" in last["error"]
    assert list_statuses(host) == [504]


def test_a_deadline_ends_the_writing_and_the_next_request_is_served():
    model = build_gpt()
    read_on, n_read = model.read_on, []

    def read_slowly(words, cache, n_new=None):
        time.sleep(0.2 if n_new is None else 0.0)
        n_read.append(n_new)
        return read_on(words, cache, n_new)

    model.read_on = read_slowly
    client, host, settings = build_client(model)
    asked = {"json": {"tokens": [1], "max_new_tokens": 25}}
    *words, last = read_events(client.post("/v1/generate", headers={"X-Deadline-Ms": "500"}, **asked))
    assert len(words) < 10
    assert last == {"error": f"the deadline passed after {len(words)} words; ask for fewer, or give it more time"}
    time.sleep(1.0)
    assert len(n_read) < 10, "nobody writes on for a request whose time is over"
    settings.deadline_s = 0.0
    assert "after 0 words" in read_events(client.post("/v1/generate", **asked))[-1]["error"]
    model.read_on = read_on
    assert read_events(client.post("/v1/generate", headers={"X-Deadline-Ms": "60000"}, **asked))[-1]["n_tokens"] == 25
    assert client.post("/v1/generate", headers={"X-Deadline-Ms": "soon"}, **asked).status_code == 400
    assert (list_statuses(host), host.n_open) == ([504, 504, 200, 400], 0)


@pytest.mark.parametrize(
    ("precision", "engine", "n_loads"), [("fp32", "eager", 1), ("bf16", "eager", 1), ("fp32", "onnx", 2)]
)
def test_a_server_writes_with_the_model_that_it_has_loaded_where_its_engine_is_eager(
    tmp_path, monkeypatch, precision, engine, n_loads
):
    testclient = pytest.importorskip("fastapi.testclient")
    from fulltilt.config import inference_plan_of
    from fulltilt.infer.artefact import build_artefact, open_artefact
    from fulltilt.infer.engines import _torch
    from fulltilt.infer.model import build_inference_model
    from fulltilt.infer.serve.app import build_app
    from fulltilt.infer.serve.service import Service, Settings

    config = config_from_values({**SMALL, "speed": {"threads": 1, "precision": precision}}, base_dir="")
    threads, loads, rebuild = torch.get_num_threads(), [], _torch.rebuild_module
    model = build_inference_model(config, device="cpu", n_samples=4)
    assert build_artefact(model, inference_plan_of(config), tmp_path).manifest.writes_text
    monkeypatch.setattr(_torch, "rebuild_module", lambda *given: loads.append(given) or rebuild(*given))
    opened = open_artefact(tmp_path)
    writer = find_writer(opened.run.forward)
    assert next(writer.model.parameters()).dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    opened.plan = opened.plan | {"engine": engine}
    service = Service([opened], Settings(cache_mib=0))
    try:
        client = testclient.TestClient(build_app(service), base_url="http://localhost")
        *words, last = read_events(client.post("/v1/generate", json={"tokens": [1, 2, 3], "max_new_tokens": 4}))
    finally:
        service.close()
        torch.set_num_threads(threads)
    assert [event["token"] for event in words] == collect(writer, [[1, 2, 3]], 4)[0]
    assert last["done"]
    assert len(loads) == n_loads


def build_text_manifest():
    from fulltilt.infer.manifest import InputSpec, Manifest

    spec = InputSpec(name="words", dtype="int64", shape=(None,))
    given = {"name": "m", "plan": {}, "device": "cpu", "inputs": (spec,), "max_length": 3, "built_with": {}}
    return Manifest(**given, n_parameters=1, files={}, config={})


def test_a_service_reads_texts_by_the_words_of_the_training():
    from starlette.exceptions import HTTPException

    from fulltilt.infer.serve.wire import read_samples

    table = WordTable(words=("<pad>", "<unk>", "try", "statement"), tokenizer="words", max_length=3)
    (first,), (second,) = read_samples(b'{"texts": ["try a statement and more", "try"]}', build_text_manifest(), table)
    assert (first.tolist(), second.tolist()) == ([2, 1, 3], [2]), "cut as the training cut"
    for body, words, said in [
        (b'{"texts": ["try"]}', None, "422: the words of the training are not kept"),
        (b'{"texts": [""]}', table, "422: .* its length is 0"),
        (b'{"texts": [3]}', table, "422: texts holds something else than texts"),
        (b'{"texts": 3}', table, "400: the body is not"),
    ]:
        with pytest.raises(HTTPException, match=said):
            read_samples(body, build_text_manifest(), words)


def test_a_training_keeps_its_words_and_refuses_to_go_on_with_others(tmp_path):
    from fulltilt.engine.loop.opening import keep_words
    from fulltilt.errors import RunFolderError

    table = WordTable(words=("<unk>", "a"), tokenizer="words")
    keep_words(tmp_path, SimpleNamespace(word_table=table))
    assert WordTable.read(tmp_path) == table
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "words.json").write_text('{"words": [')
    with pytest.raises(DataError, match=r"words\.json cannot be read \(.*\); train or build anew"):
        WordTable.read(tmp_path / "torn")
    keep_words(tmp_path, SimpleNamespace(word_table=table))
    with pytest.raises(RunFolderError, match="holds other words than the data now"):
        keep_words(tmp_path, SimpleNamespace(word_table=WordTable(words=("<unk>", "b"), tokenizer="words")))
    keep_words(tmp_path / "images", SimpleNamespace())
    assert not (tmp_path / "images").exists()
