"""A replica behind an agent, as on another machine; here both are this one. The agent is killed, and the stream goes on.

python examples/several_machines.py
"""

import asyncio
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from actorllm import AsyncLLM, SamplingParams

ADDRESS = "127.0.0.1:7040"


def start_agent(key: Path) -> subprocess.Popen[str]:
    """What `actorllm node` runs on the other machine."""
    command = [sys.executable, "-m", "actorllm", "node", "--listen", ADDRESS, "--key-file", str(key)]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    print(agent.stdout.readline().strip())
    return agent


async def main(key: Path, agent: subprocess.Popen[str]) -> None:
    sizes = {"data_parallel_size": 2, "data_parallel_size_local": 1, "ready_replicas": 2}
    async with AsyncLLM("storyteller", nodes=[ADDRESS], node_key_file=key, router="round-robin", **sizes) as llm:
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=1)
        await llm.complete("A first request, for replica 0.", params)
        async for output in llm.generate("Once upon a time", params):
            if len(output.outputs[0].token_ids) >= 20:
                agent.kill()
        print(output.outputs[0].text)
        print([(replica.number, replica.state) for replica in llm.health().replicas])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "fleet.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
        agent = start_agent(key)
        try:
            asyncio.run(main(key, agent))
        finally:
            agent.kill()
            agent.wait()
