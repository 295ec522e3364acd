"""Settings of foreign servers: what is refused, and how they pass between processes."""

from typing import Any

import msgspec
import pytest

from meltcore.common.errors import ConfigError
from meltcore.settings.server_config import ForeignConfig, ServerConfig

URL = "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "a: give either urls or command; got neither"),
        ({"urls": (URL,), "command": "vllm"}, "got both"),
        ({"served_model_name": ()}, "needs a name"),
        ({"urls": ("127.0.0.1:8001",)}, "url must be an address such as http://127.0.0.1:8001; got '127.0.0.1:8001'"),
        (
            {"urls": ("http://user:secret@host",)},
            "url must have no user, password, query or fragment; got 'http://***@host'",
        ),
        ({"urls": ("file:///etc/passwd",)}, "url must be an address such as"),
        ({"urls": (URL,), "paths": ("/v1/x HTTP/1.1\r\nx: y",)}, "paths must be like"),
        ({"urls": (URL,), "first_byte_timeout_s": 0.0}, "a: first_byte_timeout_s must be at least 0.05; got 0.0"),
        ({"urls": (URL,), "connect_timeout_s": float("nan")}, "connect_timeout_s must be at least"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ForeignConfig(**({"served_model_name": ("a",)} | fields))
    assert message in str(error.value)


def test_settings_pass_between_processes() -> None:
    foreign = ForeignConfig(served_model_name=("a", "b"), urls=(URL, "http://127.0.0.1:8002"), environment={"X": "1"})
    config = ServerConfig(models=(), foreign=(foreign, ForeignConfig(served_model_name=("c",), command="vllm")))
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config
    assert config.replicas == [2, 1]
