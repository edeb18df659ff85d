"""A server process for tests: its settings come as JSON in the one argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mla_serve.engine.embedded.messages import EngineConfig
from mla_serve.errors import UserError
from mla_serve.server.run import serve
from mla_serve.server.settings import ServerSettings


def main() -> int:
    arguments = json.loads(sys.argv[1])
    engine = EngineConfig(**arguments.pop("engine"))
    for name in ("api_keys", "allow_origins"):
        arguments[name] = tuple(arguments.get(name, ()))
    if "chat_template" in arguments:
        arguments["chat_template"] = Path(arguments["chat_template"])
    try:
        return serve(ServerSettings(engine=engine, **arguments))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 3


if __name__ == "__main__":
    sys.exit(main())
