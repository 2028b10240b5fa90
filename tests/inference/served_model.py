"""A small model behind a real server, in a thread of the test's own process."""

import socket
import threading
from typing import Any

import torch

from headway.data.tokenizer import train_tokenizer
from headway.inference import EngineOptions, LoadedModel, TextEngine
from headway.inference.server.service import EngineService
from headway.models import Decoder, empty_decoder, init_weights
from headway.recipe import Model
from lazy_imports import openai

MODEL = Model(vocab_size=320, layers=2, dim=32, heads=4, kv_heads=2, hidden=48, init_std=0.3)
TEXT = "def headway(steps):\n    return steps + 1  # Zeit läuft 時間 🎉\n"
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if shout is defined %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load(template: str | None = TEMPLATE) -> LoadedModel:
    decoder: Decoder = empty_decoder(MODEL)
    init_weights(decoder, seed=0)
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=300)
    return LoadedModel("tiny", decoder.eval(), torch.device("cpu"), 300, 200, tokenizer, chat_template=template)


class Served:
    """A server in a thread of this process, on a free port of loopback."""

    def __init__(
        self,
        api_key: str | None = None,
        max_waiting: int = 100,
        loaded: LoadedModel | None = None,
        **options: Any,
    ) -> None:
        import uvicorn

        from headway.inference.server.app import make_app

        self.loaded = loaded or load()
        self.service = EngineService(
            TextEngine(self.loaded, EngineOptions(cache_tokens=2000, **options)), max_waiting=max_waiting
        )
        self.app = make_app(self.service, "tiny", api_key)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key or "none", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()
        self.service.close()
        self.socket.close()

    @property
    def engine(self) -> Any:
        return self.service.engine.engine
