"""Serve a model that writes a word every so many seconds, until a signal comes. Argument: seconds of a word."""

import sys
import time

from tests.unit.infer.fake_artefact import FakeArtefact, build_manifest

from fulltilt.infer.generate import endpoint
from fulltilt.infer.serve.service import Service, Settings
from fulltilt.infer.serve.serving import serve


class Slow:
    n_vocabulary, n_written = 100, 0

    def check_lengths(self, prompts, n_new):
        pass

    def __call__(self, prompts, n_new, on_words, sampling):
        for word in range(n_new):
            time.sleep(float(sys.argv[1]))
            self.n_written += 1
            if on_words([word]):
                return


writer = Slow()
endpoint.open_text_service = lambda artefact, table: endpoint.TextService(writer, None)
service = Service([FakeArtefact(build_manifest(writes_text=True))], Settings())
serve(service, host="127.0.0.1", port=0, token=None, on_start=lambda url: print(url, flush=True))
service.close()
print(writer.n_written, flush=True)
