"""Runs an API server process (`api_server.py`): `python -m meltcore.fleet.api_server_main`."""

import sys

from meltcore.process import loading_modules

if __name__ == "__main__":
    with loading_modules():
        from meltcore.fleet.api_server import main
    sys.exit(main())
