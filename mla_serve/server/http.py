"""uvicorn's HTTP protocol with a bound on what a client may send before anybody has looked at it."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT = 256 * 1024  # bytes; the longest read of a socket is as much


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that sends more than HEAD_LIMIT bytes without completing a head or bringing any of a body.

    The parser keeps a request line, a header or a trailer until it is whole, before keys are asked for, so without a bound one
    client without a key could fill the memory. Answers 400 in plain text, as uvicorn does for what is no HTTP.
    """

    _unseen = 0  # bytes since the parser last handed something on

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._unseen += len(data)
        if self._unseen > HEAD_LIMIT and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._unseen = -HEAD_LIMIT  # the rest of this read may be another's beginning
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unseen = -HEAD_LIMIT
        super().on_body(body)
