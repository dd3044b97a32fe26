"""Which samples share a batch, and what a failure takes with it: decisions, without a model."""

import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.infer.fake_artefact import FAILS, IS_NAN, SPOILS, FakeArtefact, build_sample

from fulltilt.errors import DeviceMemoryError
from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.answering import AnswerError, answer_each, is_memory_error
from fulltilt.infer.serve.batcher import LOOK_AHEAD, choose_batch


def choose(lengths, **policy):
    return choose_batch([SimpleNamespace(length=length) for length in lengths], Policy(**policy))


def test_the_oldest_is_joined_by_those_nearest_in_length():
    assert choose([10, 50, 11, 9, 12], max_batch=3) == [0, 2, 3]
    assert choose([50, 10, 11, 49, 12], max_batch=2) == [0, 3]
    assert choose([7, 7, 7, 7], max_batch=3) == [0, 1, 2], "of equal ones those that wait longest"


def test_padded_elements_bound_a_batch_and_the_oldest_goes_alone_where_it_is_beyond():
    assert choose([10, 10, 10, 10], max_batch=9, max_tokens=30) == [0, 1, 2]
    assert choose([10, 16, 9], max_batch=9, max_tokens=31) == [0, 2], "16 would make it 32"
    assert choose([100, 5], max_batch=9, max_tokens=30) == [0]


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=40),
    st.integers(1, 16),
    st.none() | st.integers(1, 2000),
)
def test_a_batch_keeps_the_policy_and_nobody_who_fits_is_left_out(lengths, max_batch, max_tokens):
    def cost(places):
        return len(places) * max(lengths[place] for place in places)

    chosen = choose(lengths, max_batch=max_batch, max_tokens=max_tokens)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen) <= max_batch
    limit = math.inf if max_tokens is None else max_tokens
    assert len(chosen) == 1 or cost(chosen) <= limit
    if len(chosen) < max_batch:
        left = set(range(len(lengths))) - set(chosen)
        assert all(cost([*chosen, place]) > limit for place in left), "the model would idle on work that waits"


def test_a_long_line_does_not_make_the_decision_slow():
    assert max(choose([9] * LOOK_AHEAD + [1] * 50_000, max_batch=LOOK_AHEAD + 9)) == LOOK_AHEAD - 1


def test_a_poisoned_sample_fails_alone_and_the_others_of_its_batch_are_answered():
    model = FakeArtefact()
    results = answer_each([build_sample(n) for n in (1, 2, FAILS, 4, 5, 6, 7)], model.answer, pytest.fail)
    assert isinstance(results[2], AnswerError)
    assert "ValueError: index 13 is out of bounds" in str(results[2])
    assert [float(outputs[0][0]) for n, outputs in enumerate(results) if n != 2] == [1, 2, 4, 5, 6, 7]
    assert len(model.calls) <= 2 * math.ceil(math.log2(7)) + 1


def test_a_model_that_ends_its_thread_fails_its_sample_alone():
    def answer(samples):
        if any(sample[0][0] == FAILS for sample in samples):
            raise SystemExit("bye")
        return list(samples)

    samples = [build_sample(value) for value in (1, FAILS, 2)]
    first, failed, last = answer_each(samples, answer, lambda n: None)
    assert (first, last) == (samples[0], samples[2])
    assert "SystemExit: bye" in str(failed)


def test_outputs_that_are_no_numbers_fail_their_sample_and_not_those_that_they_spoilt():
    model = FakeArtefact()
    results = answer_each([build_sample(1), build_sample(IS_NAN), build_sample(2)], model.answer, pytest.fail)
    assert [isinstance(result, AnswerError) for result in results] == [False, True, False]
    assert str(results[1]) == "1 of 1 outputs of the model are NaN or infinite"
    results = answer_each([build_sample(1), build_sample(SPOILS)], model.answer, pytest.fail)
    assert [isinstance(result, AnswerError) for result in results] == [False, True], "alone it is a number"


def test_a_model_that_answers_too_few_is_no_answer_to_anybody():
    results = answer_each([build_sample(1), build_sample(2)], lambda samples: [], pytest.fail)
    assert ["the model returned 0 outputs for 1 samples" in str(result) for result in results] == [True, True]


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's."""


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"), True),
        (DeviceMemoryError("no room"), True),
        (ValueError("index out of bounds"), False),
    ],
)
def test_what_is_about_memory_is_known_by_class_and_words(error, is_memory):
    assert is_memory_error(error) is is_memory


def test_what_a_failed_call_held_is_free_before_the_halves_are_answered():
    held, sizes = weakref.WeakSet(), []

    class Memory:
        pass

    def answer(samples):
        sizes.append(len(samples))
        memory = [Memory() for _ in samples]
        held.update(memory)
        if len(held) > 4:
            raise MemoryError("no room")
        return [(np.zeros(1),) for _ in samples]

    results = answer_each([build_sample(n) for n in range(8)], answer, lambda n: None)
    assert sizes == [8, 4, 4]
    assert not any(isinstance(result, AnswerError) for result in results)
