"""The HTTP contract of a service, on a model that adds up: what is answered, shared, refused, and given up."""

import argparse
import asyncio
import base64
import importlib.util
import json
import math
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from tests.unit.infer.fake_artefact import FAILS, IS_NAN, FakeArtefact, build_manifest, build_sample

from fulltilt.cli import _infer_serve, run_command
from fulltilt.cli._shared import build_console
from fulltilt.config import inference_plan_of, load_config
from fulltilt.infer.artefact import Artefact, build_artefact
from fulltilt.infer.manifest import InputSpec, Policy
from fulltilt.infer.model import build_inference_model
from fulltilt.infer.serve.app import MOST_BODY_BYTES, build_app
from fulltilt.infer.serve.service import GONE, Service, Settings

TWO = (InputSpec(name="ids", dtype="int64", shape=(None,)), InputSpec(name="mask", dtype="bool", shape=(None,)))
IMAGE = (InputSpec(name="x", dtype="float32", shape=(2, 2)),)
KEY = "a token of this test"


class Server:
    """A service and its application, asked within the process."""

    def __init__(self, *artefacts, token=None, **settings):
        self.model, self.notes = artefacts[0] if artefacts else FakeArtefact(), []
        self.service = Service(artefacts or (self.model,), Settings(**settings), say=self.notes.append)
        self.app = build_app(self.service, token=token)

    def run(self, converse):
        """Run a conversation with the server in a loop of its own, and end the server."""

        async def run():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
                return await converse(client)

        try:
            return asyncio.run(run())
        finally:
            if isinstance(self.model, FakeArtefact):
                self.model.gate.set()
            self.service.close()

    def ask(self, *bodies, headers=None):
        """Send one request after the other → status and document of each."""

        async def converse(client):
            answers = [await post(client, body, headers=headers) for body in bodies]
            return [(answer.status_code, answer.json()) for answer in answers]

        return self.run(converse)


def post(client, body, **options):
    content = body if isinstance(body, (str, bytes)) else json.dumps({"inputs": body})
    return client.post("/v1/predict", content=content, **options)


async def wait_for(is_so):
    while not is_so():
        await asyncio.sleep(0.005)


def test_samples_are_answered_in_order_and_equal_ones_the_second_time_from_memory():
    first, second = Server().ask([[1, 2], [3]], [[3], [4, 4, 4]])
    assert first == (200, {"outputs": [[3.0], [3.0]], "cached": [False, False]})
    assert second == (200, {"outputs": [[3.0], [12.0]], "cached": [True, False]})


def test_the_bidirectional_language_model_is_served_as_it_answers(tmp_path):
    words = ["model=bilm(depth=1, embedding=16, hidden=16, projection=8)", "num_workers=0", "device=cpu"]
    path = Path(__file__).parents[3] / "configs" / "elmo_depth-2_seed-42.yaml"
    config = load_config(path, [*words, "dataset=text(seq_len=12, vocab_size=300)"])
    model = build_inference_model(config, device="cpu", n_samples=12)
    built = build_artefact(model, inference_plan_of(config), tmp_path)
    assert (built.manifest.joins, built.manifest.inputs[0].below) == ("pad", 300)
    ((status, answered),) = Server(built).ask([sample[0].tolist() for sample in model.samples[:3]])
    assert status == 200
    for given, expected in zip(answered["outputs"], model.answer(model.samples[:3]), strict=True):
        for mine, theirs in zip(given, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_several_inputs_are_a_list_each_and_are_joined():
    server = Server(FakeArtefact(build_manifest(*TWO)))
    assert server.ask([[[1, 2], [True, False]], [[5], [True]]])[0][1]["outputs"] == [[4.0], [6.0]]
    assert sorted(len(call) for call in server.model.calls) in ([1, 1], [2])


def test_an_artefact_that_joins_nothing_gets_one_sample_a_batch():
    server = Server(FakeArtefact(build_manifest(joins="alone", policy=Policy(max_batch=8))))
    assert server.ask([[1, 0], [2, 0], [3, 0]])[0][0] == 200
    assert [len(call) for call in server.model.calls] == [1, 1, 1]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("{", 400, "is not JSON"),
        ("[" * 100_000, 400, "is not JSON"),
        ('{"inputs": [[NaN]]}', 422, "x holds a number that float32 does not"),
        ("[[1]]", 400, 'is not {"inputs": [sample, …]}'),
        ('{"inputs": 1}', 400, "send an object with one such list"),
        ('{"inputs": [[1]], "texts": ["a"]}', 400, "send an object with one such list"),
        ([], 422, "holds no sample"),
        ([[1], 2], 422, "inputs[1]: x has shape []; expected x: float32 of shape [length ≤ 8]"),
        ([[[1, 2]]], 422, "x has shape [1, 2]"),
        ([["1"]], 422, "x holds something else than numbers"),
        ([[2**64]], 422, "x holds something else than numbers of 64 bits"),
        ([[None]], 422, "x holds something else than numbers"),
        ([[1, [2]]], 422, "x is ragged"),
        ([[1e39]], 422, "x holds a number that float32 does not"),
        ([[]], 422, "its length is 0"),
        ([list(range(9))], 422, "its length is 9; expected x: float32 of shape [length ≤ 8]"),
    ],
)
def test_what_the_model_does_not_take_is_refused_with_what_it_does(body, status, said):
    server = Server()
    refused, answered = server.ask(body, [[1]])
    assert refused[0] == status
    assert said in refused[1]["error"]
    assert (answered[0], server.model.calls) == (200, [[1.0]]), "only the good one reached the model"


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ([[1.5], [True]], "ids holds float64"),
        ([[2**63], [True]], "ids holds a number that int64 does not"),
        ([[1, 2], [True]], "differ in length: ids 2, mask 1"),
        ([[1], [2]], "mask holds int64"),
        ([[1]], "is not a list of the 2 inputs"),
    ],
)
def test_types_and_lengths_of_several_inputs_are_held_to(sample, said):
    ((status, document),) = Server(FakeArtefact(build_manifest(*TWO))).ask([sample])
    assert (status, said in document["error"]) == (422, True), document
    assert "expected ids: int64 of shape [length ≤ 8]; mask: bool of shape [length ≤ 8]" in document["error"]


def test_numbers_of_words_that_the_model_has_not_never_reach_it():
    ids = InputSpec(name="ids", dtype="int64", shape=(None,), below=5)
    server = Server(FakeArtefact(build_manifest(ids)))
    too_large, negative, good = server.ask([[1, 5]], [[-1]], [[4, 0]])
    assert (too_large[0], negative[0], good[0]) == (422, 422, 200)
    assert "inputs[0]: ids holds a number that is not 0 to 4; expected ids: int64" in too_large[1]["error"]
    assert server.model.calls == [[4.0]]


@pytest.mark.parametrize("said", ["1" + 400 * "0", "9" * 5000, "soon"])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(said):
    ((status, document),) = Server().ask([[1]], headers={"X-Deadline-Ms": said})
    assert (status, "is not 1 to 13 digits; send milliseconds" in document["error"]) == (400, True)
    assert len(document["error"]) < 200


def test_a_wrong_question_is_refused_in_the_same_form_as_a_wrong_sample():
    async def converse(client):
        return await client.get("/v1/samples?n=all")

    answer = Server().run(converse)
    assert (answer.status_code, answer.json()["error"].startswith("n: ")) == (422, True)


def test_samples_are_counted_before_they_are_read():
    ((status, document),) = Server(n_waiting=3).ask([["no number"]] * 4)
    assert (status, document["error"]) == (413, "4 samples are more than may wait (3); send fewer")


def test_fixed_shapes_are_held_to():
    server = Server(FakeArtefact(build_manifest(*IMAGE, max_length=None)))
    good, bad = server.ask([[[1, 2], [3, 4]]], [[[1, 2, 3]]])
    assert (good[0], bad[0]) == (200, 422)
    assert "x has shape [1, 3]; expected x: float32 of shape [2, 2]" in bad[1]["error"]


def test_bodies_and_requests_beyond_the_limits_are_refused():
    async def converse(client):
        large = b" " * (MOST_BODY_BYTES + 1)

        async def send_pieces():  # without saying how many there are
            yield large

        sent = [[1]] * 4, large, [[1]] * 3
        return *[await post(client, body) for body in sent], await client.post("/v1/predict", content=send_pieces())

    too_many, too_large, good, endless = Server(n_waiting=3).run(converse)
    assert [answer.status_code for answer in (too_many, too_large, good, endless)] == [413, 413, 200, 413]
    assert "4 samples are more than may wait (3); send fewer" in too_many.text
    said = {"error": "the body is beyond 16 MiB; send fewer samples in a request"}
    assert too_large.json() == endless.json() == said


@pytest.mark.parametrize(("poison", "said"), [(FAILS, "out of bounds"), (IS_NAN, "are NaN or infinite")])
def test_a_poisoned_request_fails_and_those_in_its_batch_do_not(poison, said):
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=8))))

    async def converse(client):
        server.model.gate.clear()
        first = asyncio.create_task(post(client, [[9]]))  # while the model has it, the others gather
        await wait_for(server.model.has_begun.is_set)
        rest = [asyncio.create_task(post(client, [[value]])) for value in (1, poison, 2)]
        await wait_for(lambda: server.service.n_waiting == 3)
        server.model.gate.set()
        return await asyncio.gather(first, *rest)

    answers = server.run(converse)
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200]
    assert said in answers[2].json()["error"]
    assert [9.0] in server.model.calls
    assert [1.0, poison, 2.0] in server.model.calls, "they were one batch"


def test_a_hundred_equal_requests_at_once_are_one_call_of_the_model():
    server = Server(n_waiting=4)

    async def converse(client):
        server.model.gate.clear()
        tasks = [asyncio.create_task(post(client, [[7, 1]])) for _ in range(100)]
        await wait_for(server.model.has_begun.is_set)
        await wait_for(lambda: server.service.n_open == 100)
        server.model.gate.set()
        return await asyncio.gather(*tasks)

    answers = server.run(converse)
    assert {answer.text for answer in answers} == {'{"outputs":[[8.0]],"cached":[false]}'}
    assert server.model.calls == [[7.0]]
    assert server.service.figures.sources == {"model": 1, "shared": 99, "memory": 0, "disk": 0}


def test_equal_samples_of_one_request_are_answered_once_and_failures_are_not_kept():
    server = Server()
    (status, document), failed, again = server.ask([[5], [5], [5]], [[FAILS]], [[FAILS]])
    assert (status, document["outputs"]) == (200, [[5.0]] * 3)
    assert (failed[0], again[0]) == (500, 500)
    assert server.model.calls == [[5.0], [FAILS], [FAILS]]


def test_without_a_cache_every_sample_is_computed():
    server = Server(cache_mib=0)
    assert server.ask([[5], [5]], [[5]])[1] == (200, {"outputs": [[5.0]], "cached": [False]})
    assert sum(map(len, server.model.calls)) == 3


def test_a_full_line_refuses_says_when_to_come_again_and_goes_on():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=1))), n_waiting=3)

    async def converse(client):
        server.model.gate.clear()
        tasks = [asyncio.create_task(post(client, [[1]]))]
        await wait_for(server.model.has_begun.is_set)
        tasks += [asyncio.create_task(post(client, [[value]])) for value in (2, 3)]
        await wait_for(lambda: server.service.n_waiting == 2)
        assert (await post(client, [[8], [9]])).status_code == 429, "all of its samples, or none"
        tasks += [asyncio.create_task(post(client, [[4]]))]
        await wait_for(lambda: server.service.n_waiting == 3)
        flood = [await post(client, [[value]]) for value in range(20, 70)]
        known = await client.get("/healthz"), await client.get("/readyz")
        server.model.gate.set()
        return flood, known, await asyncio.gather(*tasks), await post(client, [[5]])

    flood, known, accepted, later = server.run(converse)
    assert {answer.status_code for answer in flood} == {429}
    assert int(flood[0].headers["retry-after"]) >= 1
    assert flood[0].json() == {"error": "3 samples wait already; come again later"}
    assert [answer.status_code for answer in (*known, *accepted, later)] == [200] * 7
    assert server.model.calls == [[1.0], [2.0], [3.0], [4.0], [5.0]]


def test_a_deadline_that_passes_in_line_is_an_answer_and_never_reaches_the_model():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=1))), deadline_s=30.0)

    async def converse(client):
        server.model.gate.clear()
        begun = asyncio.create_task(post(client, [[1]], headers={"X-Deadline-Ms": "50"}))
        await wait_for(server.model.has_begun.is_set)
        late = await post(client, [[2]], headers={"X-Deadline-Ms": "50"})
        patient = asyncio.create_task(post(client, [[3]]))
        await wait_for(lambda: server.service.n_waiting == 1)
        server.model.gate.set()
        wrong = [await post(client, [[4]], headers={"X-Deadline-Ms": text}) for text in ("soon", "0", "-1", "9" * 400)]
        return await begun, late, await patient, *wrong

    begun, late, patient, *wrong = server.run(converse)
    assert [answer.status_code for answer in (begun, late, patient, *wrong)] == [200, 504, 200, *[400] * 4]
    assert late.json() == {"error": "the deadline passed before the model began; give it more time"}
    assert server.model.calls == [[1.0], [3.0]]


def test_who_shares_a_sample_with_more_time_is_not_late_with_the_first():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=1))))

    async def converse(client):
        server.model.gate.clear()
        begun = asyncio.create_task(post(client, [[1]]))
        await wait_for(server.model.has_begun.is_set)
        hasty = asyncio.create_task(post(client, [[2]], headers={"X-Deadline-Ms": "50"}))
        await wait_for(lambda: server.service.n_waiting == 1)
        patient = asyncio.create_task(post(client, [[2]]))
        await hasty
        server.model.gate.set()
        return await begun, await hasty, await patient

    assert [answer.status_code for answer in server.run(converse)] == [200, 504, 200]
    assert server.model.calls == [[1.0], [2.0]]


def test_a_client_that_goes_away_takes_its_samples_out_of_line():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=1))))
    is_gone = False

    async def ask_gone():
        return is_gone

    async def converse(client):
        nonlocal is_gone
        server.model.gate.clear()
        begun = asyncio.create_task(post(client, [[1]]))
        await wait_for(server.model.has_begun.is_set)
        asked = [(np.array([value], np.float32),) for value in (2, 3)]
        leaving = asyncio.create_task(server.service.answer(asked, deadline_s=math.inf, is_gone=ask_gone))
        staying = asyncio.create_task(post(client, [[3]]))
        await wait_for(lambda: server.service.n_waiting == 2)
        is_gone = True
        await asyncio.wait([leaving])
        n_left = server.service.n_waiting
        server.model.gate.set()
        return leaving.exception().status_code, n_left, (await begun).status_code, (await staying).status_code

    assert server.run(converse) == (GONE, 1, 200, 200)
    assert server.model.calls == [[1.0], [3.0]], "the sample that another wants too stays"


def test_a_request_that_is_cancelled_takes_its_samples_out_of_line():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=1))))

    async def converse(client):
        server.model.gate.clear()
        begun = asyncio.create_task(post(client, [[1]]))
        await wait_for(server.model.has_begun.is_set)
        cancelled, staying = (asyncio.create_task(post(client, body)) for body in ([[2], [3]], [[3]]))
        await wait_for(lambda: server.service.n_waiting == 2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        server.model.gate.set()
        return [(await task).status_code for task in (begun, staying)], server.service.n_open

    assert server.run(converse) == ([200, 200], 0)
    assert server.model.calls == [[1.0], [3.0]]


def test_two_replicas_answer_side_by_side():
    models = [FakeArtefact(build_manifest(policy=Policy(max_batch=1))) for _ in range(2)]
    server = Server(*models)

    async def converse(client):
        for model in models:
            model.gate.clear()
        tasks = [asyncio.create_task(post(client, [[value]])) for value in (1, 2)]
        await wait_for(lambda: all(model.has_begun.is_set() for model in models))
        for model in models:
            model.gate.set()
        return [answer.status_code for answer in await asyncio.gather(*tasks)]

    assert server.run(converse) == [200, 200]


def test_a_service_that_drains_refuses_and_says_so():
    server = Server()

    async def converse(client):
        before = await client.get("/readyz")
        server.service.is_draining = True
        return before, await client.get("/readyz"), await post(client, [[1]]), await client.get("/healthz")

    before, ready, refused, health = server.run(converse)
    assert [answer.status_code for answer in (before, ready, refused, health)] == [200, 503, 503, 200]
    assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")


def test_real_samples_are_offered_in_the_form_that_is_taken():
    async def converse(client):
        offered = await client.get("/v1/samples?n=2")
        return offered.json(), (await post(client, offered.text)).json(), (await client.get("/v1/manifest")).json()

    offered, answered, manifest = Server(FakeArtefact(notes=("eager answers",))).run(converse)
    assert offered == {"inputs": [[1.0, 2.0, 3.0], [1.0]]}
    assert answered["outputs"] == [[6.0], [1.0]]
    assert (manifest["name"], manifest["notes"]) == ("adder", ["eager answers"])


def test_of_large_samples_fewer_are_offered():
    async def converse(client):
        return [len((await client.get(f"/v1/samples?n={n}")).json()["inputs"]) for n in (1, 3)]

    model = FakeArtefact(build_manifest(*IMAGE, max_length=None))
    for size, offered in ((300_000, [1, 3]), (400_000, [1, 2]), (2_000_000, [1, 1])):
        model.samples = (
            (np.zeros((1, 1), np.float32),),
            (np.zeros((1, size), np.int8),),
            (np.zeros((1, 1), np.float32),),
        )
        assert Server(model).run(converse) == offered


def test_metrics_tell_of_requests_batches_and_where_answers_came_from():
    async def converse(client):
        for body in ([[1, 2, 3], [4]], [[4]], "{"):
            await post(client, body)
        return (await client.get("/metrics")).text

    lines = dict(line.rsplit(" ", 1) for line in Server().run(converse).splitlines() if line[0] != "#")
    assert lines['fulltilt_infer_requests_total{status="200"}'] == "2.0"
    assert lines['fulltilt_infer_requests_total{status="400"}'] == "1.0"
    assert lines['fulltilt_infer_answers_total{source="memory"}'] == "1.0"
    assert lines["fulltilt_infer_batch_samples_sum"] == "2.0"
    assert lines["fulltilt_infer_response_seconds_count"] == "2.0"
    assert lines["fulltilt_infer_waiting_samples"] == "0.0"


def test_each_replica_has_answered_its_shortest_and_longest_before_it_serves():
    models = [FakeArtefact(build_manifest(policy=Policy(max_batch=4, max_tokens=24))) for _ in range(2)]
    Service(models, Settings(), is_warmed_up=True).close()
    for model in models:
        assert model.calls == [[1.0], [1.0] * 3], "as many as the policy lets in, of 8 elements"


def test_samples_that_are_not_as_the_manifest_has_them_do_not_keep_the_server_from_starting():
    service = Service([FakeArtefact(build_manifest(*TWO))], Settings(), is_warmed_up=True)
    service.close()
    assert service.n_waiting == 0


def test_a_batch_beyond_memory_is_halved_later_ones_stay_small_and_everybody_hears_of_it():
    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=8)), most_samples=3))

    async def converse(client):
        answers = [await post(client, [[value] for value in range(first, first + 16)]) for first in (20, 40)]
        return (
            [answer.json()["outputs"] for answer in answers],
            (await client.get("/metrics")).text,
            await client.get("/"),
        )

    outputs, metrics, page = server.run(converse)
    assert outputs == [[[float(value)] for value in range(first, first + 16)] for first in (20, 40)]
    sizes = [len(call) for call in server.model.calls]
    assert sizes == [8, 4, 2, 2, 4, 2, 2] + [2] * 12
    said = [f"memory ran out; from now on a batch has at most {n} samples" for n in (4, 2)]
    assert server.notes == said
    assert "fulltilt_infer_max_batch 2.0" in metrics
    assert said[-1] in page.text


def test_a_note_that_nobody_can_read_any_more_ends_no_model():
    def say(note):
        raise BrokenPipeError

    server = Server(FakeArtefact(build_manifest(policy=Policy(max_batch=8)), most_samples=3, notes=("a note",)))
    server.service._say = say
    (status, document), again = server.ask([[value] for value in range(20, 28)], [[40]])
    assert (status, document["outputs"]) == (200, [[float(value)] for value in range(20, 28)])
    assert again[0] == 200
    assert len(server.service.notes) == 3


def test_a_model_that_padding_changes_is_not_asked_with_a_sample_that_would_be_padded():
    server = Server(FakeArtefact(build_manifest(joins="alone")))
    (refused, said), (answered, _) = server.ask([[1]], [[1, 2]])
    assert (refused, answered) == (422, 200)
    assert "its length is 1" in said["error"]


def test_one_sample_beyond_memory_fails_alone():
    server = Server(FakeArtefact(most_samples=0))
    assert server.ask([[1]])[0][0] == 500
    assert server.notes == ["memory ran out; from now on a batch has at most 1 samples"]


def test_a_token_is_asked_of_everybody_but_probes_and_a_browser_gives_it_as_its_password():
    async def converse(client):
        basic = base64.b64encode(f"me:{KEY}".encode()).decode()
        given = [{}, {"Authorization": "Bearer x"}, {"Authorization": "Basic !"}, {"Authorization": f"Bearer {KEY}"}]
        given += [{"Authorization": f"Basic {basic}"}]
        statuses = [(await client.get(path, headers=each)).status_code for each in given for path in ("/", "/metrics")]
        return statuses, (await client.get("/healthz")).status_code, await post(client, [[1]])

    statuses, health, refused = Server(token=KEY).run(converse)
    assert statuses == [401] * 6 + [200] * 4
    assert (health, refused.status_code) == (200, 401)
    assert refused.headers["www-authenticate"].startswith("Basic")


def test_other_names_and_other_sites_are_refused():
    async def converse(client):
        foreign = await client.get("/", headers={"Host": "evil.example"})
        return foreign, await post(client, [[1]], headers={"Origin": "http://evil.example"})

    assert [answer.status_code for answer in Server().run(converse)] == [421, 403]


def test_the_page_shows_the_figures_and_nothing_of_others_hosts():
    async def converse(client):
        empty = (await client.get("/")).text
        for body in ([[1, 2, 3], [4]], [[4]], "{"):
            await post(client, body)
        assets = [
            await client.get(f"/static/{n}") for n in ("pages.css", "charts.css", "infer.js", "vendor/htmx.min.js")
        ]
        return empty, (await client.get("/")).text, [asset.status_code for asset in assets]

    empty, page, assets = Server(FakeArtefact(build_manifest(name="<b>x</b>"))).run(converse)
    assert "nothing was measured" in empty
    for said in (
        "&lt;b&gt;x&lt;/b&gt;",
        "1 refused or failed",
        "33 % of 3 samples since the start were answered without the model",
        "length ≤ 8",
        "% within",
    ):
        assert said in page, said
    assert assets == [200] * 4
    assert "<script>" not in page
    assert "//" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["empty"], "holds no manifest.json; name an artefact's folder, or a configuration"),
        (["artefact", "speed.threads=2"], "is an artefact, whose plan is settled; serve its CONFIG to change settings"),
        (["empty", "--cache-expiry", "soon"], "--cache-expiry 'soon' is not a duration"),
        (["artefact", "--queue", "0"], "--queue 0 must be 1 or more"),
        (["artefact", "--cache-disk-mib", "-1"], "--cache-disk-mib -1 must be 0 or more"),
        (["artefact", "--port", "70000"], "127.0.0.1:70000 cannot be used"),
        (
            ["artefact", "--host", "0.0.0.0", "--insecure-lan", "--port", "0", "--out", "artefact/manifest.json"],
            "the token has no place: ",
        ),
        (["artefact", "--port", "0"], "manifest.json cannot be read"),
        (["artefact", "--host", "0.0.0.0"], "--insecure-lan where everybody on it is trusted"),
        (["artefact", "--host", "0.0.0.0", "--tls-key", "k"], "belong together; give both"),
        (["artefact", "--most-replicas", "3"], "--most-replicas needs --engine ray"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_opened(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "artefact"):
        (tmp_path / name).mkdir()
    (tmp_path / "artefact" / "manifest.json").write_text("{}")
    assert run_command(["infer", "serve", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_ray_is_looked_for_before_a_model_is_trained(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else find_spec(name))
    assert run_command(["infer", "serve", "configs/targets.yaml", "--engine", "ray"]) == 2
    assert "needs Ray Serve, which is not installed" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("given", "stated", "n_waiting"), [(None, 32, 256), (None, None, 512), (4, None, 4)])
def test_as_many_samples_may_wait_as_a_whole_request_has(tmp_path, given, stated, n_waiting):
    args = argparse.Namespace(cache_mib=0, cache_disk_mib=0, queue=given, deadline_ms=None)
    config = {"targets": {"samples_per_request": stated}, "data": {"batch_size": 512}}
    assert _infer_serve._build_settings(args, tmp_path, 1.0, config).n_waiting == n_waiting


@pytest.mark.parametrize(
    ("writes", "asked"), [(True, '/v1/generate -d \'{"tokens": [1], '), (False, "/v1/predict --json")]
)
def test_what_to_try_first_is_what_the_model_does(writes, asked, tmp_path, capsys):
    _infer_serve._print_start(build_console(), tmp_path, "http://here", None, writes_text=writes)
    assert f"http://here{asked}" in capsys.readouterr().out


def test_batches_reach_the_model_padded_to_their_longest(tmp_path):
    shapes = []

    def run(inputs):
        shapes.append(inputs[0].shape)
        return (inputs[0].sum(axis=1, keepdims=True),)

    manifest = build_manifest(policy=Policy(max_batch=4), outputs_vary=(False,))
    outputs = Artefact(tmp_path, manifest, run, None).answer([build_sample(1, 2, 3, 4, 5), build_sample(1)])
    assert [array.tolist() for (array,) in outputs] == [[15.0], [1.0]]
    assert shapes == [(2, 5)]
