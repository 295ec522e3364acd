"""Runs the engine behind two pipes (`json_lines.py`): `python -m meltcore.engine.host`."""

from meltcore.process import loading_modules

if __name__ == "__main__":
    with loading_modules():
        from meltcore.engine.host.device import exit_process
        from meltcore.engine.host.json_lines import main
    exit_process(main())
