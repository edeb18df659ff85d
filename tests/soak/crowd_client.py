"""A crowd of streaming clients in one process: `python -m tests.soak.crowd_client URL CLIENTS SECONDS`; JSON on stdout.

Each sends request after request until the time is up, over plain sockets: an HTTP library would cost more than the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

BODY = json.dumps({"prompt": "XY", "max_tokens": 8, "ignore_eos": True, "stream": True}).encode()


async def one(host: str, port: int) -> str:
    """The status of one request, "cut" where its stream did not end as it should."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return "refused"
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(BODY)}\r\nConnection: close\r\n\r\n".encode() + BODY)
        data = await reader.read()
    except OSError:
        return "cut"
    finally:
        writer.close()
    status = data[9:12].decode() or "cut"
    return status if status != "200" or b"data: [DONE]" in data else "cut"


async def client(host: str, port: int, until: float, found: Counter[str]) -> None:
    while time.monotonic() < until:
        found[await one(host, port)] += 1


async def main() -> None:
    address, clients, seconds = urlsplit(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    assert address.hostname is not None
    assert address.port is not None
    found: Counter[str] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(*(client(address.hostname, address.port, until, found) for _ in range(clients)))
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
