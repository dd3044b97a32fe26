"""Serve one model in one way until it is ended: ``python benchmarks/_infer_servers.py WAY PORT MODEL``.

The peers import nothing of fulltilt: each runs as its own documentation has it. MODEL is "noop", which answers zeros,
or "BASE,SAMPLE", which sleeps so many milliseconds a batch and a sample.
"""

from __future__ import annotations

import sys
import time

from fastapi import FastAPI
from pydantic import BaseModel

try:
    from litserve import LitAPI, LitServer
except ImportError:  # in ours
    LitAPI = LitServer = object


class Body(BaseModel):
    inputs: list[list[float]]


class NoOp(LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["inputs"]

    def predict(self, inputs):
        return [[0.0, 0.0] for _ in inputs]

    def encode_response(self, outputs):
        return {"outputs": outputs}


def serve_ours(port: int, model: str) -> None:
    from pathlib import Path

    import numpy as np

    from fulltilt.infer.manifest import InputSpec, Manifest, Policy
    from fulltilt.infer.serve.service import Service, Settings
    from fulltilt.infer.serve.serving import serve

    base_s, sample_s = (0.0, 0.0) if model == "noop" else (float(word) / 1000 for word in model.split(","))

    class Sleeper:
        manifest = Manifest(
            name=model, plan={}, device="cpu", inputs=(InputSpec(name="x", dtype="float32", shape=(None,)),),
            max_length=64, policy=Policy(max_batch=16), built_with={}, n_parameters=0, files={}, config={},
        )  # fmt: skip
        samples = tuple((np.full(16, n, np.float32),) for n in range(8))
        notes, folder = (), Path()

        def answer(self, samples):
            if model != "noop":
                time.sleep(base_s + sample_s * len(samples))
            return [(np.zeros(2, np.float32),) for _ in samples]

    settings = Settings() if model == "noop" else Settings(cache_mib=0, n_waiting=4096)
    service = Service([Sleeper()], settings)
    serve(service, host="127.0.0.1", port=port, token=None, on_start=lambda url: None)


def serve_fastapi(port: int, model: str) -> None:
    import uvicorn

    app = FastAPI()

    @app.post("/v1/predict")
    def predict(body: Body) -> dict[str, list[list[float]]]:
        return {"outputs": [[0.0, 0.0] for _ in body.inputs]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def serve_litserve(port: int, model: str) -> None:
    server = LitServer(NoOp(api_path="/v1/predict"), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)


WAYS = {"ours": serve_ours, "fastapi": serve_fastapi, "litserve": serve_litserve}

if __name__ == "__main__":
    WAYS[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
