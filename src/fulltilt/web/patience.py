"""Hang up on clients that send or read too slowly: a connection must not be held for nothing."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0  # for the whole head of a request
PIECE_S = 60.0  # for the next piece of a body, and for a client that reads nothing


class PatientProtocol(H11Protocol):
    """Speaks HTTP as uvicorn does, and waits for nothing longer than it says above."""

    _sending: asyncio.TimerHandle | None = None  # until when the client has to send
    _reading: asyncio.TimerHandle | None = None  # until when it has to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._sending, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_head = self.conn.their_state is h11.IDLE
        if self._sending is not None and not is_head:
            self._sending.cancel()
            self._sending = None
        if self.conn.their_state is h11.SEND_BODY:
            self._expect(PIECE_S)
        elif is_head and self._sending is None:  # of the next request
            self._expect(HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def _expect(self, seconds: float) -> None:
        self._sending = self.loop.call_later(seconds, self._end_sender, seconds)

    def _end_sender(self, seconds: float) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._expect(seconds)
        else:
            self.transport.abort()

    def _watch_reader(self, n_before: int | None) -> None:
        """Look again and again at what waits to be read; where it is not less than before, nobody reads."""
        n_bytes = self.transport.get_write_buffer_size()
        if n_before is not None and n_bytes >= n_before:
            self.transport.abort()
        else:
            self._reading = self.loop.call_later(PIECE_S, self._watch_reader, n_bytes)
