"""Runs a rank other than 0 (`rank_process.py`): `python -m meltcore.engine.distributed FOLDER RANK`."""

from meltcore.common.process import loading_modules

if __name__ == "__main__":
    with loading_modules():
        from meltcore.engine.distributed.rank_process import main
        from meltcore.engine.host.device import exit_process
    exit_process(main())
