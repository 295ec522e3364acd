"""Runs an API server process (`api_server.py`): `python -m meltcore.serve.api_server_main`."""

import sys

from meltcore.common.process import loading_modules

if __name__ == "__main__":
    with loading_modules():
        from meltcore.serve.api_server import main
    sys.exit(main())
