"""How ``memory_prediction`` counts: settings of one model err alike."""

from __future__ import annotations

import pytest
from benchmarks._memory_cases import MODELS, build_cases
from benchmarks._runner import RESULTS
from benchmarks._schema import BenchmarkResult
from benchmarks.memory_prediction import ALL_CASES, find_model, judge_again

from fulltilt.records import loads


def test_every_case_belongs_to_its_model():
    found = [find_model(case.name) for case in build_cases()]
    assert set(found) == {model.name for model in MODELS}
    assert find_model("own sensor_transformer, diffusion, adam, fused") == "own sensor_transformer, diffusion"
    with pytest.raises(LookupError, match="begins with no model's name; did you mean own small_cnn"):
        find_model("own small_cnm, adamw")


def test_a_kept_result_is_judged_by_models_without_a_run():
    kept = loads(BenchmarkResult, (RESULTS / "memory_prediction-cpu.json").read_text("utf-8"))
    again = judge_again(kept)
    summaries = [arm for arm in again.arms if arm.case == ALL_CASES]
    assert {arm.n for arm in summaries} == {len(MODELS)}
    assert [arm.samples for arm in again.arms] == [arm.samples for arm in kept.arms]
    median, p95 = again.targets
    assert median.ci95 == summaries[0].ci95
    assert p95.ci95[1] is None, f"{len(MODELS)} models do not bound a 95th percentile"
    assert p95.met is None
    assert judge_again(again) == again
