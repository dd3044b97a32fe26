import signal

import pytest

from fulltilt.records import Evidence, classify_outcome

OUT_OF_MEMORY_SPELLINGS = [
    ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.76 GiB"),
    ("RuntimeError", "CUDA error: out of memory"),
    ("RuntimeError", "HIP out of memory. Tried to allocate 20.00 MiB"),
    ("RuntimeError", "MPS backend out of memory (MPS allocated: 17.00 GB, max allowed: 18.13 GB)"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("RuntimeError", "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
    ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes."),
    ("MemoryError", ""),
    ("MemoryError", "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64"),
    ("OSError", "[Errno 12] Cannot allocate memory"),
    ("RuntimeError", "DataLoader worker is killed by signal: Bus error. It is possible that dataloader's workers "
     "are out of shared memory. Insufficient shared memory (shm)"),
    ("RuntimeError", "std::bad_alloc"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message"), OUT_OF_MEMORY_SPELLINGS)
def test_every_spelling_of_out_of_memory_is_understood(kind, message):
    status, reason = classify_outcome(Evidence(exit_code=1, exception_type=kind, message=message))
    assert status == "out_of_memory"
    assert message in reason


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (64x10 and 20x5)"),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
        ("ValueError", "batch_size 0 is below 1"),
        ("KeyError", "'memory'"),
    ],
)
def test_other_failures_are_errors(kind, message):
    assert classify_outcome(Evidence(exit_code=1, exception_type=kind, message=message)) == (
        "error",
        f"{kind}: {message}",
    )


def test_a_result_and_a_clean_exit_are_ok_whatever_stderr_says():
    evidence = Evidence(has_result=True, exit_code=0, stderr_tail="error: out of memory\n")
    assert classify_outcome(evidence) == ("ok", None)


def test_a_watchdog_outweighs_what_the_process_said():
    said = "process tree used 2.13 GiB, the limit is 2.00 GiB"
    evidence = Evidence(exit_code=-signal.SIGKILL, memory_watchdog=said, message="anything", exception_type="KeyError")
    assert classify_outcome(evidence) == ("out_of_memory", said)


def test_a_deadline_is_a_timeout_though_the_process_was_killed():
    evidence = Evidence(exit_code=-signal.SIGKILL, deadline="no sign of life for 30 s")
    assert classify_outcome(evidence) == ("timeout", "no sign of life for 30 s")


@pytest.mark.parametrize(("kills", "status"), [(0, "error"), (1, "out_of_memory")])
def test_sigkill_is_out_of_memory_only_where_the_kernel_killed_for_memory(kills, status):
    assert classify_outcome(Evidence(exit_code=-signal.SIGKILL, host_oom_kills=kills))[0] == status


def test_a_signal_is_named_with_the_last_words():
    status, reason = classify_outcome(Evidence(exit_code=-signal.SIGSEGV, stderr_tail="line\nFatal: stack\n"))
    assert (status, reason) == ("error", "ended by SIGSEGV; last line on stderr: Fatal: stack")


def test_an_abort_that_died_of_bad_alloc_is_out_of_memory():
    tail = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    assert classify_outcome(Evidence(exit_code=-signal.SIGABRT, stderr_tail=tail))[0] == "out_of_memory"


def test_a_silent_end_is_an_error():
    assert classify_outcome(Evidence(exit_code=0)) == ("error", "ended with exit code 0 and no result")
