"""Serve a model that adds up, slowly, until a signal comes. Arguments: seconds of a batch, places in line."""

import sys
import time

from tests.unit.infer.fake_artefact import FakeArtefact, build_manifest

from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.service import Service, Settings
from fulltilt.infer.serve.serving import serve


class Slow(FakeArtefact):
    def answer(self, samples):
        time.sleep(float(sys.argv[1]))
        return super().answer(samples)


model = Slow(build_manifest(policy=Policy(max_batch=4)))
service = Service([model], Settings(n_waiting=int(sys.argv[2])))
serve(service, host="127.0.0.1", port=0, token=None, on_start=lambda url: print(url, flush=True))
service.close()
print(sum(map(len, model.calls)), flush=True)
