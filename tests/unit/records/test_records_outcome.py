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
    ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ("RuntimeError", "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("RuntimeError", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ("RuntimeError", "hipErrorOutOfMemory"),
    ("RuntimeError", "miopenStatusAllocFailed"),
    ("RuntimeError", "UR error: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    ("DistBackendError", "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"),
    ("DistBackendError", "Error while creating shared memory segment /dev/shm/nccl-aB, error: No space left on device"),
    ("RuntimeError", "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"),
    ("OSError", "[Errno 28] No space left on device: '/dev/shm/psm_1'"),
    ("OSError", "[Errno 28] No space left on device: '/psm_1a2b'"),
    ("OSError", "Can't synchronously read data (memory allocation failed for raw data chunk)"),
    ("BackendCompilerFailed", "backend='inductor' raised:\nOutOfMemoryError: Tried to allocate 2.00 GiB"),
    ("error", "OpenCV(4.9.0) error: (-4:Insufficient memory) Failed to allocate 1244160000 bytes"),
    ("RuntimeError", "could not create a primitive"),
    ("RuntimeError", "could not execute a primitive"),
    ("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 16106127360 bytes."),
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
        ("KeyError", "'out of memory'"),
        ("AttributeError", "module 'torch.cuda' has no attribute 'OutOfMemoryError'"),
        ("RuntimeError", "module 'torch.cuda' has no attribute 'OutOfMemoryError'"),
        ("ImportError", "libgomp.so.1: cannot allocate memory in static TLS block"),
        ("OSError", "libgomp.so.1: cannot allocate memory in static TLS block"),
        ("ValueError", "row 7 lies out of memory map bounds"),
        ("OSError", "[Errno 28] No space left on device"),
        ("OSError", "[Errno 28] No space left on device: '/data/cache.bin'"),
        ("OutOfResources", "out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        ("RuntimeError", "could not create a primitive descriptor for a convolution forward propagation primitive"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
        ("RuntimeError", "Unable to allocate port 8080"),
        ("WorkerDiedError", "data worker (pid 7) died: killed by SIGKILL; most often a memory limit ended it"),
    ],
)
def test_other_failures_are_errors(kind, message):
    assert classify_outcome(Evidence(exit_code=1, exception_type=kind, message=message)) == (
        "error",
        f"{kind}: {message}",
    )


WATCHED = "process tree used 2.13 GiB, the limit is 2.00 GiB"


@pytest.mark.parametrize(
    ("evidence", "end"),
    [
        ({"has_result": True, "exit_code": 0, "stderr_tail": "error: out of memory\n"}, ("ok", None)),
        (
            {"exit_code": -9, "memory_watchdog": WATCHED, "message": "anything", "exception_type": "KeyError"},
            ("out_of_memory", WATCHED),
        ),
        ({"exit_code": -9, "deadline": "no sign of life for 30 s"}, ("timeout", "no sign of life for 30 s")),
        ({"exit_code": 0}, ("error", "ended with exit code 0 and no result")),
        (
            {"exit_code": -signal.SIGSEGV, "stderr_tail": "line\nFatal: stack\n"},
            ("error", "ended by SIGSEGV; last line on stderr: Fatal: stack"),
        ),
        (
            {"exit_code": 1, "exception_type": "RuntimeError", "message": "step 3 failed",
             "exception_types": ("RuntimeError", "Exception", "OutOfMemoryError")},
            ("out_of_memory", "RuntimeError: step 3 failed"),
        ),
    ],
)  # fmt: skip
def test_how_a_process_ended_outweighs_what_it_said(evidence, end):
    assert classify_outcome(Evidence(**evidence)) == end


@pytest.mark.parametrize(("kills", "status"), [(0, "error"), (1, "out_of_memory")])
def test_sigkill_is_out_of_memory_only_where_the_kernel_killed_for_memory(kills, status):
    assert classify_outcome(Evidence(exit_code=-signal.SIGKILL, host_oom_kills=kills))[0] == status


@pytest.mark.parametrize(("kills", "status"), [(0, "error"), (1, "out_of_memory")])
@pytest.mark.parametrize("message", ["data worker (pid 7) died: killed by SIGKILL; …", "DataLoader worker (pid 7) is "
                                     "killed by signal: Killed. "])  # fmt: skip
def test_a_killed_worker_is_out_of_memory_only_where_the_kernel_killed_for_memory(message, kills, status):
    evidence = Evidence(exit_code=1, exception_type="WorkerDiedError", message=message, host_oom_kills=kills)
    assert classify_outcome(evidence)[0] == status


@pytest.mark.parametrize(
    ("number", "had_run_out", "status"),
    [
        (signal.SIGSEGV, False, "error"),
        (signal.SIGSEGV, True, "out_of_memory"),
        (signal.SIGKILL, True, "error"),  # somebody ended it
    ],
)
def test_a_crash_is_out_of_memory_only_where_memory_had_run_out_before(number, had_run_out, status):
    assert classify_outcome(Evidence(exit_code=-number, had_run_out=had_run_out))[0] == status


DUMP = """Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
  File "/site/loader.py", line 7 in wait

Current thread 0x00008f (most recent call first):
  File "/site/model.py", line 12 in forward
"""


def test_a_crash_says_where_it_happened():
    status, reason = classify_outcome(Evidence(exit_code=-signal.SIGSEGV, stderr_tail="step 3\n" + DUMP))
    assert (status, reason) == ("error", 'ended by SIGSEGV at File "/site/model.py", line 12 in forward')


@pytest.mark.parametrize(
    "words",
    [
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
        "memory allocation of 4294967296 bytes failed\n",
    ],
)
@pytest.mark.parametrize("dump", ["", DUMP])
def test_the_last_words_of_an_abort_count_before_the_stacks(words, dump):
    status, reason = classify_outcome(Evidence(exit_code=-signal.SIGABRT, stderr_tail=words + dump))
    assert (status, reason) == ("out_of_memory", words.splitlines()[-1].strip())


@pytest.mark.parametrize(
    ("tail", "status"),
    [
        ("Traceback (most recent call last):\n  File 'x'\nMemoryError\n", "out_of_memory"),
        ("numpy._core._exceptions._ArrayMemoryError: no room\n", "out_of_memory"),
        ("CUDA error: out of memory\n" + "step\n" * 10, "error"),  # it went on after that
        ("KeyError: 'MemoryError'\n", "error"),
    ],
)
def test_a_process_that_could_only_write_to_stderr_is_judged_by_its_end(tail, status):
    assert classify_outcome(Evidence(exit_code=1, stderr_tail=tail))[0] == status


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("ValueError", "my.py:4 in step: ValueError: no"), ("MemoryError", "MemoryError: no")],  # a plan ran out, no line
)
def test_an_error_is_told_with_the_users_line(kind, reason):
    evidence = Evidence(exit_code=1, exception_type=kind, message="no", place="my.py:4 in step")
    assert classify_outcome(evidence)[1] == reason


def test_a_reason_holds_nothing_that_steers_a_terminal():
    message = "\x1b[31mbad\x1b[0m \x1b]0;title\x07weights\x1b]8;;x\x1b\\!\x9b2J\r\nsecond\tline\x00"
    _, reason = classify_outcome(Evidence(exit_code=1, exception_type="ValueError", message=message))
    assert reason == "ValueError: bad weights!2J\nsecond\tline"
