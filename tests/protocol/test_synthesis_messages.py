"""Messages about synthesis survive the sockets' encoding beside those of the other tasks."""

import msgspec

from meltcore.protocol.batch import BatchStats
from meltcore.protocol.engines import from_engine
from meltcore.protocol.synthesis import SynthesisOutputs, Synthesize, Synthesized, ToEngine


def test_messages_are_read_by_their_tags() -> None:
    request = Synthesize(request_id="a", text="ನಮಸ್ಕಾರ.", reference=b"\0\0\0\0", reference_text="x", num_steps=16)
    outputs = SynthesisOutputs([Synthesized(request_id="a", samples=b"\1\2\3\4", chunk=1, chunks=2)], BatchStats(), 3.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([request]), type=list[ToEngine]) == [request]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=from_engine())
    assert decoded == outputs
    assert decoded.with_outputs([]).outputs == []
