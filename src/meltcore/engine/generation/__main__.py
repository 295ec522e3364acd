"""Runs the engine behind two pipes (`json_lines.py`): `python -m meltcore.engine.generation`."""

from meltcore.common.process import loading_modules

if __name__ == "__main__":
    with loading_modules():
        from meltcore.engine.generation.json_lines import main
        from meltcore.engine.host.device import exit_process
    exit_process(main())
