import pytest
import torch


@pytest.fixture(autouse=True)
def _keep_what_is_the_process_own():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    if torch.are_deterministic_algorithms_enabled():  # to turn it off loads Inductor
        torch.use_deterministic_algorithms(False)
