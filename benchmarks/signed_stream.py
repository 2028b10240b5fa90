"""What the MAC of each frame between machines costs: CPU time per small message, and per MiB of large reads.

    python benchmarks/signed_stream.py

Both ends are processes of this machine, connected over loopback; without a MAC the same bytes go through the socket.
CPU times hardly depend on what else the machine does.
"""

import os
import resource
import socket
import time

from headway.state.signed_stream import FRAME_BYTES, SignedStream, _mac

KEYS = (b"k" * 32, b"l" * 32)
MESSAGE_BYTES = 300
FRAMES = 512


def cpu_per_call(content: bytes, seconds: float = 0.5) -> float:
    """CPU seconds of one MAC."""
    began, calls = time.process_time(), 0
    while time.process_time() - began < seconds:
        _mac(KEYS[0], calls, content)
        calls += 1
    return (time.process_time() - began) / calls


def transfer(signed: bool) -> tuple[float, float]:
    """CPU seconds per frame of the sending and of the receiving process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if not os.fork():
            with socket.create_connection(server.getsockname()) as end:
                sender, piece = SignedStream(end, *KEYS), bytes(FRAME_BYTES)
                for _ in range(FRAMES):
                    sender.sendall(piece) if signed else end.sendall(piece)
            os._exit(0)
        end, _ = server.accept()
    with end:
        receiver, out = SignedStream(end, KEYS[1], KEYS[0]), memoryview(bytearray(FRAME_BYTES))
        began, left = time.process_time(), FRAMES * FRAME_BYTES
        while left:
            if signed:
                receiver.fill(out)
                left -= len(out)
            else:
                left -= end.recv_into(out[: min(left, len(out))])
        receiving = time.process_time() - began
    os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    sending = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return sending / FRAMES, receiving / FRAMES


if __name__ == "__main__":
    small, large = cpu_per_call(bytes(MESSAGE_BYTES)), cpu_per_call(bytes(FRAME_BYTES))
    print(f"MAC of a message of {MESSAGE_BYTES} bytes: {1e6 * small:.1f} us of CPU at each end")
    print(f"MAC of large frames: {FRAME_BYTES / large / 1e6:,.0f} MB per second of CPU")
    for signed in (False, True):
        sending, receiving = transfer(signed)
        rate = FRAME_BYTES / max(sending, receiving) / 1e6
        times = f"{1e3 * sending:.2f} ms of CPU per MiB to send, {1e3 * receiving:.2f} to receive"
        print(f"{'with' if signed else 'without'} MAC: {times}; at most {rate:,.0f} MB/s on one core at each end")
