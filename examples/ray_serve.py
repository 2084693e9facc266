"""An engine in each replica of a Ray Serve deployment: it streams text over HTTP.

pip install actorllm "ray[serve]"
python examples/ray_serve.py
"""

import urllib.request
from collections.abc import AsyncIterator

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams


@serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1})
class Storyteller:
    def __init__(self, model: str) -> None:
        self.llm = AsyncLLM(model, num_threads=1)  # as many threads as cores were asked for

    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self.text((await request.body()).decode()), media_type="text/plain")

    async def text(self, prompt: str) -> AsyncIterator[str]:
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=1, output_kind=RequestOutputKind.DELTA)
        async for output in self.llm.generate(prompt, params):  # a client that leaves aborts it
            yield output.outputs[0].text

    async def check_health(self) -> None:
        if self.llm.health().state == "dead":  # Serve makes another replica
            raise RuntimeError("the engine is dead")

    def __del__(self) -> None:
        self.llm.shutdown()


app = Storyteller.bind("storyteller")

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    serve.start(http_options={"port": 8321})
    serve.run(app)
    print("Once upon a time", end="")
    with urllib.request.urlopen("http://127.0.0.1:8321/", data=b"Once upon a time") as answer:
        for piece in iter(lambda: answer.read1(100), b""):
            print(piece.decode(), end="", flush=True)
    print()
    serve.shutdown()
    ray.shutdown()
