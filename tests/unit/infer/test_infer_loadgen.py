"""MLPerf's LoadGen and our generator load the same service: what one says of it the other says too."""

import array
import re
import threading
import time

import numpy as np
import pytest
from benchmarks.infer_acceptance import list_early_stops

from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.load.loop import serve

loadgen = pytest.importorskip("mlperf_loadgen", reason="mlcommons-loadgen is not installed")

STALL_S, STALL_AT, RATE_PER_S, N = 0.5, 100, 100.0, 300


class Service:
    """One worker that sleeps 1 ms a request, once half a second, and notes what each call took."""

    def __init__(self):
        self.calls_s = []

    def answer(self):
        begin_s = time.perf_counter()
        time.sleep(STALL_S if len(self.calls_s) == STALL_AT else 0.001)
        self.calls_s.append(time.perf_counter() - begin_s)
        return self.calls_s[-1]


def run_loadgen(service, scenario, folder, *, n=N, **settings):
    """Run LoadGen on the service and return the text of its summary and of its detailed log."""
    waiting, is_there = [], threading.Condition()

    def issue(samples):
        with is_there:
            waiting.extend(sample.id for sample in samples)
            is_there.notify()

    def work():
        while True:
            with is_there:
                is_there.wait_for(lambda: waiting)
                number = waiting.pop(0)
            if number is None:
                return
            service.answer()
            answer = array.array("B", [0])
            response = loadgen.QuerySampleResponse(number, answer.buffer_info()[0], 1)
            loadgen.QuerySamplesComplete([response])

    chosen = loadgen.TestSettings()
    chosen.scenario, chosen.mode = scenario, loadgen.TestMode.PerformanceOnly
    chosen.min_duration_ms, chosen.min_query_count, chosen.max_query_count = 1, n, n
    for name, value in settings.items():
        setattr(chosen, name, value)
    output = loadgen.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = str(folder), False
    log = loadgen.LogSettings()
    log.log_output, log.enable_trace = output, False
    worker = threading.Thread(target=work)
    worker.start()
    sut, library = loadgen.ConstructSUT(issue, lambda: None), loadgen.ConstructQSL(8, 8, lambda s: None, lambda s: None)
    try:
        loadgen.StartTestWithLogSettings(sut, library, chosen, log, "")
    finally:
        with is_there:
            waiting.append(None)
            is_there.notify()
        worker.join(30)
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)
    return (folder / "mlperf_log_summary.txt").read_text(), (folder / "mlperf_log_detail.txt").read_text()


def read_percentile_ms(summary, percentile):
    return int(re.search(rf"^{percentile} percentile latency \(ns\) *: *(\d+)", summary, re.M)[1]) / 1e6


@pytest.mark.slow
def test_a_single_stream_has_the_percentiles_of_the_calls_in_both(tmp_path):
    theirs, ours = Service(), Service()
    summary, _ = run_loadgen(theirs, loadgen.TestScenario.SingleStream, tmp_path)
    answers = serve(plan_arrivals("single", N, None, seed=0), ours.answer)
    for percentile in (50, 90, 97):
        called_ms = 1000 * np.quantile(theirs.calls_s, percentile / 100)
        assert read_percentile_ms(summary, f"{percentile:.2f}") >= 0.999 * called_ms
        called_s = np.quantile(ours.calls_s, percentile / 100)
        assert np.quantile([a.response_s for a in answers], percentile / 100) >= 0.999 * called_s
    assert len(theirs.calls_s) == len(answers) == N


@pytest.mark.slow
def test_a_stream_of_eight_samples_a_request_takes_as_long_as_its_eight_calls_in_both(tmp_path):
    theirs, ours, n = Service(), Service(), 40
    settings = {"multi_stream_samples_per_query": 8}
    summary, _ = run_loadgen(theirs, loadgen.TestScenario.MultiStream, tmp_path, n=n, **settings)
    answers = serve(plan_arrivals("multi", n, None, seed=0), lambda: sum(ours.answer() for _ in range(8)))
    responses_s = [a.response_s for a in answers]
    for service, read_ms in (
        (theirs, lambda percentile: read_percentile_ms(summary, f"{percentile:.2f}")),
        (ours, lambda percentile: 1000 * np.quantile(responses_s, percentile / 100, method="inverted_cdf")),
    ):
        assert len(service.calls_s) == 8 * n
        called_ms = 1000 * np.reshape(service.calls_s, (n, 8)).sum(axis=1)
        for percentile in (50, 90, 99):
            assert read_ms(percentile) >= 0.999 * np.quantile(called_ms, percentile / 100, method="lower")
        assert read_ms(50) <= 2 * np.quantile(called_ms, 0.5)
        assert read_ms(99) >= 1000 * STALL_S, "the stall is in one of forty"


@pytest.mark.slow
def test_offline_both_tell_the_samples_a_second_of_the_calls(tmp_path):
    theirs, ours = Service(), Service()
    summary, _ = run_loadgen(theirs, loadgen.TestScenario.Offline, tmp_path, offline_expected_qps=1.0)
    rate_per_s = float(re.search(r"^Samples per second: *(\S+)", summary, re.M)[1])
    answers = serve(plan_arrivals("offline", N, None, seed=0), ours.answer)
    for service, found_per_s in ((theirs, rate_per_s), (ours, N / answers[-1].end_s)):
        assert len(service.calls_s) == N
        assert 0.5 < found_per_s * sum(service.calls_s) / N <= 1.001


@pytest.mark.slow
def test_a_stall_is_in_the_percentiles_of_both_under_poisson_arrivals(tmp_path):
    settings = {"server_target_qps": RATE_PER_S, "server_target_latency_ns": 10**9}
    summary, _ = run_loadgen(Service(), loadgen.TestScenario.Server, tmp_path, **settings)
    answers = serve(plan_arrivals("server", N, RATE_PER_S, seed=0), Service().answer)
    # half a second at 100 a second: 50 of 300 waited, the first ones nearly all of it
    for p90_ms in (read_percentile_ms(summary, "90.00"), 1000 * np.quantile([a.response_s for a in answers], 0.9)):
        assert p90_ms >= 100


@pytest.mark.slow
def test_early_stopping_takes_the_queries_of_the_table(tmp_path):
    stops = list_early_stops(0.99)
    assert [next(stops) for _ in range(6)][:3] == [459, 662, 838]
    assert next(list_early_stops(0.9)) == 44
    settings = {"server_target_qps": 2000.0, "server_target_latency_ns": 10**10}
    for n, is_enough in ((458, False), (459, True)):
        summary, _ = run_loadgen(Service(), loadgen.TestScenario.Server, tmp_path, n=n, **settings)
        assert ("Early stopping satisfied: Yes" in summary) == is_enough, summary
