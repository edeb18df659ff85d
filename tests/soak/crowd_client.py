"""A crowd of streaming clients in one process: `python -m tests.soak.crowd_client URL CLIENTS SECONDS CORE`; JSON on stdout.

Each sends request after request until the time is up, over plain sockets: an HTTP library would cost more than the server.
Every stream's end is checked; every other request is sent on a connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

BODY = json.dumps({"prompt": "XY", "max_tokens": 8, "ignore_eos": True, "stream": True}).encode()
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
END = b"0\r\n\r\n"  # of a chunked body


class Crowd:
    """What its clients found."""

    def __init__(self, host: str, port: int, until: float) -> None:
        self.host, self.port, self.until = host, port, until
        self.request = HEAD.format(host=host, length=len(BODY)).encode() + BODY
        self.statuses: Counter[str] = Counter()
        self.first: list[float] = []  # seconds to the first bytes
        self.whole: list[float] = []
        self.open = self.most = 0

    async def client(self) -> None:
        while time.monotonic() < self.until:
            try:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                self.statuses["refused"] += 1
                continue
            try:
                for _ in range(2):
                    self.statuses[await self.ask(reader, writer)] += 1
            except (OSError, asyncio.IncompleteReadError):
                self.statuses["cut"] += 1
            finally:
                writer.close()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The status of one request; "unfinished" where its stream did not end as it should."""
        self.open += 1
        self.most = max(self.most, self.open)
        begin = time.monotonic()
        try:
            writer.write(self.request)
            head = await reader.readuntil(b"\r\n\r\n")
            self.first.append(time.monotonic() - begin)
            status = head[9:12].decode()
            if status != "200":
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                return status
            data = await reader.readuntil(END)
            self.whole.append(time.monotonic() - begin)
            return status if b"data: [DONE]" in data else "unfinished"
        finally:
            self.open -= 1


async def main() -> None:
    address, clients, seconds, core = urlsplit(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    os.sched_setaffinity(0, {core})
    assert address.hostname is not None
    assert address.port is not None
    crowd = Crowd(address.hostname, address.port, time.monotonic() + seconds)
    await asyncio.gather(*(crowd.client() for _ in range(clients)))
    figures = {"median_first_s": statistics.median(crowd.first), "median_s": statistics.median(crowd.whole),
               "longest_s": max(crowd.whole)}  # fmt: skip
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"statuses": crowd.statuses, "most_at_once": crowd.most, **rounded}))


if __name__ == "__main__":
    asyncio.run(main())
